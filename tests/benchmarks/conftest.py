"""Small real runs of benchmarks, without the seconds that each of their processes takes to import torch."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from support.forked import popen


@pytest.fixture
def forked_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a loose bed starts are forked; one of the small runs starts real interpreters."""
    monkeypatch.setattr(
        "benchmarks.testbed.bed.subprocess", SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=popen)
    )
