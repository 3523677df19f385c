"""Cells of the benchmark ``offload``: a tail, a batch, a number of drives, and the ways that are compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hapi.errors import UsageError

WIDTH = 1024
"""Width of a block."""
BLOCK_PARAMETERS = 8 * WIDTH * WIDTH + 7 * WIDTH
"""Two dense layers with biases, and a norm."""
ROW_BYTES = 40 * WIDTH
"""A block saves so many bytes for a row's backward pass."""
TAILS = {"100M": 12, "218M": 26, "1B": 119}
"""Blocks of the tails."""
QUICK_TAIL = "8M"
_BLOCKS = {**TAILS, QUICK_TAIL: 1}

MEMORY, ACTIVE, NAIVE, SERIAL, SAVED, CHECKPOINTED = (
    "memory", "active", "naive", "serial", "save_on_cpu", "checkpoint"
)  # fmt: skip
ASIDE, ROLLBACK = "aside", "rollback"
HOST, TORCHAO, TRAINSTREAM, DEEPSPEED = "host", "torchao", "trainstream", "deepspeed"
OTHERS = (TORCHAO, TRAINSTREAM, DEEPSPEED)
"""Other libraries that train beyond a GPU's memory."""
SWAP, RECOMPUTE, KEPT = "swap", "recompute", "keep"
SHARES = {"saves 25%": 0.25, "saves 50%": 0.5, "saves 75%": 0.75}
"""Ways that recompute all layers but a share, which is saved: points of a curve whose ends are the two above."""
WAYS = {
    MEMORY: "AdamW in memory",
    ACTIVE: "Hapi, active",
    NAIVE: "Hapi, naive",
    SERIAL: "Hapi, serial",
    ROLLBACK: "Hapi, undo log",
    SAVED: "save_on_cpu",
    CHECKPOINTED: "full recompute",
    ASIDE: "Hapi, stepping aside",
    HOST: "Hapi, states in host memory",
    TORCHAO: "torchao's CPUOffloadOptimizer",
    TRAINSTREAM: "trainstream",
    DEEPSPEED: "DeepSpeed ZeRO-Offload",
    SWAP: "Hapi, swaps all it can",
    RECOMPUTE: "Hapi, recomputes all it can",
    **{way: f"Hapi, {way} of the layers" for way in SHARES},
    KEPT: "Hapi, activations in memory",
}
OFFLOADED = (ACTIVE, NAIVE, SERIAL, ROLLBACK, SWAP, RECOMPUTE, *SHARES, KEPT)
"""Ways whose states lie on a disk."""
ON_CPU = (MEMORY, ACTIVE, NAIVE, SERIAL, SAVED, CHECKPOINTED)
ON_GPU = (MEMORY, HOST, ACTIVE, SAVED, CHECKPOINTED, *OTHERS)
"""Ways of the part ``steps``."""
COMPUTE, BALANCED, IO = "compute-bound", "balanced", "I/O-bound"
ONE_BATCH = "one batch"
"""The same rows, however many drives there are."""
REGIMES = {COMPUTE: 2.0, BALANCED: 1.0, IO: 0.6}
"""Seconds of computing over those of the disk that a batch is to have."""
PARTS = ("steps", "size", "disks", "aside", "clipping", "swap")
GOALS = "goals"
SIZE_ROWS = 8
"""Rows of a batch that has next to no activations."""
_LARGE_BATCHES = (256, 1024)


@dataclass(frozen=True, kw_only=True)
class OffloadGroup:
    """Ways that take turns on one job."""

    part: str
    tail: str
    regime: str
    ways: tuple[str, ...]
    drives: int = 1
    rate: float = 0.0
    """Bytes a second of each drive; 0 for the disk as it is."""
    clipped: float | None = None
    """Share of the steps whose gradients are clipped; None without a norm."""
    memory_share: float = 0.5
    """Memory that Hapi is given, over what AdamW in memory takes for states and activations."""
    room: float | None = None
    """Share of the way from the memory that a pass needs at least to the one in which all fits; then
    :attr:`memory_share` does not count."""

    @property
    def key(self) -> str:
        """Unlike that of any other group."""
        clip = "" if self.clipped is None else f"/clipped {self.clipped:.0%}"
        drives = f"/{self.drives} drives of {self.rate / 1e6:.0f} MB/s" if self.rate else ""
        return f"{self.part}/{self.tail}/{self.regime}{clip}{drives}"


