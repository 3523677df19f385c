"""Byte planes: the bytes of equal significance side by side, and those planes compressed that shrink.

Of dense floats only the plane with the exponents does. Where elements have signs, they are rotated by one bit first, so
that this plane has the whole exponent and nothing else.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from hapi.codecs.zeros import Words
from hapi.errors import WireError

PLANES: dict[int, tuple[tuple[int, str], ...]] = {
    1: ((0, "<u1"),),
    2: ((0, "<u1"), (8, "<u1")),
    4: ((0, "<u2"), (16, "<u1"), (24, "<u1")),
    8: ((0, "<u4"), (32, "<u2"), (48, "<u1"), (56, "<u1")),
}
"""For each length of an element the lowest bit of each plane, and its type. The low bits of floats share a plane: they
shrink together or not at all.
"""
LEVEL = 1
LONG_MATCHES = {"min_match": 7, "hash_log": 6}
"""zstd's parameters for planes that hardly repeat: few matches are looked for and only long ones taken, as in exponents
short ones are chance, and cost more bytes and time than they save.
"""
PROBE_BYTES = 16 << 10
"""Bytes from the middle of a plane that tell whether it shrinks, and by which parameters more."""
LEAST_GAIN = 1 / 16
"""Part of a plane's bytes that compression must save."""
MOST_WINDOW = 8 << 20
"""Largest window of a compressed plane, in bytes."""
LENGTH = struct.Struct("<I")

_local = threading.local()


def pack(part: npt.NDArray[Any]) -> bytes | memoryview:
    """Return the bytes of a plane: compressed if that saves enough of them, otherwise as they are."""
    raw = part.view(np.uint8)
    middle, length = raw.nbytes // 2, min(PROBE_BYTES, -(-raw.nbytes // 4))
    probe, compressors = raw[middle : middle + length].data, _compressors()
    sizes = [len(compressor.compress(probe)) for compressor in compressors]
    if length == PROBE_BYTES and min(sizes) > (1 - LEAST_GAIN) * length:
        return raw.data
    packed = compressors[sizes.index(min(sizes))].compress(raw.data)
    return packed if len(packed) <= (1 - LEAST_GAIN) * raw.nbytes else raw.data


def unpack(packed: memoryview, dtype: str, count: int) -> npt.NDArray[Any]:
    """Return the ``count`` elements of a plane; :class:`WireError` when the bytes are none of that length."""
    nbytes = count * np.dtype(dtype).itemsize
    if len(packed) == nbytes:
        return np.frombuffer(packed, dtype=dtype)
    try:
        form = zstandard.get_frame_parameters(packed)
        if form.content_size != nbytes or form.window_size > MOST_WINDOW:
            raise WireError(f"encoded plane: not one of {nbytes} bytes")
        raw = _decompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"encoded plane: damaged ({error})") from None
    if len(raw) != nbytes:
        raise WireError(f"encoded plane: {len(raw)} bytes instead of {nbytes}")
    return np.frombuffer(raw, dtype=dtype)


def signed(words: Words) -> bool:
    """Return whether some element has its highest bit."""
    return words.itemsize > 1 and bool(int(words.max(initial=0)) >> (8 * words.itemsize - 1))


def split(words: Words, *, rotated: bool) -> Iterator[bytes | memoryview]:
    """Yield the planes of ``words`` [n], each packed and after its length."""
    if rotated:
        high = words >> (8 * words.itemsize - 1)
        words = words << 1
        words |= high
    for shift, dtype in PLANES[words.itemsize]:
        packed = pack((words >> shift if shift else words).astype(dtype))
        yield LENGTH.pack(len(packed))
        yield packed


def join(body: memoryview, count: int, itemsize: int, *, rotated: bool) -> Words:
    """Return ``count`` elements of ``itemsize`` bytes from their planes.

    Raises:
        WireError: the planes do not have these elements.
    """
    parts = []
    for _, dtype in PLANES[itemsize]:
        packed, body = section(body)
        parts.append(unpack(packed, dtype, count))
    if body:
        raise WireError(f"encoded planes: {len(body)} bytes too many")
    words: Words = parts[-1].astype(f"<u{itemsize}")
    for part in reversed(parts[:-1]):
        words <<= 8 * part.itemsize
        words |= part
    if rotated:
        high = words << (8 * itemsize - 1)
        words >>= 1
        words |= high
    return words


def section(body: memoryview) -> tuple[memoryview, memoryview]:
    """Return the bytes that follow their length, and the rest; :class:`WireError` if they are cut off."""
    if len(body) < LENGTH.size:
        raise WireError("encoded block: cut off")
    (length,) = LENGTH.unpack_from(body)
    body = body[LENGTH.size :]
    if length > len(body):
        raise WireError("encoded block: cut off")
    return body[:length], body[length:]


def _compressors() -> tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor]:
    """This thread's own, as one works for one thread at a time: for planes that hardly repeat, and for others."""
    found: tuple[zstandard.ZstdCompressor, zstandard.ZstdCompressor] | None = getattr(
        _local, "compressors", None
    )
    if found is None:
        long_matches = zstandard.ZstdCompressionParameters.from_level(LEVEL, **LONG_MATCHES)
        found = _local.compressors = (
            zstandard.ZstdCompressor(compression_params=long_matches),
            zstandard.ZstdCompressor(level=LEVEL),
        )
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    return found
