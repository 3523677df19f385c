"""Slow tests go to test processes by file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.by_file import FIRST, group_of, leaves_nothing
from support.case_marks import mark_cases

ROOT = Path(__file__).parents[1]


def test_files_that_come_first_are_there() -> None:
    assert not [file for group in FIRST for file in group if not (ROOT / file).is_file()]


def test_a_file_is_together_and_files_with_shared_fixtures_are() -> None:
    assert (
        group_of("tests/a.py::test_one[x::y]")
        == group_of("tests/a.py::test_two")
        != group_of("tests/b.py::test")
    )
    assert len({group_of(f"{file}::test") for file in FIRST[0]}) == 1


@pytest.mark.parametrize(
    ("source", "slow", "fast"),
    [
        ("def test_a(): ...", False, True),
        ("@pytest.mark.slow\ndef test_a(): ...\ndef test_b(): ...", True, True),
        ("@pytest.mark.long\ndef test_a(): ...\ndef test_b(): ...", True, True),
        ("M = [pytest.param(1, marks=pytest.mark.slow), 2]", True, True),
        ('@pytest.mark.slow_except("a")\ndef test_a(x): ...', True, True),
        ("pytestmark = pytest.mark.slow\ndef test_a(): ...", True, False),
        ("pytestmark = [\n    pytest.mark.slow,\n    pytest.mark.timeout(900),\n]", True, False),
        ("pytestmark = pytest.mark.skipif(True, reason='mark.slow')", True, True),
    ],
)
def test_files_without_a_chosen_test_are_not_imported(source: str, slow: bool, fast: bool) -> None:
    assert leaves_nothing("slow and not long", source) == leaves_nothing("long", source) == (not slow)
    assert leaves_nothing("not slow", source) == (not fast)
    assert not leaves_nothing("", source) and not leaves_nothing("gpu", source)


class Case:
    """What :func:`mark_cases` needs of a test."""

    def __init__(self, case: str, **marks: tuple[str, ...]) -> None:
        self.nodeid, self.callspec = f"tests/a.py::test[{case}]", SimpleNamespace(id=case)
        self._marks, self.added = marks, list[str]()

    def iter_markers(self, name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(args=self._marks[name])] if name in self._marks else []

    def add_marker(self, name: str) -> None:
        self.added.append(name)


def test_cases_become_slow_and_long_by_their_names() -> None:
    cases = [Case(case, slow_except=("a", "b"), long_cases=("d",)) for case in "abcd"]
    assert mark_cases(cases) == []
    assert [case.added for case in cases] == [[], [], ["slow"], ["slow", "long"]]
    (line,) = mark_cases([Case("a", slow_except=("a", "lost"))])
    assert line == "tests/a.py::test: slow_except names ['lost'], which are no cases of it"


def test_whoever_uses_the_store_of_the_session_is_in_its_group() -> None:
    users = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests" / "integration").glob("test_*.py")
        if any(
            word in path.read_text(encoding="utf-8")
            for word in ("swift: Swift", "swift_copies: Swift", "packed: Swift")
        )
    ]
    assert users and set(users) <= set(FIRST[0])
