"""Reception of samples: frames of an answer become rows of a training batch, compared with the request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hapi.arrays import IntArray, LabelArray
from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.job import ExtractionJob
from hapi.client.loading.pass_loading import PassLoading
from hapi.client.soundness import check_finite
from hapi.client.transport.server_pool import Stopped
from hapi.codecs.names import NONE
from hapi.data.transforms.pipeline import input_batch
from hapi.errors import BadRequestError, WireError
from hapi.models.tensors import tensor_bytes
from hapi.wire import messages
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd, TensorSpec, byte_view
from hapi.wire.samples import Samples
from hapi.wire.transport.cancellation import Cancellation

MOST_STORED_BYTES = 2 << 30
"""Stored samples of one frame, at most; memory is taken for them as they come."""


class StageSpan(NamedTuple):
    """A part of a request, in ``time.monotonic`` seconds."""

    stage: str
    """``server`` while a frame is awaited, ``network`` while one arrives, ``client`` while samples are decoded."""
    name: str
    start: float
    end: float


@dataclass(eq=False)
class OpenBatch:
    """The samples of a batch that are coming in from servers."""

    number: int
    job: ExtractionJob
    ids: IntArray
    features: torch.Tensor
    labels: torch.Tensor
    arrived: npt.NDArray[np.bool_]
    arrived_ids: IntArray
    spans: list[StageSpan] = field(default_factory=list)
    origins: list[tuple[npt.NDArray[np.int64], str]] = field(default_factory=list)
    """Rows and the server that sent them; those of the sample cache are not in it."""


@dataclass(eq=False)
class RequestSlice:
    """One request's share of a batch."""

    batch: OpenBatch
    rows: npt.NDArray[np.int64]
    """Rows of the batch, ascending: consecutive ones, or at split 0 those that the sample cache did not have."""
    next: int = 0
    """Number of rows that have arrived."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    """Cancels the attempt under way."""
    content: str = ""
    """Content whose provider may have kept what is asked for; empty: any server is as good."""
    second: bool = False
    """True for one that a second server is asked for, which has memory of its own."""

    def next_rows(self, count: int) -> npt.NDArray[np.int64]:
        """Return the ``count`` rows that come next."""
        return self.rows[self.next : self.next + count]

    def for_second(self, buffers: BufferPool, cancellation: Cancellation) -> RequestSlice:
        """Return a request for the rows that have not arrived, whose samples do not come into the batch."""
        own, rows = self.batch, self.rows[self.next :]
        batch = OpenBatch(
            number=own.number,
            job=own.job,
            ids=own.ids[rows],
            features=buffers.tensor((len(rows), *own.features.shape[1:]), own.features.dtype),
            labels=torch.empty_like(own.labels[: len(rows)]),
            arrived=np.zeros(len(rows), dtype=bool),
            arrived_ids=np.full(len(rows), -1, dtype=np.int64),
        )
        return RequestSlice(batch, np.arange(len(rows)), cancellation=cancellation, second=True)

    def take(self, other: RequestSlice, server: str) -> npt.NDArray[np.int64]:
        """Copy the rows that have not arrived from a second server's whole answer; return these rows."""
        batch, source, rows = self.batch, other.batch, self.rows[self.next :]
        batch.spans += source.spans
        if len(rows):
            spot, first = _row_index(rows), len(source.ids) - len(rows)
            batch.features[spot] = source.features[first:]
            batch.labels[spot] = source.labels[first:]
            batch.origins.append((rows, server))
            self.next += len(rows)
        return rows


class Arrived(NamedTuple):
    """Samples that came in one frame, or lay together in the sample cache."""

    rows: npt.NDArray[np.int64]
    """Rows of their batch, ascending."""
    ids: npt.NDArray[Any]
    """The ids that they came with, one for each row."""
    samples: Samples | None
    """Stored samples, for :meth:`Receiver.decode`; None for features, which are in their rows already."""


