"""The overlap benchmark: its arithmetic, and one small run on the test bed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.split.overlap import OverlapResult, OverlapRow, _row
from benchmarks.testbed.testbed import why_not


def epoch(seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "split": 11,
        "seconds": seconds,
        "server_seconds": 4.0,
        "client_seconds": 1.0,
        "bytes_received": 1_000_000,
        "loss": 1.0,
        **more,
    }


def test_a_row_is_the_median_epoch_without_the_first() -> None:
    report = {"epochs": [epoch(100.0), epoch(4.4), epoch(5.0), epoch(4.2)]}
    row = _row("resnet18", 10e6, 4e6, report)
    assert row.ratios == (1.1, 1.25, 1.05)
    assert row.seconds == 4.4 and row.ratio == pytest.approx(1.1)
    assert row.network_seconds == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("more", "goodput", "ratio"),
    [({}, 1e9, 2.0), ({"client_seconds": 8.0}, 1e9, 1.0), ({"server_seconds": 0.5}, 2e6, 2.0)],
)
def test_the_slowest_part_is_what_counts(more: dict[str, float], goodput: float, ratio: float) -> None:
    row = _row("m", 1e9, goodput, {"epochs": [epoch(1.0), epoch(8.0, **more)]})
    assert row.ratio == pytest.approx(ratio)


def test_the_verdict_is_about_the_worst_row() -> None:
    rows: tuple[OverlapRow, ...] = tuple(
        _row("m", 1e9, 1e9, {"epochs": [epoch(1.0), epoch(seconds)]}) for seconds in (4.0, 4.8)
    )
    result = OverlapResult(rows=rows, conditions={})
    assert result.worst == pytest.approx(1.2)
    assert result.table()[-1].endswith("worst 1.200: missed")
    assert json.loads(json.dumps(result.to_json()))["worst"] == pytest.approx(1.2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=f"no test bed here: {why_not()}")
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--model",
        "alexnet",
        "--bandwidth",
        "100Mbps",
        "--samples",
        "64",
        "--bs",
        "32",
        "--epochs",
        "1",
    ]
    assert main(["overlap", *arguments, "--json", str(tmp_path / "f.json")]) == 0, capsys.readouterr().err
    (row,) = json.loads((tmp_path / "f.json").read_text())["rows"]
    # Neither bytes nor the loopback; how near it is to 100 Mbit/s goes by what else this machine does.
    assert 25e6 < row["goodput"] < 200e6
    assert row["bytes_received"] > 0 and row["server_seconds"] > 0
    # An epoch cannot be shorter than its slowest part, but for what the clocks and the probe are off by.
    assert row["ratio"] > 0.9
    assert "tc tbf" in capsys.readouterr().out
