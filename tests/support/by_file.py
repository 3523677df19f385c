"""Which test process runs which of the slow tests: those of a file together, and the files that take longest first.

What a file's tests share is then made once. ``--dist loadgroup`` with ``xdist_group`` was to do that; it renames tests,
which pytest 9.2 no longer lets it, and says nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

FIRST: tuple[tuple[str, ...], ...] = (
    (
        "tests/integration/test_swift.py",
        "tests/integration/test_swift_faults.py",
        "tests/integration/test_swift_models.py",
    ),
    ("tests/integration/test_planning_jobs.py",),
    ("tests/integration/test_ray_fleet.py",),
)
"""Files whose slow tests take long, the longest first; those in one group share fixtures of the session."""
_GROUPS = {file: number for number, group in enumerate(FIRST) for file in group}


def longest_first(items: list[pytest.Item]) -> None:
    """Sort them by file."""
    items.sort(key=lambda item: _GROUPS.get(_file_of(item.nodeid), len(FIRST)))


class ByFile(LoadScopeScheduling):
    """A process gets all tests of a file, or of a group of files, at once, in the order of collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # by their numbers of tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = _file_of(nodeid)
        return str(_GROUPS.get(file, file))


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
