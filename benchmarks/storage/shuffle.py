"""``benchmarks shuffle``: how well chunk windows shuffle, beside a full permutation and MosaicML's py1e.

Two questions, in one run: the quality of orders at equal memory (chunks of stored samples kept), with what it costs in
chunks read and seconds to compute; and whether a network trained in chunk windows is as good, see
:mod:`benchmarks.storage.shuffle_accuracy` (DLFS, section IV-E2, Figure 13).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.storage.py1e import py1e_sequence, streaming_version
from benchmarks.storage.shuffle_accuracy import STORED, AccuracyRow, AccuracySettings, measure_accuracy
from benchmarks.storage.shuffle_quality import chunk_reads, quality
from benchmarks.testbed.conditions import conditions
from hapi.arrays import IntArray
from hapi.data.epoch_order import FULL, Shuffle
from hapi.errors import UsageError

_SEED, _EPOCH = 0, 1


@dataclass(frozen=True, kw_only=True)
class ShuffleSettings:
    """Measurements to take."""

    samples: int = 1_000_000
    group: int = 512
    """Samples of a chunk: 256 KiB of samples of 512 bytes."""
    windows: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    batch: int = 256
    accuracy: AccuracySettings | None = field(default_factory=AccuracySettings)
    """None: quality only."""


@dataclass(frozen=True, kw_only=True)
class QualityRow:
    """One order."""

    order: str
    window: int | None
    """Chunks kept in memory; None: the whole dataset."""
    spread: float
    lowest: float
    run: int
    """Stored samples of a run for which these two are lowest."""
    surprise: float
    score: float
    reads: float | None
    """Chunks read over chunks there are, with ``window`` and a tenth of it kept."""
    seconds: float
    """Seconds to compute the order."""


@dataclass(frozen=True, kw_only=True)
class ShuffleResult:
    """All figures of one run, and its conditions."""

    settings: ShuffleSettings
    rows: tuple[QualityRow, ...]
    accuracy: tuple[AccuracyRow, ...]
    conditions: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        return {
            "benchmark": "shuffle",
            "settings": asdict(self.settings),
            "rows": [asdict(row) for row in self.rows],
            "accuracy": [row.to_json() for row in self.accuracy],
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        s = self.settings
        names = ("kept", "spread", "lowest", "at runs", "surprise", "score", "reads", "seconds")
        head = f"{'order':<22}" + "".join(f"{name:>9}" for name in names)
        lines = [
            f"quality of {s.samples} samples, chunks of {s.group}, batches of {s.batch}: 1 for a full permutation",
            head,
        ]
        for row in self.rows:
            kept = "all" if row.window is None else str(row.window)
            reads = "" if row.reads is None else f"{row.reads:.3f}"
            lines.append(
                f"{row.order:<22}{kept:>9}{row.spread:>9.3f}{row.lowest:>9.3f}{row.run:>9}{row.surprise:>9.3f}"
                f"{row.score:>9.3f}{reads:>9}{row.seconds:>9.2f}"
            )
        return lines if s.accuracy is None else [*lines, "", *self._accuracy_table(s.accuracy)]

    def _accuracy_table(self, settings: AccuracySettings) -> list[str]:
        full, stored = self.accuracy[0], self.accuracy[-1]
        lines = [
            f"digits stored by class, {settings.epochs} epochs, {settings.seeds} seeds: held-out samples, 95% interval",
            f"{'order':<16}{'score':>7}{'accuracy %':>12}{'difference':>20}{'loss':>9}{'difference':>20}",
        ]
        for row in self.accuracy:
            a, b = row.accuracy, row.loss
            points = f"{100 * a.difference:+.2f} +- {100 * a.half_width:.2f}"
            nats = f"{b.difference:+.4f} +- {b.half_width:.4f}"
            lines.append(
                f"{row.shuffle:<16}{row.score:>7.3f}{100 * a.mean:>12.2f}{points:>20}{b.mean:>9.4f}{nats:>20}"
            )
        noise = f"accuracy {100 * full.accuracy.noise:.2f}, loss {full.loss.noise:.4f}"
        lines.append(f"seed noise of full (standard deviation): {noise}")
        shuffled = [row for row in self.accuracy[1:] if row.shuffle != STORED]
        inside = [row.shuffle for row in shuffled if row.within_noise]
        lines.append(
            f"goal: accuracy and loss within it; {len(inside)} of {len(shuffled)} chunk shuffles are: "
            f"{', '.join(inside) or 'none'}"
        )
        if stored.within_noise:
            lines.append("the stored order is within it too, so this shows nothing")
        return lines


def measure_shuffle(settings: ShuffleSettings, tell: Callable[[str], None]) -> ShuffleResult:
    """Order, measure, train. :class:`UsageError` for numbers that do not go together."""
    if settings.samples < 2 * settings.batch:
        raise UsageError(f"--samples: expected at least two batches ({2 * settings.batch})")
    found = {**conditions(), "mosaicml_streaming": streaming_version() or "not installed"}
    rows = []
    for name, window, make in _orders(settings):
        started = time.perf_counter()
        sequence = make()
        seconds = time.perf_counter() - started
        q = quality(sequence, settings.batch)
        reads = None
        if window is not None:
            chunks = -(-settings.samples // settings.group)
            reads = chunk_reads(sequence, settings.group, window + max(1, window // 10)) / chunks
        rows.append(
            QualityRow(order=name, window=window, score=q.score, reads=reads, seconds=seconds, **vars(q))
        )
        tell(f"{name}: {q.score:.3f}")
    accuracy = [] if settings.accuracy is None else measure_accuracy(settings.accuracy, tell)
    return ShuffleResult(settings=settings, rows=tuple(rows), accuracy=tuple(accuracy), conditions=found)


def _orders(s: ShuffleSettings) -> Iterator[tuple[str, int | None, Callable[[], IntArray]]]:
    """(name, chunks that it keeps in memory, how it is made)."""
    theirs = "py1e" if streaming_version() is not None else "py1e, re-implemented"
    yield STORED, 1, lambda: np.arange(s.samples, dtype=np.int64)
    for window in s.windows:
        shuffle = Shuffle(s.group, window)
        yield str(shuffle), window, lambda sh=shuffle: sh.sequence(_SEED, _EPOCH, s.samples)  # type: ignore[misc]
        yield (
            theirs,
            window,
            lambda w=window: py1e_sequence(_SEED, _EPOCH, s.samples, s.group, w * s.group),  # type: ignore[misc]
        )
    yield str(FULL), None, lambda: FULL.sequence(_SEED, _EPOCH, s.samples)
