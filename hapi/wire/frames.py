"""Frames: how tensors travel. No pickle; every length is checked before anything is allocated.

A response body is a stream of frames, all integers little-endian::

    prefix   magic "HAPF", version u8, kind u8, reserved u16 (0), header length u32, payload length u64
    header   UTF-8 JSON object, padded with spaces so that the payload starts 64-byte aligned in the frame
    payload  the sample ids, i64 each, then the tensors' bytes in the header's order, raw or encoded as it says, each
             padded with zeros to 64 bytes
    trailer  xxh3_64 u64 over prefix, header and payload

A *data* frame carries one COS batch: the sample ids and one or more named tensors. Nothing in it costs a step of
Python for each sample, neither to write nor to read: at 512 B that would be most of the work. An *end* frame closes a
good stream, with the server's seconds per stage; its length is fixed, so that the length of a whole response
is known before the first forward pass. An *error* frame carries problem details when something breaks after
the status line was sent. A stream without an end or error frame was cut off.

The checksum trails the payload so that both sides hash each slice while it is warm in the cache, and the first
slice is on the wire before the last one is hashed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.codecs.exact import Buffer as Buffer
from hapi.codecs.names import CODECS, ITEM_BYTES, LOSSY, NONE
from hapi.errors import BadRequestError, HapiError, WireError

WIRE_VERSION = 4
OLDEST_VERSION = WIRE_VERSION - 1
"""Oldest version that is read, and written for a client that reads no newer one."""
UNNAMED_VERSION = 3
"""Version of clients that name none, as those did that had one."""
VERSION_HEADER = "X-Hapi-Wire"
"""Header of a request for frames: the newest version that its client reads."""
MEDIA_TYPE = "application/vnd.hapi.frames"
ALIGNMENT = 64
SLICE_BYTES = 1 << 20
"""Bytes handed to the socket at a time; 1 MiB was the fastest in our measurements (64 KiB: half)."""

MAGIC = b"HAPF"
PREFIX = struct.Struct("<4sBBHIQ")
TRAILER = struct.Struct("<Q")
_ID_BYTES = 8

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""The dtypes that may cross, with the bytes of one element."""

MAX_DIMENSIONS = 8
MAX_ID = (1 << 62) - 1
MAX_TENSORS = 4096


NO_IDS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


class FrameKind(IntEnum):
    """Kind of a frame."""

    DATA = 1
    END = 2
    ERROR = 3


@dataclass(frozen=True)
class FrameLimits:
    """Upper bounds that a reader enforces before it allocates; bytes where nothing else is said."""

    header: int = 16 << 20
    payload: int = 4 << 30
    samples: int = 65536
    """Number of sample ids in a frame: as many as a request may ask for."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor inside a frame: its name, element type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str = NONE
    """Encoding of its bytes; one of :data:`hapi.codecs.names.CODECS`."""
    encoded_bytes: int | None = None
    """Their number; None for raw ones."""

    @property
    def nbytes(self) -> int:
        """Bytes of the raw tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def wire_bytes(self) -> int:
        """Bytes of the tensor on the wire."""
        return self.nbytes if self.encoded_bytes is None else self.encoded_bytes

    @property
    def raw(self) -> TensorSpec:
        """The same tensor, not encoded."""
        return self if self.codec == NONE else replace(self, codec=NONE, encoded_bytes=None)

    def to_json(self) -> dict[str, Any]:
        """Return the header entry, as :meth:`from_json` reads it."""
        entry = {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "codec": self.codec}
        return entry if self.encoded_bytes is None else {**entry, "bytes": self.encoded_bytes}

    @classmethod
    def from_json(cls, document: Any) -> TensorSpec:
        """Parse one header entry; raises :class:`WireError` on anything unexpected but unknown fields."""
        if not isinstance(document, dict) or not {"name", "dtype", "shape", "codec"} <= set(document):
            raise WireError("frame header: a tensor needs name, dtype, shape, codec, bytes if encoded")
        name, dtype, shape, codec = (document[k] for k in ("name", "dtype", "shape", "codec"))
        if not isinstance(name, str) or not 0 < len(name) <= 512:
            raise WireError("frame header: tensor name is not a string of 1 to 512 characters")
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise WireError(f"frame header: dtype {dtype!r:.40} is not one of {', '.join(DTYPE_BYTES)}")
        if codec not in CODECS:
            raise WireError(f"frame header: codec {codec!r:.40} is not one of {', '.join(CODECS)}")
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
            raise WireError(f"frame header: shape of {name!r:.60} is not a list of at most {MAX_DIMENSIONS}")
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
            raise WireError(f"frame header: shape of {name!r:.60} has an entry that is not a size")
        return cls(name, dtype, tuple(shape), codec, document.get("bytes")).checked(document)

    def checked(self, document: Mapping[str, Any]) -> TensorSpec:
        """Return this, parsed from ``document``; :class:`WireError` if it cannot be encoded as it says."""
        if self.codec == NONE:
            if "bytes" in document:
                raise WireError("frame header: bytes are for encoded tensors")
        elif type(self.encoded_bytes) is not int or not 0 < self.encoded_bytes < self.nbytes:
            raise WireError(f"frame header: {self.name!r:.60} does not say how few bytes it is encoded in")
        elif not codec_fits(self.codec, self.dtype):
            raise WireError(f"frame header: codec {self.codec} of {self.dtype} elements")
        return self


