"""The JSON report of a run, and the table a person reads."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from hapi.client.session import PassReport
from hapi.errors import UsageError


def epoch_entry(
    epoch: int, split: int, report: PassReport, *, loss: float, accuracy: float, samples: int
) -> dict[str, Any]:
    """One element of ``epochs[]``. ``samples`` may exceed the pass's own after a resume in mid-epoch."""
    traffic = report.traffic
    return {
        "epoch": epoch,
        "split": split,
        "seconds": round(report.seconds, 4),
        "samples": samples,
        "bytes_received": traffic.bytes_received,
        "loss": loss,
        "accuracy": accuracy,
        "server_seconds": round(traffic.server_seconds(), 4),
        "network_seconds": round(traffic.network.seconds, 4),
        "client_seconds": round(report.client.seconds, 4),
        "stall_seconds": round(report.stall_seconds, 4),
        "requests": traffic.requests,
        "cos_batch": traffic.cos_batch,
        "server_stage_seconds": {k: round(v, 4) for k, v in sorted(traffic.stages.items())},
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Peak device memory on a GPU, else the process's peak resident size, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write_report(path: str, document: dict[str, Any]) -> None:
    """Write ``document`` as JSON, whole or not at all; :class:`UsageError` when that fails."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"--report {path}: cannot be written: {error.strerror or error}") from None
