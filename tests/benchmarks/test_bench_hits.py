"""The benchmark of epochs of hits: its arithmetic, and a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.epochs.hits import CallCount, HitsResult, HitsSettings


def result(equal: bool = True) -> HitsResult:
    return HitsResult(
        settings=HitsSettings(), batches=64, ours=(1.5, 1.25, 3.0), plain=(1.0, 1.0, 1.0), calls=240.0,
        cpu=(1.0, 1.125, 1.25), plain_cpu=(1.0, 1.0, 1.0),
        plain_calls=80.0, equal_losses=equal, grown_bytes=2_000_000, conditions={"cores": 2},
    )  # fmt: skip


def test_the_figure_is_the_median_of_the_pairs() -> None:
    assert result().more.median == 0.5 and result().to_json()["more"]["max"] == 2.0
    table = "\n".join(result().table())
    assert result().more_cpu.median == 0.125
    assert "0.500   median of 3 pairs, 0.250 to 2.000; the goal is 0.2" in table
    assert "160.0" in table and "to the bit: yes" in table and "2.0 MB" in table
    assert "to the bit: NO" in "\n".join(result(equal=False).table())


def test_calls_are_counted() -> None:
    count = CallCount()
    with count.counting():
        for _ in range(5):
            result()
    calls = count.calls
    assert calls >= 5
    result()
    assert count.calls == calls


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hits.json"
    assert main(["hits", "--samples", "128", "--bs", "32", "--epochs", "7", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["equal_losses"] and found["batches"] == 4 and found["conditions"]["threads"] == 1
    assert len(found["ours"]) == len(found["plain"]) == 2
    assert 0 < found["calls"] < 3000
    assert "losses equal to the bit: yes" in capsys.readouterr().out
