"""Records in memory on their way from a drive and to it, and counts of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from hapi.arrays import Bytes
from hapi.process.direct_io import transfer_buffer


@dataclass
class Traffic:
    """Counts of what the engine did."""

    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    compute_seconds: float = 0.0
    commit_seconds: float = 0.0
    waited_seconds: float = 0.0
    """The training's thread waited so long for updates."""
    pieces: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A piece's record in memory."""

    record: Bytes
    buffer: Bytes
    """The drive's buffer that it takes: that of the record, unless it is computed in its place."""
    has_states: bool
    """False while the store holds nothing of the piece."""
    has_master: bool


@dataclass(frozen=True, slots=True)
class Write:
    """A new record on its way to the shadow slot."""

    step: int
    piece: int
    slot: int
    loaded: Loaded


@dataclass
class DriveQueue:
    """One drive's work, and its buffers; used under the engine's lock."""

    size: int
    """Bytes of a buffer."""
    limit: int
    """Number of buffers that there are to be."""
    free: list[Bytes] = field(default_factory=list)
    made: int = 0
    """Number of buffers that there are; more than :attr:`limit` until those above are free."""
    expected: deque[int] = field(default_factory=deque)
    """Pieces to be read ahead, in the order in which their gradients are expected."""
    asked: deque[int] = field(default_factory=deque)
    """Pieces whose gradients are there."""
    writes: deque[Write] = field(default_factory=deque)
    writing: int = 0
    """Number of writes that a thread has taken and not finished."""

    def __post_init__(self) -> None:
        """Make the buffers; their pages are taken when they are first used."""
        self.resize(self.limit)

    def resize(self, limit: int) -> None:
        """Have ``limit`` buffers: the further ones now, or fewer as they become free."""
        self.limit = limit
        while self.made < limit:
            self.free.append(transfer_buffer(self.size))
            self.made += 1
        while self.made > limit and self.free:
            self.free.pop()
            self.made -= 1

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back that is free now."""
        if self.made > self.limit:
            self.made -= 1
        else:
            self.free.append(buffer)


def first_of(
    pieces: deque[int], *without: Collection[int], among: Collection[int] | None = None
) -> int | None:
    """First of ``pieces`` that is in none of the others, and ``among`` some; those before it are dropped."""
    while pieces and (
        any(pieces[0] in others for others in without) or (among is not None and pieces[0] not in among)
    ):
        pieces.popleft()
    return pieces[0] if pieces else None
