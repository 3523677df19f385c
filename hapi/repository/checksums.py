"""Checksum of a stored tensor: a tree over pieces, so that several threads compute it side by side."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

CHECKED_BYTES = 8 << 20
"""Bytes of a piece; a tensor's last one may be shorter."""


def joined(pieces: Sequence[xxhash.xxh3_64]) -> xxhash.xxh3_64:
    """Return a tensor's checksum, given those of its pieces: this is its definition.

    It is xxh3-64 over the xxh3-64 digests of the pieces (8 bytes each, most significant first), one after another. A
    tensor of one piece keeps the plain xxh3-64 of its bytes, an empty one that of nothing. The number of pieces
    follows from the tensor's form, so no tensor has two checksums.
    """
    if len(pieces) == 1:
        return pieces[0]
    return xxhash.xxh3_64(b"".join(piece.digest() for piece in pieces))


class TensorChecksum:
    """The checksum of a tensor whose bytes come in order, in parts of any size. For one thread."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        """Begin with the tensor's first bytes."""
        self._pieces: list[xxhash.xxh3_64] = []
        self._room = 0
        self.update(data)

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        left = memoryview(data)
        while left.nbytes:
            if not self._room:
                self._pieces.append(xxhash.xxh3_64())
                self._room = CHECKED_BYTES
            part = left[: self._room]
            self._pieces[-1].update(part)
            self._room -= part.nbytes
            left = left[part.nbytes :]

    def hexdigest(self) -> str:
        """Return the checksum of the bytes so far, 16 hex digits."""
        return joined(self._pieces).hexdigest()
