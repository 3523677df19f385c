"""Reading frames (:mod:`hapi.wire.frames`): every length, name and number is checked before anything is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.codecs.codec import decode
from hapi.codecs.names import NONE
from hapi.errors import WireError, from_problem
from hapi.wire.documents import parse_document
from hapi.wire.frames import (
    DTYPE_BYTES,
    MAGIC,
    MAX_ID,
    MAX_TENSORS,
    OLDEST_VERSION,
    PREFIX,
    SLICE_BYTES,
    TRAILER,
    WIRE_VERSION,
    Buffer,
    FrameHeader,
    FrameKind,
    FrameLimits,
    StreamEnd,
    TensorSpec,
    byte_view,
    padded,
    payload_size,
)


class ByteSource(Protocol):
    """Source of a reader's bytes: a response's socket, a file, a list of buffers."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill at most ``len(buffer)`` bytes and return how many; 0 at the end of the stream."""


HEAD_BYTES = 64 << 10
"""Bytes that may come at once after a pause, from buffers on the way."""
Sink = Callable[[FrameHeader], Sequence[memoryview]]
"""Returns the buffers for a frame's tensors, given its header: one for each tensor, of its exact length."""
_Form = tuple[int, tuple[TensorSpec, ...]]
"""Number of a frame's ids, and its tensors."""


class FrameReader:
    """Reads a stream of frames, each tensor straight into the buffer that the caller's sink names, decoded as it comes.

    States: ``open`` -> (data frame)* -> ``ended`` after the end frame; any error leaves it ``broken`` and the
    connection unusable. Raises :class:`WireError` for bytes that break the format or their checksum, and the
    carried :class:`HapiError` for an error frame.
    """

    def __init__(
        self,
        source: ByteSource,
        limits: FrameLimits | None = None,
        arriving: Callable[[bool], object] = lambda owed: None,
        code: str | None = None,
    ) -> None:
        """Read from ``source``.

        Args:
            source: of the bytes.
            limits: of a frame's parts.
            arriving: called with True when a frame begins to come, with False when it has.
            code: version of the code that computes the answer, as its header tells; None for one that does not.
        """
        self.code = code
        self._source = source
        self._limits = limits or FrameLimits()
        self._arriving = arriving
        self._digest = xxhash.xxh3_64()
        self._header: bytearray | None = None
        """The last data frame's header, and what it says."""
        self._parsed: _Form = (0, ())
        self.frames = 0
        self.samples = 0
        self.bytes_read = 0
        """Bytes of the stream consumed so far, headers and checksums included."""

    def over(self, wrap: Callable[[ByteSource], ByteSource]) -> FrameReader:
        """Return a reader that takes this one's place, with ``wrap`` around its source."""
        return FrameReader(wrap(_Counted(self)), self._limits, self._arriving, self.code)

    def next(self, sink: Sink, flowing: Callable[[], object] = lambda: None) -> FrameHeader | StreamEnd:
        """Receive the next frame: a data frame's header once its tensors have arrived and been checked, or
        the end.

        Args:
            sink: gives the buffers that tensors are received into.
            flowing: called when the first :data:`HEAD_BYTES` of a longer tensor have arrived.
        """
        self._digest = xxhash.xxh3_64()
        prefix = memoryview(bytearray(PREFIX.size))
        self._arriving(False)
        come = self._some(prefix)
        self._arriving(True)
        self._fill(prefix[come:])
        magic, version, kind, reserved, header_bytes, payload_bytes = PREFIX.unpack(prefix)
        if magic != MAGIC or reserved != 0:
            raise WireError("stream out of step: no frame starts here")
        if not OLDEST_VERSION <= version <= WIRE_VERSION:
            raise WireError(
                f"the other side speaks wire version {version}, this one {OLDEST_VERSION} and {WIRE_VERSION}; "
                "update one"
            )
        if header_bytes > self._limits.header or payload_bytes > self._limits.payload:
            raise WireError(
                f"frame of {header_bytes} + {payload_bytes} bytes exceeds the limit of "
                f"{self._limits.header} + {self._limits.payload}"
            )
        raw = bytearray(header_bytes)
        self._fill(memoryview(raw))
        if kind == FrameKind.DATA:
            return self._data(self._form(raw), payload_bytes, sink, flowing)
        document = _json(raw)
        if payload_bytes:
            raise WireError(f"a frame of kind {kind} carries no payload, this one {payload_bytes} bytes")
        self._check_trailer()
        if kind == FrameKind.ERROR:
            status = document.get("status")
            raise from_problem(document, status if type(status) is int else 500)
        if kind != FrameKind.END:
            raise WireError(f"unknown frame kind {kind}")
        return self._end(document)

    def _form(self, raw: bytearray) -> _Form:
        """Parsed header of a data frame; most are equal to the one before."""
        if raw != self._header:
            self._header, self._parsed = raw, _parse_header(_json(raw), self._limits.samples)
        return self._parsed

    def _data(
        self, form: _Form, payload_bytes: int, sink: Sink, flowing: Callable[[], object]
    ) -> FrameHeader:
        count, tensors = form
        needed = payload_size(count, tensors)
        if needed != payload_bytes:
            raise WireError(f"frame says {payload_bytes} payload bytes, its ids and tensors need {needed}")
        if (raw := payload_size(count, [t.raw for t in tensors])) > self._limits.payload:
            raise WireError(
                f"frame of {raw} bytes, once decoded, exceeds the limit of {self._limits.payload}"
            )
        header = FrameHeader(self._ids(count), tensors)
        buffers = sink(header)
        if [len(b) for b in buffers] != [t.nbytes for t in header.tensors]:
            raise ValueError("sink gave buffers of another length than the frame header says")
        for spec, buffer in zip(header.tensors, buffers, strict=True):
            fill = self._flow(spec.wire_bytes, flowing)
            if spec.codec == NONE:
                fill(buffer)
            else:
                itemsize, rows = DTYPE_BYTES[spec.dtype], spec.shape[0] if spec.shape else 1
                decode(spec.codec, fill, spec.wire_bytes, buffer, itemsize, rows)
            self._skip_padding(spec.wire_bytes)
        self._check_trailer()
        self.frames += 1
        self.samples += len(header.ids)
        return header

    def _flow(self, nbytes: int, flowing: Callable[[], object]) -> Callable[[memoryview], None]:
        """A function that fills buffers with a tensor's ``nbytes``, of which the first ones tell that it flows."""
        head = HEAD_BYTES if nbytes > HEAD_BYTES else 0

        def fill(buffer: memoryview) -> None:
            """Fill ``buffer`` wholly."""
            nonlocal head
            if 0 < head <= len(buffer):
                self._fill(buffer[:head])
                flowing()
                buffer, head = buffer[head:], 0
            elif head:
                head -= len(buffer)
            self._fill(buffer)

        return fill

    def _ids(self, count: int) -> npt.NDArray[np.int64]:
        ids = np.empty(count, dtype="<i8")
        self._fill(byte_view(ids))
        self._skip_padding(ids.nbytes)
        if count and not 0 <= int(ids.min()) <= int(ids.max()) <= MAX_ID:
            raise WireError("frame: a sample id is negative or too large")
        return ids.astype(np.int64, copy=False)

    def _skip_padding(self, nbytes: int) -> None:
        padding = bytearray(padded(nbytes) - nbytes)
        self._fill(memoryview(padding))
        if any(padding):
            raise WireError("frame padding is not zero")

    def _end(self, document: dict[str, Any]) -> StreamEnd:
        frames, samples, report = (document.get(k) for k in ("frames", "samples", "report"))
        if frames != self.frames or samples != self.samples or not isinstance(report, dict):
            raise WireError(
                f"end frame counts {frames!r:.20} frames and {samples!r:.20} samples, "
                f"but {self.frames} and {self.samples} came"
            )
        return StreamEnd(self.frames, self.samples, report)

    def _check_trailer(self) -> None:
        computed = self._digest.intdigest()
        raw = memoryview(bytearray(TRAILER.size))
        self._fill(raw)
        (sent,) = TRAILER.unpack(raw)
        if sent != computed:
            raise WireError(f"frame checksum mismatch: {computed:016x} received, {sent:016x} sent")

    def _fill(self, buffer: memoryview) -> None:
        """Fill ``buffer`` wholly, hashing each slice while it is in the cache."""
        start, total = 0, len(buffer)
        while start < total:
            start += self._some(buffer[start : start + SLICE_BYTES])

    def _some(self, part: memoryview) -> int:
        """Some bytes of ``part``, at least one; how many."""
        count = self._source.readinto(part)
        if not count:
            raise WireError(f"stream cut off after {self.bytes_read} bytes")
        self._digest.update(part[:count])
        self.bytes_read += count
        return count


