"""The benchmark of residency: its arithmetic, and a small run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.serving.residency import ResidencyResult, ResidencyRow


def row(**changes: Any) -> ResidencyRow:
    first: dict[str, Any] = {
        "model": "resnet18", "way": "processes", "shared": True, "jobs": 1, "backbone_bytes": 1000,
        "mapped_bytes": 1000, "grown_bytes": 2000, "first_seconds": 0.5, "first_read_bytes": 1000,
        "later_seconds": (), "later_cpu_seconds": (), "later_read_bytes": 0,
    }  # fmt: skip
    return ResidencyRow(**{**first, **changes})


def test_ratios_are_over_one_job_of_the_same_kind() -> None:
    alone, own = row(), row(shared=False, mapped_bytes=0, grown_bytes=1500)
    several = row(
        jobs=3,
        mapped_bytes=1100,
        grown_bytes=3000,
        later_seconds=(0.25, 0.5),
        later_cpu_seconds=(0.125, 0.125),
    )
    private = row(
        jobs=3,
        shared=False,
        mapped_bytes=0,
        grown_bytes=6000,
        later_seconds=(0.5, 0.5),
        later_cpu_seconds=(0.5, 0.5),
    )
    result = ResidencyResult(rows=(alone, own, several, private), conditions={"cores": 2})
    assert [ratios for _, *ratios in result.ratios()] == [[1.1, 1.5], [0.0, 4.0]]
    table = "\n".join(result.table())
    assert "375.0     500.0     125.0" in table and " 1.100  1.500" in table and "4.000" in table
    assert result.to_json()["goals"] == {"memory": 1.05, "seconds": 0.01}


@pytest.mark.long
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "residency.json"
    size = ("--image-size", "64")
    assert (
        main(["residency", "--model", "mobilenet_v3_small", *size, "--jobs", "2", "--json", str(path)]) == 0
    )
    found = json.loads(path.read_text())
    assert [(r["jobs"], r["way"], r["shared"]) for r in found["rows"]] == [
        (1, "processes", True), (2, "processes", True), (2, "threads", True),
        (1, "processes", False), (2, "processes", False), (2, "threads", False),
    ]  # fmt: skip
    one, *several = (r for r in found["rows"] if r["shared"])
    assert one["first_read_bytes"] <= one["backbone_bytes"] <= 1.2 * one["mapped_bytes"]
    for shared in several:
        assert shared["later_read_bytes"] == 0 and len(shared["later_seconds"]) == 1
        assert shared["mapped_bytes"] <= 1.05 * one["mapped_bytes"]
    assert "over one job" in capsys.readouterr().out
