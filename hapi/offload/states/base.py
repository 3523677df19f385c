"""Places for master weights and optimiser states, as the engine uses them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hapi.arrays import Bytes
from hapi.offload.pieces import StatePiece


@dataclass(frozen=True, slots=True)
class Commit:
    """A consistent state of a training: which slot of each piece is valid."""

    number: int
    """One more than that of the commit before."""
    steps: int
    """Optimiser steps done."""
    slots: bytes
    """0 or 1 for each piece."""
    parameter_steps: tuple[int, ...]
    """Steps that each parameter took part in."""
    extra: bytes
    """Small state of the training (buffers, generator), always as long."""


class StateStore(Protocol):
    """Two slots for the record of each piece, and the commit that says which are valid. Several threads read and write,
    each another record."""

    @property
    def committed(self) -> Commit | None:
        """Last state that was committed; None in a new store."""

    def go_back(self, steps: int) -> bool:
        """Let the commit of so many steps be the last one, which may be the one before; return whether it is there."""

    def place(self, piece: StatePiece, slot: int, buffer: Bytes) -> Bytes:
        """Return where the next record of a slot that is not valid is computed: ``buffer``, or its own memory."""

    def read(self, piece: StatePiece, slot: int, buffer: Bytes, start: int, stop: int) -> None:
        """Fill ``buffer[start:stop]`` with those bytes of the record."""

    def write(self, piece: StatePiece, slot: int, buffer: Bytes, start: int = 0) -> None:
        """Write ``buffer[start:piece.nbytes]``, the record from a byte on."""

    def commit(self, commit: Commit) -> None:
        """Make what was written durable, then the commit. All or nothing, whenever the process is killed."""

    def scratch(self, nbytes: int) -> Bytes:
        """Return further memory, on the disk where there is one; it is gone when nobody holds it."""

    def write_gradient(self, at: int, values: Bytes) -> None:
        """Keep a gradient's bytes at a byte of the gradients' room."""

    def read_gradient(self, at: int, values: Bytes) -> None:
        """Fill ``values`` with kept bytes."""

    @property
    def lacked_gradient(self) -> bool:
        """Whether the process before ended because a gradient was not kept."""

    def note_lacking_gradient(self) -> None:
        """Let :attr:`lacked_gradient` be true for the next process."""

    def close(self, *, remove: bool) -> None:
        """Give everything back; ``remove``: the files too."""


def buffer_of(nbytes: int) -> Bytes:
    """Return memory that begins at a page, as direct input and output asks for."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
