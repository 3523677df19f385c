"""Slow tests go to test processes by file."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.by_file import FIRST, group_of, leaves_nothing

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
        ("pytestmark = pytest.mark.slow\ndef test_a(): ...", True, False),
        ("pytestmark = [\n    pytest.mark.slow,\n    pytest.mark.timeout(900),\n]", True, False),
        ("pytestmark = pytest.mark.skipif(True, reason='mark.slow')", True, True),
    ],
)
def test_files_without_a_chosen_test_are_not_imported(source: str, slow: bool, fast: bool) -> None:
    assert leaves_nothing("slow and not long", source) == leaves_nothing("long", source) == (not slow)
    assert leaves_nothing("not slow", source) == (not fast)
    assert not leaves_nothing("", source) and not leaves_nothing("gpu", source)


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
