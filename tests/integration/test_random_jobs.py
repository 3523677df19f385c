"""Jobs that a seed draws, disturbed and run as it says: the same numbers as the plainest training of the same.

More of them: ``RANDOM_JOBS=100-199 python -m pytest -m long tests/integration/test_random_jobs.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.random_data import make_store
from support.random_jobs import draw
from support.random_runs import check

SEEDS = (46, 47, 101)
FIRST, _, LAST = os.environ.get("RANDOM_JOBS", "100-119").partition("-")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("drawn"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_some_jobs(store: Path, seed: int, tmp_path: Path) -> None:
    job = draw(seed)
    print(job)
    assert check(job, store, tmp_path) == "equal"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(int(FIRST), int(LAST or FIRST) + 1))
def test_many_jobs(store: Path, seed: int, tmp_path: Path) -> None:
    job = draw(seed)
    print(job)
    print("result:", check(job, store, tmp_path))
