"""The JSON report of a run, and the table a person reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hapi.client.passes import PassReport
from hapi.paths import write_whole


def counters(report: PassReport) -> dict[str, float]:
    """What a pass has measured, as sums: two parts of an epoch (before and after a resume) can be added."""
    traffic = report.traffic
    return {
        "seconds": round(report.seconds, 4),
        "bytes_received": traffic.bytes_received,
        "cached_samples": traffic.cached_samples,
        "cached_bytes": traffic.cached_bytes,
        "server_seconds": round(traffic.server_seconds(), 4),
        "network_seconds": round(traffic.network.seconds, 4),
        "client_seconds": round(report.client.seconds, 4),
        "stall_seconds": round(report.stall_seconds, 4),
        "requests": traffic.requests,
    }


def added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The counters of two parts of an epoch together."""
    return {key: round(value + first.get(key, 0), 4) for key, value in second.items()}


def epoch_entry(
    epoch: int,
    split: int,
    report: PassReport,
    measured: Mapping[str, float],
    *,
    loss: float,
    accuracy: float,
    samples: int,
) -> dict[str, Any]:
    """One element of ``epochs[]``. ``measured`` counts the whole epoch, ``report`` what this process did of it."""
    traffic = report.traffic
    return {
        "epoch": epoch,
        "split": split,
        "samples": samples,
        "loss": loss,
        "accuracy": accuracy,
        **measured,
        "splits": [[split, batches] for split, batches in sorted(report.splits.items())],
        "cos_batch": traffic.cos_batch,
        "server_stage_seconds": {k: round(v, 4) for k, v in sorted(traffic.stages().items())},
    }


def write_report(path: str, document: dict[str, Any]) -> None:
    """Write ``document`` as JSON, whole or not at all; :class:`UsageError` when that fails.

    A number that is none (the loss of a training that diverged) is written as null, which every reader takes.
    """
    write_whole(path, json.dumps(_finite(document), indent=2, allow_nan=False) + "\n", "--report")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
