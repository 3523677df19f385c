"""A warning for loops by several processes of which each trains on all samples."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch.distributed as dist

log = logging.getLogger("hapi.client")


def warn_of_unshared(trainers: int, environment: Mapping[str, str] = os.environ) -> None:
    """Warn, in the first process, where a launcher started several and the session shares the samples with none.

    Args:
        trainers: that share the samples, by the session's settings.
        environment: of the process.
    """
    rank, size = _started_as(environment)
    if trainers == 1 and size > 1 and rank == 0:
        log.warning(
            "%d processes train, and each gets all samples of every epoch: share them by the settings trainers=%d and "
            "trainer=RANK, as examples/several_processes does",
            size,
            size,
        )


def _started_as(environment: Mapping[str, str]) -> tuple[int, int]:
    """Number of this process and how many there are, by torch.distributed or its launchers' variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default