class Receiver:
    """Reads samples into their batches, in any number of threads, and returns them frame by frame."""

    def __init__(self, loading: PassLoading, closed: threading.Event) -> None:
        """Receive for ``loading`` until ``closed`` is set: what is read after that raises :class:`Stopped`."""
        self._check, self._keeps = loading.check, loading.keep_samples
        self._traffic, self._tracer, self._caches = loading.traffic, loading.tracer, loading.caches
        self._closed = closed

    def next(self, reader: FrameReader, part: RequestSlice, server: str) -> Arrived | StreamEnd:
        """Read the next frame of a server's answer.

        Args:
            reader: of the answer.
            part: the request.
            server: its URL.

        Raises:
            WireError: the samples are not those that come next.
            Stopped: the batch is not wanted any more.
        """
        found = (
            self._features(reader, part, server)
            if part.batch.job.split
            else self._stored(reader, part, server)
        )
        if isinstance(found, Arrived):
            part.batch.origins.append((found.rows, server))
            part.next += len(found.rows)
        return found

    def _features(self, reader: FrameReader, part: RequestSlice, server: str) -> Arrived | StreamEnd:
        batch, apart = part.batch, list[torch.Tensor]()

        def sink(header: FrameHeader) -> list[memoryview]:
            """Places of a frame's features and labels."""
            count = len(header.ids)
            rows = _row_index(self._rows(header, part, batch.job.expected_tensors(count)))
            whole = batch.features, batch.labels
            if isinstance(rows, slice):
                return [tensor_bytes(place[rows]) for place in whole]
            # Rows that lie apart are received elsewhere, and copied when their checksum was right.
            apart[:] = [torch.empty((count, *place.shape[1:]), dtype=place.dtype) for place in whole]
            return [tensor_bytes(place) for place in apart]

        header = self._next_frame(reader, part, server, sink)
        if isinstance(header, StreamEnd):
            return header
        rows = part.next_rows(len(header.ids))
        if apart:
            batch.features[_row_index(rows)], batch.labels[_row_index(rows)] = apart
        if self._check:
            what = f"{server}: features of split {batch.job.split}"
            check_finite(batch.features[_row_index(rows)], header.ids, what, batch.job.precision)
        return Arrived(rows, np.asarray(header.ids), None)

    def _stored(self, reader: FrameReader, part: RequestSlice, server: str) -> Arrived | StreamEnd:
        received: list[npt.NDArray[Any]] = []

        def sink(header: FrameHeader) -> list[memoryview]:
            self._rows(header, part, None)
            received[:] = stored_buffers(header, part.batch.job)
            return [byte_view(a) for a in received]

        header = self._next_frame(reader, part, server, sink)
        if isinstance(header, StreamEnd):
            return header
        samples = checked_samples(np.asarray(header.ids), *received)
        return Arrived(part.next_rows(len(header.ids)), samples.ids, samples)

    def cached(self, part: RequestSlice) -> Iterator[Arrived]:
        """Yield the samples of a piece that a sample cache has; afterwards the piece has only the other rows."""
        batch = part.batch
        cache = None if batch.job.split else self._caches.get(batch.job.dataset)
        if cache is None:
            return
        missing = np.ones(len(part.rows), dtype=bool)
        for found, samples in cache.parts(batch.ids[part.rows]):
            if self._closed.is_set():
                raise Stopped
            missing[found] = False
            yield Arrived(part.rows[found], samples.ids, samples)
            self._traffic.cached(batch.job.split, len(samples), len(samples.data))
        part.rows = part.rows[missing]

    def keep(self, batch: OpenBatch, samples: Samples) -> None:
        """Put stored samples into their sample cache, if there is one."""
        cache = self._caches.get(batch.job.dataset)
        if cache is not None and self._keeps:
            cache.put(samples)

    def decode(self, batch: OpenBatch, rows: npt.NDArray[np.int64], samples: Samples) -> None:
        """Decode stored samples into ``rows`` of their batch."""
        job, started = batch.job, time.monotonic()
        with self._traffic.decoding(job.split), self._tracer.span("decode", "decode", samples=len(rows)):
            inputs = input_batch(samples, job.layout, job.transform)
            if tuple(inputs.shape[1:]) != job.shape:
                raise BadRequestError(
                    f"samples come out as {tuple(inputs.shape[1:])}, expected {job.shape}; "
                    "choose an image size (--image-size) that fits the dataset"
                )
            if self._check and (job.layout.sample_dtype or "").startswith("float"):
                check_finite(inputs, samples.ids, f"stored values of dataset {job.dataset.name!r}")
            spot = _row_index(rows)
            batch.features[spot] = inputs
            batch.labels[spot] = torch.from_numpy(samples.labels)
        batch.spans.append(StageSpan("client", "decode", started, time.monotonic()))

    def _next_frame(
        self, reader: FrameReader, part: RequestSlice, server: str, sink: Any
    ) -> FrameHeader | StreamEnd:
        """The next frame; the network's clock runs from its header's arrival to its checksum."""
        spans, asked, before = part.batch.spans, time.monotonic(), reader.bytes_read
        arrival = self._traffic.arrival(part.batch.job.split, server)

        def timed(header: FrameHeader) -> Any:
            buffers = sink(header)
            spans.append(StageSpan("server", "wait for a frame", asked, time.monotonic()))
            arrival.begin()
            return buffers

        try:
            return reader.next(timed, self._traffic.link.flowing)
        finally:
            if arrival.started is not None:
                spans.append(StageSpan("network", "frame", arrival.started, time.monotonic()))
            arrival.end(reader.bytes_read - before, extra=part.second or part.cancellation.cancelled)

    def _rows(
        self, header: FrameHeader, part: RequestSlice, expected: tuple[TensorSpec, ...] | None
    ) -> npt.NDArray[np.int64]:
        """Rows of a frame's samples; :class:`WireError` when they are not the ones that come next."""
        if self._closed.is_set():
            raise Stopped  # nobody wants the rest of the answer; its connection is broken
        count = len(header.ids)
        rows = part.next_rows(count)
        if not count or not np.array_equal(header.ids, part.batch.ids[rows]):
            raise WireError("the server sent other samples than were asked for, or in another order")
        if expected is not None:
            _check_tensors(header.tensors, expected, part.batch.job.codec)
        return rows


