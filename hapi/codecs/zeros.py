"""Bitmap of the elements that are not zero, and those elements.

Elements are bit patterns: a negative zero is not zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hapi.errors import WireError

Words = npt.NDArray[Any]
"""Elements as unsigned integers."""


def bitmap_bytes(count: int) -> int:
    """Return the length of a bitmap of ``count`` elements, in bytes."""
    return -(-count // 8)


def worthwhile(words: Words) -> bool:
    """Return whether a bitmap saves more than twice its own bytes."""
    zeros = len(words) - int(np.count_nonzero(words))
    return zeros * words.itemsize > 2 * bitmap_bytes(len(words))


def split(words: Words) -> tuple[npt.NDArray[np.uint8], Words]:
    """Return the bitmap of ``words`` [n], first element in the highest bit, and the elements that are not zero."""
    mask = words != 0
    return np.packbits(mask), words[np.flatnonzero(mask)]


def positions(bitmap: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.intp]:
    """Return where the elements lie that a bitmap of ``count`` of them calls not zero."""
    return np.flatnonzero(
        np.unpackbits(bitmap, count=count).view(np.bool_)
    )  # of bytes it takes six times as long


def join(places: npt.NDArray[np.intp], values: Words, out: Words) -> None:
    """Write zeros and ``values`` into ``out`` [n].

    Args:
        places: from :func:`positions`, ascending.
        values: elements that are not zero, one for each place.
        out: written whole.

    Raises:
        WireError: there are more places than values, or fewer.
    """
    if len(places) != len(values):
        raise WireError(f"encoded zeros: the bitmap has {len(places)} elements, {len(values)} came")
    out.fill(0)
    out[places] = values
