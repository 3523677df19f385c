"""Scheduling of test processes by file; it needs pytest-xdist, which a run in one process does without."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from support.by_file import group_of


class ByFile(LoadScopeScheduling):
    """A process gets all tests of a file, or of a group of files, at once, in the order of collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        """Schedule the tests of ``config``."""
        config.option.loadscopereorder = False  # by their numbers of tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
