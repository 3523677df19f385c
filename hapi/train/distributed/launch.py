"""The environment that torchrun, and launchers like it, start each rank in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hapi.errors import UsageError

NEEDS_RANKS = (
    "--sync-batchnorm needs several ranks: start with torchrun --no-python --nproc-per-node N hapi-train"
)
"""Error of one process that is to take statistics over several."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A rank among those that were started together."""

    rank: int
    size: int
    local_rank: int
    """Number among the ranks of its machine."""
    local_size: int
    node: int
    """Number of its machine among those of the job."""
    restarts: int
    """Times that the launcher has started the ranks again after one failed."""
    by_torchrun: bool = False
    """Whether torchrun is the parent of this process."""


_OTHERS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
}
"""Variables in which other launchers tell how many processes they have started, and these launchers."""


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return this process's rank; None where it was started alone, also as the only rank unless by torchrun, which may
    start it anew.

    Raises:
        UsageError: the variables contradict each other, or another launcher has started several processes that do not
            know of each other.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        _check_others(environment)
        return None
    rank, size = _number(environment, "RANK", 0), _number(environment, "WORLD_SIZE", 1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
    local_rank = _number(environment, "LOCAL_RANK", rank)
    if not rank < size or not local_rank < local_size <= size:
        raise UsageError(
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}: these are no "
            "rank of a job; start it with torchrun, or unset RANK and WORLD_SIZE to train alone"
        )
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if size == 1 and not by_torchrun:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise UsageError(
            f"RANK is set and {missing[0]} is not: start with torchrun, or unset RANK to train alone"
        )
    return Launch(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=_number(environment, "GROUP_RANK", rank // local_size),
        restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        by_torchrun=by_torchrun,
    )


def _check_others(environment: Mapping[str, str]) -> None:
    for name, launcher in _OTHERS.items():
        text = environment.get(name, "")
        if text.isascii() and text.isdigit() and text.lstrip("0") not in ("", "1"):
            raise UsageError(
                f"{name}={text[:40]}: {launcher} has started several processes, and each would train all by itself; "
                "start torchrun, or give each one RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without "
                f"{name} it trains alone"
            )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError(f"{name}={text[:40]!r}: expected a whole number, as torchrun sets it")
    return int(text)
