"""The JSON report of a run, and the table for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, TypeVar

from hapi.client.loading.epoch_stats import PassReport
from hapi.paths import write_whole

_Key = TypeVar("_Key", int, str)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of an epoch or of a part of it; the parts before and after a resume can be added."""

    counters: dict[str, float] = field(default_factory=dict)
    """Sums: seconds, bytes, samples, requests."""
    splits: dict[int, int] = field(default_factory=dict)
    """Batches by split."""
    stages: dict[str, float] = field(default_factory=dict)
    """The servers' seconds by stage."""
    cos_batch: int = 0
    """Samples of the largest COS batch."""

    @classmethod
    def of(cls, report: PassReport) -> Self:
        """Return the measurements in ``report``."""
        traffic = report.traffic
        return cls(
            counters={
                "seconds": round(report.seconds, 4),
                "bytes_received": traffic.bytes_received,
                "cached_samples": traffic.cached_samples,
                "cached_bytes": traffic.cached_bytes,
                "server_kept_samples": sum(share.kept_samples for share in traffic.shares().values()),
                **report.kept.to_json(),
                "server_seconds": round(traffic.server_seconds(), 4),
                "network_seconds": round(traffic.network.seconds, 4),
                "client_seconds": round(report.client.seconds, 4),
                "stall_seconds": round(report.stall_seconds, 4),
                "requests": traffic.requests,
                "extra_requests": traffic.extra_requests,
                "extra_bytes": traffic.extra_bytes,
            },
            splits=dict(report.splits),
            stages={k: round(v, 4) for k, v in traffic.stages().items()},
            cos_batch=traffic.cos_batch,
        )

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """Parse a checkpoint's document; ValueError or TypeError for anything that :func:`asdict` would not
        make.
        """
        measured = cls(**document)
        counts = [*measured.splits, *measured.splits.values(), measured.cos_batch]
        numbers = [*measured.counters.values(), *measured.stages.values()]
        if not all(type(v) is int and v >= 0 for v in counts) or not all(
            type(v) in (int, float) for v in numbers
        ):
            raise ValueError("what it measured is not made of numbers")
        return measured

    def __add__(self, other: Measured) -> Measured:
        return Measured(
            counters=_added(self.counters, other.counters),
            splits={k: int(v) for k, v in _added(self.splits, other.splits).items()},
            stages=_added(self.stages, other.stages),
            cos_batch=max(self.cos_batch, other.cos_batch),
        )


_OF_THE_FIRST = ("seconds", "network_seconds", "client_seconds", "stall_seconds")
"""Counters of an epoch that pass on all ranks at the same time."""


def of_all_ranks(found: Sequence[Measured]) -> Measured:
    """Return one epoch's measurements on all ranks: sums of what they cost, and the first one's times.

    Args:
        found: measurements by rank.
    """
    first, total = found[0], sum(found[1:], found[0])
    own = {name: first.counters[name] for name in _OF_THE_FIRST}
    return replace(total, counters={**total.counters, **own}, splits=first.splits)


def _added(first: Mapping[_Key, float], second: Mapping[_Key, float]) -> dict[_Key, float]:
    """The sums by key; of the second's keys first, in their order."""
    return {key: round(first.get(key, 0) + second.get(key, 0), 4) for key in {**second, **first}}


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Costs of a whole training, over all the processes that took part."""

    seconds: float = 0.0
    retries: int = 0
    peak_memory_bytes: int = 0
    """Largest peak among the processes."""
    resumes: int = 0

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """Parse a checkpoint's document; ValueError or TypeError for anything else."""
        totals = cls(**document)
        if not all(type(v) in (int, float) and v >= 0 for v in asdict(totals).values()):
            raise ValueError("its totals are not made of numbers")
        return totals

    def and_then(self, seconds: float, retries: int, peak_memory_bytes: int) -> Totals:
        """Return the totals with the costs of one more process.

        Args:
            seconds: its wall seconds.
            retries: its repeated requests.
            peak_memory_bytes: its peak.
        """
        return Totals(
            seconds=round(self.seconds + seconds, 4),
            retries=self.retries + retries,
            peak_memory_bytes=max(self.peak_memory_bytes, peak_memory_bytes),
            resumes=self.resumes,
        )


def epoch_entry(
    epoch: int, split: int, measured: Measured, *, samples: int, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one element of ``epochs[]``.

    Args:
        epoch: number from 0.
        split: the split at the epoch's end.
        measured: measurements of the whole epoch, earlier processes included.
        samples: samples trained.
        figures: results over these samples by name, the loss first.
    """
    return {
        "epoch": epoch,
        "split": split,
        "samples": samples,
        **figures,
        **measured.counters,
        "splits": [[split, batches] for split, batches in sorted(measured.splits.items())],
        "cos_batch": measured.cos_batch,
        "server_stage_seconds": dict(sorted(measured.stages.items())),
    }


def write_report(path: str, document: dict[str, Any]) -> None:
    """Write ``document`` as JSON, whole or not at all; :class:`UsageError` when that fails.

    A number that is not finite (a diverged validation loss) is written as null, which every reader accepts.
    """
    write_whole(path, json.dumps(finite(document), indent=2, allow_nan=False) + "\n", "--report")


def finite(value: Any) -> Any:
    """Return a document with null for each number that is not finite; JSON has none."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