def _check_tensors(found: tuple[TensorSpec, ...], expected: tuple[TensorSpec, ...], codec: str) -> None:
    """Raise :class:`WireError` for other tensors, or for another encoding than was asked for."""
    if tuple(t.raw for t in found) != expected:
        raise WireError(f"the server sent {found[0]}, expected {expected[0]}")
    if found[0].codec not in (NONE, codec) or any(t.codec != NONE for t in found[1:]):
        raise WireError(f"the server encoded {found[0].codec} where {codec} was asked for")


def _row_index(rows: npt.NDArray[np.int64]) -> Any:
    """An index of these rows (ascending), a slice where they are consecutive."""
    first, stop = int(rows[0]), int(rows[-1]) + 1
    return slice(first, stop) if stop - first == len(rows) else torch.from_numpy(rows)


def stored_buffers(header: FrameHeader, job: ExtractionJob) -> list[npt.NDArray[Any]]:
    """Make room for a frame's stored samples, their offsets and labels; :class:`WireError` for another frame."""
    count = len(header.ids)
    total = header.tensors[0].shape[0] if len(header.tensors[0].shape) == 1 else -1
    expected = (
        TensorSpec(messages.STORED, "uint8", (total,)),
        TensorSpec(messages.OFFSETS, "int64", (count + 1,)),
        job.labels.spec(count),
    )
    if header.tensors != expected:
        raise WireError(f"the server sent {header.tensors[0]}, expected {expected[0]}")
    if total > min(MOST_STORED_BYTES, job.stored_bytes):
        raise WireError(
            f"the server sends {total} bytes for {count} samples, more than the whole dataset has or this side takes "
            "at once; lower --request-size if they are so large"
        )
    return [np.empty(total, np.uint8), np.empty(count + 1, np.int64), job.labels.empty(count)]


def checked_samples(
    ids: IntArray, data: npt.NDArray[np.uint8], offsets: IntArray, labels: LabelArray
) -> Samples:
    """Return stored samples from a frame's tensors.

    Args:
        ids: int64 [n].
        data: bytes of all samples, uint8 [total].
        offsets: int64 [n + 1] in ``data``.
        labels: int64 [n] or float32 [n, k].

    Raises:
        WireError: the offsets do not fit the bytes.
    """
    if offsets[0] != 0 or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
        raise WireError("the offsets of stored samples do not fit their bytes")
    return Samples(ids=ids, data=data, offsets=offsets, labels=labels)