class _Counted:
    """The source of a reader that another one reads for: what it takes counts as the first one's, too."""

    def __init__(self, reader: FrameReader) -> None:
        self._reader = reader

    def readinto(self, buffer: memoryview, /) -> int | None:
        count = self._reader._source.readinto(buffer)
        self._reader.bytes_read += count or 0
        return count


def _json(raw: bytearray) -> dict[str, Any]:
    try:
        document = parse_document(raw)
    except ValueError as error:
        raise WireError(f"frame header is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise WireError("frame header is not a JSON object")
    return document


def _parse_header(document: dict[str, Any], max_samples: int) -> _Form:
    """Number of ids (``max_samples`` of them), and the tensors."""
    ids, tensors = document.get("ids"), document.get("tensors")
    if type(ids) is not int or not 0 <= ids <= max_samples:
        raise WireError(f"frame header: ids is not a number of samples from 0 to {max_samples}")
    if not isinstance(tensors, list) or not 1 <= len(tensors) <= MAX_TENSORS:
        raise WireError(f"frame header: expected 1 to {MAX_TENSORS} tensors")
    return ids, tuple(TensorSpec.from_json(t) for t in tensors)


class BufferSource:
    """A :class:`ByteSource` over buffers that are already there (the loopback transport, tests)."""

    def __init__(self, buffers: Iterator[Buffer]) -> None:
        self._buffers = buffers
        self._current = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill as much of ``buffer`` as the present piece has; return the bytes written, 0 at the end."""
        while not self._current:
            following = next(self._buffers, None)
            if following is None:
                return 0
            self._current = memoryview(following).cast("B")
        count = min(len(buffer), len(self._current))
        buffer[:count] = self._current[:count]
        self._current = self._current[count:]
        return count