@dataclass(frozen=True, kw_only=True)
class SizeCell:
    """A search for the largest tail that trains in one way."""

    cap: float
    """Bytes of memory."""
    rows: int
    way: str


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """Choice of what is measured, and how."""

    parts: tuple[str, ...] = PARTS
    tails: tuple[str, ...] = tuple(TAILS)
    rounds: int = 3
    """Each way of a group has so many."""
    steps: int = 2
    """Timed steps of a turn, after one that does not count."""
    seconds: float = 150.0
    """A group begins no further turn after so long, once it has two."""
    regimes: tuple[str, ...] = tuple(REGIMES)
    """Batches of the parts ``steps`` and ``swap``."""
    caps: tuple[float, ...] = (1e9, 1.5e9, 2e9)
    """Bytes of the control groups of the part ``size``."""
    ways: tuple[str, ...] = tuple(WAYS)
    """That take part where a group has them."""
    threads: int = os.cpu_count() or 1
    """Of torch, in each process. Beside other work fewer of them are faster: they wait for each other by spinning."""
    limit: float = 300.0
    """Longest time of one answer, in seconds."""
    quick: bool = False
    device: str = "cpu"
    rows: int | None = None
    """Of a batch of the part ``steps``; None for those that put it into its regimes, on a CPU."""

    def groups(self) -> list[OffloadGroup]:
        """Return all groups, by part."""
        tails = (QUICK_TAIL,) if self.quick else self.tails
        regimes = (ONE_BATCH,) if self.rows is not None else (IO,) if self.quick else self.regimes
        everyone = ON_GPU if self.device != "cpu" else ON_CPU
        found = [
            group for part in self.parts for group in _groups(part, tails, regimes, self.quick, everyone)
        ]
        chosen = [
            replace(group, ways=tuple(way for way in group.ways if way in self.ways)) for group in found
        ]
        return [group for group in chosen if group.ways]

    def size_cells(self) -> list[SizeCell]:
        """Return the searches of the part ``size``: over the caps, and at the smallest one over batches."""
        over_caps = [(cap, SIZE_ROWS, way) for cap in self.caps for way in (MEMORY, ACTIVE)]
        batches = () if self.quick else (SIZE_ROWS, *_LARGE_BATCHES)
        over_rows = [(min(self.caps), rows, way) for rows in batches for way in (KEPT, ACTIVE)]
        jobs = [job for job in dict.fromkeys(over_caps + over_rows) if job[2] in self.ways]
        return [SizeCell(cap=cap, rows=rows, way=way) for cap, rows, way in jobs]


def blocks_of(tail: str) -> int:
    """Return the blocks of a tail; UsageError for an unknown one."""
    if tail not in _BLOCKS:
        raise UsageError(f"--tail {tail}: expected one of {', '.join(TAILS)}")
    return _BLOCKS[tail]


def parameters_of(tail: str) -> int:
    """Return the parameters of a tail."""
    return blocks_of(tail) * BLOCK_PARAMETERS


def most_rows(tail: str) -> int:
    """Rows of a batch whose activations have 2.5 bytes for each parameter: what half of AdamW's memory leaves."""
    return int(2.5 * parameters_of(tail) / (ROW_BYTES * blocks_of(tail)))


def _groups(
    part: str, tails: Sequence[str], regimes: Sequence[str], quick: bool, everyone: tuple[str, ...]
) -> list[OffloadGroup]:
    small = tails[0]
    slow = 50e6 if quick else 150e6
    if part == "steps":
        return [
            OffloadGroup(part=part, tail=tail, regime=regime, ways=everyone)
            for tail in tails
            for regime in ((IO,) if tail == "1B" and ONE_BATCH not in regimes else regimes)
        ]
    if part == "disks":
        return [
            OffloadGroup(
                part=part, tail=small, regime=ONE_BATCH, ways=(ACTIVE, SERIAL), drives=count, rate=slow
            )
            for count in ((1, 2) if quick else (1, 2, 3, 4))
        ]
    if part == "aside":
        return [OffloadGroup(part=part, tail=small, regime=ONE_BATCH, ways=(MEMORY, ASIDE))]
    if part == "clipping":
        return [
            OffloadGroup(part=part, tail=small, regime=IO, ways=(ACTIVE, ROLLBACK, SERIAL), clipped=share)
            for share in (0.0, 0.5, 1.0)
        ]
    if part == "swap":
        ways = (ACTIVE, RECOMPUTE, *SHARES, SWAP)
        return [OffloadGroup(part=part, tail=small, regime=regime, ways=ways, room=0.5) for regime in regimes]
    if part == GOALS:
        compared = {
            COMPUTE: (MEMORY, ACTIVE),
            BALANCED: (MEMORY, ACTIVE),
            IO: (MEMORY, ACTIVE, NAIVE, SERIAL),
        }
        named = [regime for regime in compared if regime in regimes]
        chosen = list(compared) if quick or not named else named
        found = [
            OffloadGroup(part=part, tail=small, regime=regime, ways=compared[regime]) for regime in chosen
        ]
        if len(chosen) < len(compared):
            return found
        return [*found, OffloadGroup(part=part, tail=small, regime="when all fits", ways=(MEMORY, ASIDE))]
    return []
