"""``benchmarks batching``: what is made of measured passes, and a small real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.serving import batching
from benchmarks.serving.batching import BATCHES, batching_rows, batching_table
from benchmarks.serving.plots_measured import draw_batching


class Front:
    """Passes with an overhead of four samples' time."""

    def __init__(self) -> None:
        self.passes: list[int] = []

    def seconds(self, batch: int) -> float:
        self.passes.append(batch)
        return 4.0 + batch


def test_auto_looks_by_itself() -> None:
    front = Front()
    choice, samples = batching._search(front, 256)  # type: ignore[arg-type]
    # 128 is within 2% of 256.
    assert choice == 128 and {16, 32, 64, 128, 256} == set(front.passes) and sum(front.passes) == samples
    small = Front()
    assert batching._search(small, 100)[0] == 64  # type: ignore[arg-type]
    assert max(small.passes) == 64


@pytest.mark.slow
def test_rows_and_table(tmp_path: Path) -> None:
    # Of five rounds two were disturbed.
    seconds = {str(b): [9.0, 1.0 + 4.0 / b, 0.5, 7.0, 1.0 + 4.0 / b] for b in BATCHES}
    looks = [[128, 512], [64, 256], [128, 512]]
    record = {"kind": "batching", "model": "alexnet", "split": 17, "seconds": seconds, "looks": looks}
    rows = batching_rows([{"kind": "conditions"}, record], 256)
    (row,) = rows
    assert (row.looks, row.looked) == ([128, 64, 128], 512)
    assert row.best == 256 and row.chosen == {"fixed": 16, "adaptive": 256, "auto": 128}
    assert row.over_best(16) == pytest.approx(1.25 / (1 + 4 / 256))
    table = "\n".join(batching_table(rows, batching.BatchingSettings()))
    assert "fixed: within 3% of the best for 0 of 1, worst +23.1%" in table
    assert "auto: within 3% of the best for 1 of 1, worst +1.5%" in table
    draw_batching(rows, str(tmp_path / "x.svg"))
    assert "</svg>" in (tmp_path / "x.svg").read_text()


@pytest.mark.slow
def test_a_small_real_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "BATCHES", (1, 16, 32))
    arguments = ["batching", "--model", "resnet18", "--split", "maxpool", "--request-size", "32"]
    arguments += ["--repeats", "1", "--results", str(tmp_path / "r.jsonl")]
    arguments += ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    for _ in range(2):  # the second finds all there
        assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "1 models, 0 to measure" in printed.err and "split" in printed.out
    (found,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert found["split"] == 4 and found["auto"] in (16, 32) and found["adaptive"] == 32
    assert found["looked_samples"] > 0 and found["seconds_16"] > 0
    assert (tmp_path / "r.csv").read_text().count("\n") == 2


def test_a_request_larger_than_what_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["batching", "--request-size", "257"]) != 0
    assert "--request-size: expected 1 to 256" in capsys.readouterr().err and not list(tmp_path.iterdir())
