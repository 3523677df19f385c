"""Division of the trained parameters into pieces that are read, computed and written one by one.

Pure functions: no torch, no files. A piece holds parts of one large parameter or several small ones; its record in a
store is what the optimiser keeps of them::

    [ state 1 | state 2 | ... of all segments ][ master weights of all segments ]

Each block begins at a multiple of ``ALIGNMENT``, so that the states alone can be read without the page cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hapi.process.direct_io import aligned
from hapi.profiler.offload_costs import PIECE_ELEMENTS

_FLOAT = 4
_SEGMENT_ELEMENTS = 16
"""Segments begin at multiples of so many elements (64 bytes), as tensors of their own do."""


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """Size of a parameter for the planner."""

    elements: int
    columns: int
    """Tensors of its size that the optimiser keeps: 2 for Adam, 1 for SGD with momentum, 0 without."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements ``start`` to ``stop`` of a parameter, and where they lie in the record of their piece (bytes)."""

    parameter: int
    start: int
    stop: int
    states_at: tuple[int, ...]
    master_at: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A unit of reading, computing and writing."""

    number: int
    rank: int
    """Process that keeps it; 0 where one trains alone."""
    drive: int
    at: int
    """Byte of its record in the drive's slot."""
    segments: tuple[Segment, ...]
    states_bytes: int
    """Bytes of the states' block; a multiple of ``ALIGNMENT``, as ``nbytes``."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All pieces of a training, in the order in which backward is expected to finish them."""

    pieces: tuple[StatePiece, ...]
    slot_bytes: tuple[int, ...]
    """Bytes of a slot on each drive."""


def plan_pieces(
    parameters: Sequence[ParameterSize],
    drives: int = 1,
    piece_elements: int = PIECE_ELEMENTS,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Layout:
    """Cut and pack parameters into pieces, striped over the drives.

    Args:
        parameters: sizes in the order of the forward pass; those of no element have no piece.
        drives: number of drives, at least 1.
        piece_elements: most elements of a piece.
        rank: of this process among those that train together; only its own pieces take room on its drives.
        ranks: number of those processes, which keep the pieces in turn.

    Returns:
        Pieces from the last parameter to the first, which is the order of their gradients (LoHan, section IV-C).
    """
    groups: list[list[tuple[int, int, int]]] = []
    room = 0
    for number in range(len(parameters) - 1, -1, -1):
        elements = parameters[number].elements
        if 0 < elements <= room:
            groups[-1].append((number, 0, elements))
            room -= _padded(elements)
            continue
        for start in range(0, elements, piece_elements):
            stop = min(start + piece_elements, elements)
            groups.append([(number, start, stop)])
            room = 0 if elements > piece_elements else piece_elements - _padded(stop - start)
    ends = [0] * drives
    pieces = []
    for number, group in enumerate(groups):
        keeper, own_number = number % ranks, number // ranks
        drive = own_number % drives
        piece = _piece(number, keeper, drive, ends[drive], group, parameters)
        if keeper == rank:
            ends[drive] += piece.nbytes
        pieces.append(piece)
    return Layout(tuple(pieces), tuple(ends))


def _piece(
    number: int,
    rank: int,
    drive: int,
    at: int,
    group: list[tuple[int, int, int]],
    parameters: Sequence[ParameterSize],
) -> StatePiece:
    end = 0
    places = []
    for parameter, start, stop in group:
        size = _padded(stop - start) * _FLOAT
        columns = parameters[parameter].columns
        places.append(tuple(end + size * column for column in range(columns)))
        end += size * columns
    states_bytes = end = aligned(end)
    segments = []
    for (parameter, start, stop), states_at in zip(group, places, strict=True):
        segments.append(Segment(parameter, start, stop, states_at, end))
        end += _padded(stop - start) * _FLOAT
    return StatePiece(number, rank, drive, at, tuple(segments), states_bytes, aligned(end))


def _padded(elements: int) -> int:
    return -(-elements // _SEGMENT_ELEMENTS) * _SEGMENT_ELEMENTS
