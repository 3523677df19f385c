"""Alternating batches on recorded profiles: what is priced, and what an empty sweep says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.split.alternate import alternate
from benchmarks.testbed.cells import read
from hapi.errors import UsageError
from hapi.profiler.stages.alternation import GAIN

RECORDED = Path(__file__).parents[2] / "docs" / "measurements" / "sweep-2core-2026-11-23.jsonl"


def test_a_pair_is_never_slower_and_is_told_where_it_is_faster() -> None:
    records = [r for r in read(RECORDED) if r.get("cell", "vgg19/64").startswith("vgg19/64")]
    found = alternate(records, speeds=(1.0, 8.0))
    assert len(found.rows) == 6 and {row.speed for row in found.rows} == {1.0, 8.0}
    for row in found.rows:
        assert (row.ratio <= 1 - GAIN and row.pair_bytes > 0) if row.pair else row.ratio == 1
    better = [row for row in found.rows if row.pair is not None]
    assert better and all(row.speed == 1.0 for row in better)
    lines = found.table()
    assert lines[-2].startswith(
        f"server 1x: two splits beat the best one in {len(better)} of 3 cells; there 0."
    )
    assert lines[-1] == "server 8x: two splits beat the best one in 0 of 3 cells"
    assert found.to_json()["benchmark"] == "alternate"


def test_an_empty_sweep() -> None:
    with pytest.raises(UsageError, match=r"run .python -m benchmarks sweep. first"):
        alternate([])
