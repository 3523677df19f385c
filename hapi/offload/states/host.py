"""States in the host's memory, for training on a device with less of it."""

from __future__ import annotations

from hapi.arrays import Bytes
from hapi.offload.pieces import Layout, StatePiece
from hapi.offload.states.base import Commit, buffer_of


class HostStates:
    """A :class:`~hapi.offload.states.base.StateStore` in anonymous memory; it ends with the process."""

    def __init__(self, layout: Layout, gradient_bytes: int) -> None:
        """Allocate two slots, and room for gradients that are kept; pages are taken when they are first used."""
        self._committed: Commit | None = None
        self._slots = [[buffer_of(nbytes) for nbytes in layout.slot_bytes] for _ in range(2)]
        self._gradients = buffer_of(gradient_bytes)

    @property
    def committed(self) -> Commit | None:
        """Last commit."""
        return self._committed

    def go_back(self, steps: int) -> bool:
        """Return whether that is the beginning: nothing is found in memory."""
        return not steps

    def place(self, piece: StatePiece, slot: int, buffer: Bytes) -> Bytes:
        """Return the record itself; ``buffer`` stays without pages."""
        return self._record(piece, slot)

    def read(self, piece: StatePiece, slot: int, buffer: Bytes, start: int, stop: int) -> None:
        """Copy a part of the record."""
        buffer[start:stop] = self._record(piece, slot)[start:stop]

    def write(self, piece: StatePiece, slot: int, buffer: Bytes, start: int = 0) -> None:
        """Copy a record, from ``start`` on, that was not computed in its place."""
        record = self._record(piece, slot)
        if record.ctypes.data != buffer.ctypes.data:
            record[start:] = buffer[start : piece.nbytes]

    def commit(self, commit: Commit) -> None:
        """Remember the commit."""
        self._committed = commit

    def scratch(self, nbytes: int) -> Bytes:
        """Allocate."""
        return buffer_of(nbytes)

    def write_gradient(self, at: int, values: Bytes) -> None:
        """Copy a gradient in."""
        self._gradients[at : at + len(values)] = values

    def read_gradient(self, at: int, values: Bytes) -> None:
        """Copy a gradient out."""
        values[:] = self._gradients[at : at + len(values)]

    @property
    def lacked_gradient(self) -> bool:
        """False: nothing is found in memory."""
        return False

    def note_lacking_gradient(self) -> None:
        """Do nothing."""

    def close(self, *, remove: bool) -> None:
        """Give the memory back once no view of it is left."""
        self._slots, self._gradients = [], buffer_of(0)

    def _record(self, piece: StatePiece, slot: int) -> Bytes:
        return self._slots[slot][piece.drive][piece.at : piece.at + piece.nbytes]