def codec_fits(codec: str, dtype: str) -> bool:
    """Return whether elements of ``dtype`` can be encoded so: those that round are for float32."""
    return dtype == "float32" or (codec not in LOSSY and DTYPE_BYTES[dtype] in ITEM_BYTES)


@dataclass(frozen=True, eq=False)
class FrameHeader:
    """Header of a data frame: ids and the forms of its tensors."""

    ids: npt.NDArray[np.int64]
    """Ids of the samples in the frame, in the order of the tensors' rows; int64 [n], empty for model tensors."""
    tensors: tuple[TensorSpec, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload, padding included."""
        return payload_size(len(self.ids), self.tensors)


@dataclass(frozen=True)
class StreamEnd:
    """The end frame: the server's report on the whole request."""

    frames: int
    samples: int
    report: dict[str, Any] = field(default_factory=dict)
    """Seconds per stage and other figures; see :class:`hapi.wire.report.RequestReport`."""


def agreed_version(named: str | None) -> int:
    """Return the version of an answer's frames.

    Args:
        named: newest version that the client reads, from its header; None where it names none.

    Raises:
        BadRequestError: it is no number, or older than :data:`OLDEST_VERSION`.
    """
    if named is not None and not (named.isascii() and named.isdigit() and len(named) < 4):
        raise BadRequestError(
            f"{VERSION_HEADER}: expected a number, the newest version of frames that is read"
        )
    newest = UNNAMED_VERSION if named is None else int(named)
    if newest < OLDEST_VERSION:
        raise BadRequestError(
            f"the client reads wire version {newest}, this server writes {OLDEST_VERSION} and {WIRE_VERSION}; update "
            "the client"
        )
    return min(newest, WIRE_VERSION)


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to the next multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _head(
    kind: FrameKind,
    header: Mapping[str, Any],
    payload_bytes: int,
    pad_to: int = 0,
    version: int = WIRE_VERSION,
) -> bytes:
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    length = max(padded(PREFIX.size + len(text)), pad_to) - PREFIX.size
    prefix = PREFIX.pack(MAGIC, version, kind, 0, length, payload_bytes)
    return prefix + text.ljust(length)


def payload_size(count: int, tensors: Sequence[TensorSpec]) -> int:
    """Return the bytes of ``count`` ids and these tensors, each with its padding."""
    return padded(count * _ID_BYTES) + sum(padded(t.wire_bytes) for t in tensors)


def _header_json(header: FrameHeader) -> dict[str, Any]:
    return {"ids": len(header.ids), "tensors": [t.to_json() for t in header.tensors]}


def frame_bytes(header: FrameHeader) -> int:
    """Return the length on the wire of the data frame with this header, known before its tensors are."""
    return len(_head(FrameKind.DATA, _header_json(header), 0)) + header.payload_bytes + TRAILER.size


END_BYTES = 2048 + TRAILER.size
"""Length on the wire of an end frame whose report lists no layers."""
_LAYER_BYTES = 16
"""Most bytes that a layer's seconds take in a report."""


def end_bytes(layers: int) -> int:
    """Return the length on the wire of an end frame whose report lists the seconds of ``layers`` layers."""
    return END_BYTES + _LAYER_BYTES * layers


@dataclass(frozen=True)
class StreamedBytes:
    """A tensor's bytes that come piece by piece while its frame is sent."""

    nbytes: int
    """Bytes of all pieces together."""
    buffers: Iterable[Buffer]

    def __len__(self) -> int:
        return self.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        """The pieces; ValueError when they do not have the bytes that they were to have."""
        left = self.nbytes
        for buffer in self.buffers:
            view = memoryview(buffer).cast("B")
            left -= len(view)
            yield view
        if left:
            raise ValueError(f"a tensor's pieces lack {left} of its {self.nbytes} bytes")


def data_frame(
    header: FrameHeader, buffers: Sequence[Buffer | StreamedBytes], version: int = WIRE_VERSION
) -> Iterator[Buffer]:
    """Yield the slices of one data frame in order, without copying the tensors.

    Args:
        header: the frame's header.
        buffers: bytes of each tensor, of the exact length that the header says. If one comes in
            :class:`StreamedBytes` and fails, the frame stays unfinished.
        version: that the reader understands, by :func:`agreed_version`.

    Raises:
        ValueError: a buffer has another length.
    """
    views: list[memoryview | StreamedBytes] = [
        b if isinstance(b, StreamedBytes) else memoryview(b).cast("B") for b in buffers
    ]
    if [len(v) for v in views] != [t.wire_bytes for t in header.tensors]:
        raise ValueError("buffers do not have the lengths that the frame header says")
    views.insert(0, byte_view(np.ascontiguousarray(header.ids, dtype="<i8")))
    head = _head(FrameKind.DATA, _header_json(header), header.payload_bytes, version=version)
    # Each slice is hashed just before it is sent, while it is in the cache. Padding is part of the checksum.
    digest = xxhash.xxh3_64(head)
    yield head
    for view in views:
        for part in view if isinstance(view, StreamedBytes) else (view,):
            for start in range(0, len(part), SLICE_BYTES):
                sliced = part[start : start + SLICE_BYTES]
                digest.update(sliced)
                yield sliced
        padding = padded(len(view)) - len(view)
        if padding:
            digest.update(bytes(padding))
            yield bytes(padding)
    yield TRAILER.pack(digest.intdigest())


SMALL_BYTES = 16 << 10
"""Pieces up to this length are worth copying together: a write to a socket costs more than the copy."""


def joined(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """The same bytes in fewer pieces: neighbouring small ones become one, large ones pass uncopied."""
    small = bytearray()
    for part in buffers:
        if len(part) <= SMALL_BYTES:
            small += part
            continue
        if small:
            yield bytes(small)
            small.clear()
        yield part
    if small:
        yield bytes(small)


def end_frame(end: StreamEnd, layers: int = 0, version: int = WIRE_VERSION) -> bytes:
    """Return the whole end frame, :func:`end_bytes` of ``layers`` long; ValueError if the report does not
    fit.
    """
    document = {"frames": end.frames, "samples": end.samples, "report": end.report}
    head = _head(FrameKind.END, document, 0, pad_to=end_bytes(layers) - TRAILER.size, version=version)
    if len(head) + TRAILER.size != end_bytes(layers):
        raise ValueError("the report does not fit an end frame")
    return head + TRAILER.pack(xxhash.xxh3_64_intdigest(head))


def error_frame(error: HapiError, version: int = WIRE_VERSION) -> bytes:
    """Return the whole error frame that carries ``error`` as problem details."""
    head = _head(FrameKind.ERROR, error.to_problem(), 0, version=version)
    return head + TRAILER.pack(xxhash.xxh3_64_intdigest(head))


def byte_view(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the raw bytes of a C-contiguous array without a copy; writable if the array is."""
    if array.nbytes == 0:
        return memoryview(bytearray())
    return array.reshape(-1).view(np.uint8).data
