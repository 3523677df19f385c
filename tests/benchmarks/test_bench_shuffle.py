"""``benchmarks shuffle``: a small real run, py1e after its description, and what makes a comparison worth something."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.storage.py1e import described, py1e_sequence
from benchmarks.storage.shuffle import QualityRow, ShuffleResult, ShuffleSettings, measure_shuffle
from benchmarks.storage.shuffle_accuracy import STORED, AccuracySettings, accuracy_row, measure_accuracy
from hapi.data.epoch_order import Shuffle
from hapi.errors import UsageError


def test_py1e_keeps_a_shard_in_its_range() -> None:
    sizes = np.array([50] * 39 + [17])
    order = described(np.random.default_rng(1), sizes, 400)
    assert sorted(order.tolist()) == list(range(sizes.sum()))
    places = np.argsort(order)
    widths = [np.ptp(places[first : first + 50]) for first in range(0, 1950, 50)]
    assert 300 < max(widths) <= 1.25 * 400 + 50  # sorting moves samples on by what others leave and take
    assert min(widths) > 100


def test_py1e_without_room_shuffles_only_inside_shards() -> None:
    order = py1e_sequence(0, 0, 1000, 50, 40)
    assert np.count_nonzero(np.diff(order // 50)) == 19


def test_the_table_of_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "shuffle.json"
    flags = ("--samples", "20000", "--group", "50", "--window", "4", "--window", "40", "--bs", "100")
    assert main(["shuffle", *flags, "--no-accuracy", "--json", str(path)]) == 0
    output = capsys.readouterr().out
    assert "chunks:50:40" in output and "py1e" in output and "date" in output
    rows = {(r["order"], r["window"]): r for r in json.loads(path.read_text())["rows"]}
    assert rows[STORED, 1]["score"] == pytest.approx(0, abs=0.01)
    assert rows["full", None]["score"] == pytest.approx(1, abs=0.02)
    small, large = rows["chunks:50:4", 4], rows["chunks:50:40", 40]
    assert small["score"] < large["score"] < 1 and 1 <= small["reads"] < large["reads"] < 1.15


@pytest.mark.slow
def test_training_tells_orders_apart() -> None:
    """One epoch on data sorted by class: the stored order learns less than a shuffled one."""
    pytest.importorskip("sklearn")
    told: list[str] = []
    settings = AccuracySettings(shuffles=(Shuffle(16, 32),), seeds=2, epochs=2)
    rows = measure_accuracy(settings, told.append)
    assert [row.shuffle for row in rows] == ["full", "chunks:16:32", STORED] and len(told) == 3
    assert rows[0].score > rows[1].score > 0.5 > rows[2].score
    assert rows[0].accuracy.difference == 0 and rows[0].within_noise
    assert rows[-1].accuracy.mean < rows[0].accuracy.mean - 0.2 and not rows[-1].within_noise


def test_what_counts_as_within_the_seed_noise() -> None:
    full = [(0.90, 0.30), (0.92, 0.28), (0.94, 0.26)]
    near = [(0.91, 0.29), (0.93, 0.27), (0.95, 0.25)]
    far = [(a, b + 0.03) for a, b in full]
    assert accuracy_row("near", 1.0, near, full).within_noise
    assert not accuracy_row(
        "far", 1.0, far, full
    ).within_noise  # the loss tells, though the accuracy does not
    row = accuracy_row("near", 1.0, near, full)
    assert row.accuracy.difference == pytest.approx(0.01) and row.accuracy.half_width == pytest.approx(0)
    assert row.accuracy.noise == pytest.approx(0.02)


def test_a_comparison_that_shows_nothing_says_so() -> None:
    full = [(0.90, 0.30), (0.92, 0.28)]
    rows = tuple(accuracy_row(name, 1.0, full, full) for name in ("full", "chunks:1:1", STORED))
    quality = QualityRow(
        order="full", window=None, spread=1, lowest=1, run=256, surprise=1, score=1, reads=None, seconds=0
    )
    result = ShuffleResult(settings=ShuffleSettings(), rows=(quality,), accuracy=rows, conditions={})
    assert result.table()[-1] == "the stored order is within it too, so this shows nothing"
    assert "1 of 1 chunk shuffles are: chunks:1:1" in "\n".join(result.table())


def test_too_few_samples() -> None:
    with pytest.raises(UsageError, match="--samples"):
        measure_shuffle(ShuffleSettings(samples=100), lambda line: None)
