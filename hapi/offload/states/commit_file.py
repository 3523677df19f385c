"""The file that says which slots are valid: two blocks, written in turn, each with its checksum."""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path

import numpy as np
import xxhash

from hapi.offload.states.base import Commit
from hapi.process.direct_io import aligned, write_whole

_HEAD = struct.Struct("<8sQQIII")
"""Mark, number of the commit, steps done, number of pieces, number of parameters, bytes of extra state."""
_MARK = b"HAPIOFF1"
_SUM = struct.Struct("<Q")


def has_commit(path: Path) -> bool:
    """Return whether a file seems to hold a commit: whether it is whole, :class:`CommitFile` tells. Raises OSError."""
    with path.open("rb") as file:
        found = file.read(len(_MARK))
        file.seek(path.stat().st_size // 2)
        return _MARK in (found, file.read(len(_MARK)))


class CommitFile:
    """Commits of one training. A block that is cut short or torn does not count; the other one is the state before."""

    def __init__(self, descriptor: int, pieces: int, parameters: int, extra_bytes: int) -> None:
        """Look for the newest whole block in an open file, which stays the caller's."""
        self._descriptor = descriptor
        self._form = pieces, parameters, extra_bytes
        self._size = _HEAD.size + pieces + 8 * parameters + extra_bytes
        self._block = aligned(self._size + _SUM.size)
        found = [commit for commit in map(self._read, (0, 1)) if commit is not None]
        self.newest = max(found, key=lambda commit: commit.number, default=None)
        """Last commit; None in a new file."""

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return 2 * self._block

    def go_back(self, steps: int) -> bool:
        """Take the commit of so many steps for the newest one, none for 0; return whether it is there."""
        if not steps:
            self.newest = None
            return True
        found = [commit for commit in map(self._read, (0, 1)) if commit is not None and commit.steps == steps]
        self.newest = max(found, key=lambda commit: commit.number, default=self.newest)
        return bool(found)

    def write(self, commit: Commit) -> None:
        """Make a commit durable; the one before stays readable until then. Raises OSError."""
        head = _HEAD.pack(_MARK, commit.number, commit.steps, *self._form)
        body = head + commit.slots + array("Q", commit.parameter_steps).tobytes() + commit.extra
        if len(body) != self._size:
            raise ValueError(f"a commit of {len(body)} bytes in a file for {self._size}")
        body += _SUM.pack(xxhash.xxh3_64_intdigest(body))
        write_whole(self._descriptor, (commit.number % 2) * self._block, np.frombuffer(body, np.uint8))
        os.fdatasync(self._descriptor)
        self.newest = commit

    def _read(self, block: int) -> Commit | None:
        found = os.pread(self._descriptor, self._size + _SUM.size, block * self._block)
        if len(found) != self._size + _SUM.size or not found.startswith(_MARK):
            return None
        body = found[: self._size]
        _, number, steps, *form = _HEAD.unpack_from(body)
        if _SUM.pack(xxhash.xxh3_64_intdigest(body)) != found[self._size :] or tuple(form) != self._form:
            return None
        pieces, parameters, _ = self._form
        counts_at = _HEAD.size + pieces
        extra_at = counts_at + 8 * parameters
        counts = array("Q", body[counts_at:extra_at])
        return Commit(number, steps, body[_HEAD.size : counts_at], tuple(counts), body[extra_at:])
