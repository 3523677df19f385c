"""The benchmark of a link that changes: its arithmetic, and one small run on the test bed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.split.steps import StepsResult, Stretch, loss_difference, rows_of, stretches_of
from benchmarks.testbed.testbed import why_not


def epoch(number: int, seconds: float, split: int) -> dict[str, Any]:
    return {"epoch": number, "seconds": seconds, "split": split, "splits": [[split, 10]], "loss": 1.0}


def change(number: int, batch: int, why: str = "bandwidth is 1 Mbit/s") -> dict[str, Any]:
    return {"epoch": number, "batch": batch, "from": 3, "to": 5, "why": why}


def test_stretches_of_a_report() -> None:
    report = {
        "epochs": [epoch(i, float(i), 3 if i < 2 else 5) for i in range(4)],
        "plan": {"changes": [change(1, 0, "profiled"), change(2, 4), change(3, 4)]},
    }
    first, second = stretches_of(report, [9e6, 1e6], 2)
    assert first == Stretch(
        bandwidth=9e6, seconds=(0.0, 1.0), splits=(3, 3), changes=("batch 10: 3 to 5, profiled",)
    )
    assert second.seconds == (2.0, 3.0) and second.splits == (5, 5)
    assert [c.partition(":")[0] for c in second.changes] == ["batch 4", "batch 14"]


def stretch(bandwidth: float, *seconds: float, split: int = 3) -> Stretch:
    return Stretch(bandwidth=bandwidth, seconds=seconds, splits=(split,) * len(seconds), changes=())


def test_a_stretch_ends_beside_the_run_of_its_turn_that_knew() -> None:
    known = {9e6: [stretch(9e6, 50.0, 1.0, 3.0, 2.0), stretch(9e6, 50.0, 4.0)], 1e6: [stretch(1e6, 9.0)] * 2}
    stepped = [[stretch(9e6, 9.0, 2.2), stretch(1e6, 9.0)], [stretch(9e6, 9.0, 4.0), stretch(1e6, 8.1)]]
    first, second = rows_of(known, stepped)
    assert first.ratios == (1.1, 1.0) and first.ratio == pytest.approx(1.05)
    assert (first.seconds, first.known_seconds) == (pytest.approx(3.1), pytest.approx(3.0))
    assert second.ratios == (1.0, 0.9) and second.bandwidth == 1e6


def test_the_verdict() -> None:
    (row,) = rows_of({9e6: [stretch(9e6, 1.0)]}, [[stretch(9e6, 1.2)]])
    result = StepsResult(rows=(row,), without={"holds": (row,)}, loss_difference=0.0, conditions={})
    assert result.worst == 1.2 and "missed" in result.table()[-2]
    row = replace(row, ratios=(1.1,))
    assert "reached" in StepsResult(rows=(row,), without={}, loss_difference=0.0, conditions={}).table()[-2]
    assert "no change" in result.table()[2]
    assert any("without holds" in line and "1.200" in line for line in result.table())


def test_losses() -> None:
    assert loss_difference([[2.0, 1.0], [2.0, 1.0, 0.5]]) == 0.0
    assert loss_difference([[2.0, 1.0], [2.0, 1.1]]) == pytest.approx(0.1)


@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=f"no test bed here: {why_not()}")
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--samples", "128", "--bs", "32", "--epochs", "2", "--repeats", "1"]
    link = ["--bandwidth", "100Mbps", "--bandwidth", "8Mbps"]
    off = ["--off", "holds"]
    assert main(["steps", *sizes, *link, *off, "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "goal: each stretch ends within 10%" in out and "test bed" in out
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["bandwidth"] for row in found["rows"]] == [100e6, 8e6]
    assert [row["bandwidth"] for row in found["without"]["holds"]] == [100e6, 8e6]
    assert found["loss_difference"] < 1e-4 and all(row["seconds"] > 0 for row in found["rows"])


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--repeats", "0"], ["--bandwidth", "fast"], ["--bs", "x"], ["--off", "x"]):
        assert main(["steps", *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
