"""The window: what is under way between the servers and the training loop.

Each training batch is cut into requests; several are under way at once, on several servers, and may arrive in
any order. The window puts every sample into its place of its batch and hands the batches out in order.

A batch's states::

    planned -> open      its memory is taken and its requests are given out, first batch first
    open    -> full      every row has arrived and passed its frame's checksum
    full    -> consumed  it was handed out, and the consumer came back for the next

A batch opens when the batches that are open, full or in the consumer's hands, and itself, fit the byte budget;
one batch beyond the consumer's is always allowed, so that one is prefetched whatever the budget
(HAPI, section 4.2: requests for iteration i+1 are sent before the client starts on i).

A request that breaks in the middle goes on, on any server, from the first sample that has not arrived. Stored samples
(split 0) that are in a sample cache are not asked for; the others come into it.

Each batch has its own job, asked for when the batch opens, so that the split can change from one batch to the next
while the batches before are still under way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hapi.client.buffers import BufferPool
from hapi.client.job import ExtractionJob
from hapi.client.servers import ServerPool, Stopped
from hapi.client.traffic import Traffic
from hapi.client.transport import Transport
from hapi.errors import BadRequestError, HapiError, WireError
from hapi.storage.dataset import Samples
from hapi.storage.sample_cache import SampleCache
from hapi.storage.transform import input_batch
from hapi.trace import Tracer
from hapi.wire import messages
from hapi.wire.frames import FrameHeader, FrameReader, StreamEnd, TensorSpec, byte_view
from hapi.wire.references import DatasetReference

CLOSE_SECONDS = 1.0
"""Time for answers to end by themselves when nobody waits for more of them."""


class Span(NamedTuple):
    """A part of a request, in ``time.monotonic`` seconds."""

    stage: str
    """``server`` while a frame is awaited, ``network`` while one arrives, ``client`` while samples are decoded."""
    name: str
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Batch:
    """One training batch, whole and in order."""

    number: int
    job: ExtractionJob
    ids: messages.IdArray
    """The ids that its frames carried, row by row."""
    features: torch.Tensor
    """[B, ...] host tensor."""
    labels: torch.Tensor
    """[B] int64 host tensor."""
    spans: Sequence[Span]
    """What its requests did and when, in the order of their ends."""


@dataclass(eq=False)
class _OpenBatch:
    number: int
    job: ExtractionJob
    ids: messages.IdArray
    features: torch.Tensor
    labels: torch.Tensor
    arrived: npt.NDArray[np.bool_]
    arrived_ids: messages.IdArray
    nbytes: int
    spans: list[Span] = field(default_factory=list)


@dataclass(eq=False)
class _Piece:
    """One request's share of a batch."""

    batch: _OpenBatch
    rows: npt.NDArray[np.int64]
    """Of the batch, ascending: consecutive ones, or at split 0 those that the sample cache did not have."""
    next: int = 0
    """How many of them have arrived."""


class Window:
    """Receives the batches of one pass; iterate it once, from one thread, and close it."""

    def __init__(
        self,
        job_of: Callable[[int], ExtractionJob],
        servers: ServerPool,
        batches: Sequence[messages.IdArray],
        *,
        request_size: int,
        in_flight: int,
        budget: int,
        buffers: BufferPool,
        tracer: Tracer,
        traffic: Traffic | None = None,
        caches: Mapping[DatasetReference, SampleCache] | None = None,
    ) -> None:
        """``job_of(n)`` is asked once, when batch ``n`` opens, from any thread; all jobs are of one data set."""
        self._job_of = job_of
        self._caches = caches or {}
        self._tracer = tracer
        self._servers = servers
        self._batches = batches
        self._request_size = request_size
        self._budget = budget
        self._buffers = buffers
        self.traffic = traffic or Traffic(servers.received_bytes)
        self._changed = threading.Condition()
        self._opened = 0
        self._pieces: list[_Piece] = []
        self._live: dict[int, _OpenBatch] = {}
        self._next_job: ExtractionJob | None = None
        """Of the batch that opens next, once it was asked for."""
        self._failure: BaseException | None = None
        self._closed = False
        count = min(in_flight, sum(-(-len(b) // request_size) for b in batches))
        self._threads = [
            threading.Thread(target=self._work, name=f"hapi-window-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[Batch]:
        """The batches in order; each is the consumer's until it asks for the next."""
        for number in range(len(self._batches)):
            with self._changed:
                self._changed.wait_for(lambda n=number: self._failure or self._is_full(n))  # type: ignore[misc]
                if self._failure is not None:
                    raise self._failure
                batch = self._live[number]
            yield Batch(number, batch.job, batch.arrived_ids, batch.features, batch.labels, batch.spans)
            with self._changed:
                del self._live[number], batch
                self._changed.notify_all()
        self._joined(CLOSE_SECONDS)  # the last answers' reports come after their samples

    def close(self) -> None:
        """Stop receiving; returns once no thread writes into a batch any more."""
        # Ctrl-C may have come after the lock was taken and before the block that gives it back, or the other way
        # round; nobody else would ever get it then.
        with contextlib.suppress(RuntimeError):
            while True:
                self._changed.release()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while not self._joined(CLOSE_SECONDS):
            self._servers.interrupt()  # a server that is silent would hold them until its timeout

    def _joined(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _is_full(self, number: int) -> bool:
        batch = self._live.get(number)
        return batch is not None and bool(batch.arrived.all())

    # -- worker threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (piece := self._next_piece()) is not None:
                self._fetch(piece)
        except Stopped:
            self._fail(HapiError("the session was closed while an epoch was under way"))
        except BaseException as error:  # whatever it is, the consumer must learn of it and not wait for ever
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _fetch(self, piece: _Piece) -> None:
        job = piece.batch.job
        cache = None if job.split else self._caches.get(job.dataset)
        if cache is not None:
            self._from_cache(piece, cache)
            if piece.next == len(piece.rows):
                return
        self._servers.run(
            lambda transport: self._attempt(transport, piece),
            progress=lambda: piece.next,
            cancelled=lambda: self._closed,
        )

    def _next_piece(self) -> _Piece | None:
        """The first piece nobody works on; opens the next batch when the budget allows."""
        with self._changed:
            while True:
                if self._closed or self._failure is not None:
                    return None
                if self._pieces:
                    return self._pieces.pop(0)
                if self._opened == len(self._batches):
                    return None
                if self._may_open():
                    self._open_next()
                else:
                    self._changed.wait()

    def _may_open(self) -> bool:
        if len(self._live) < 2:
            return True
        live = sum(b.nbytes for b in self._live.values())
        return live + self._batch_bytes(self._coming_job(), len(self._batches[self._opened])) <= self._budget

    def _coming_job(self) -> ExtractionJob:
        if self._next_job is None:
            self._next_job = self._job_of(self._opened)
        return self._next_job

    @staticmethod
    def _batch_bytes(job: ExtractionJob, count: int) -> int:
        stored = 0 if job.split else count * job.mean_stored_bytes
        return count * job.sample_bytes() + int(stored)

    def _open_next(self) -> None:
        number, ids, job = self._opened, self._batches[self._opened], self._coming_job()
        self._next_job = None
        batch = _OpenBatch(
            number=number,
            job=job,
            ids=ids,
            features=self._buffers.tensor((len(ids), *job.shape), job.dtype),
            labels=torch.empty(len(ids), dtype=torch.int64),
            arrived=np.zeros(len(ids), dtype=bool),
            arrived_ids=np.full(len(ids), -1, dtype=np.int64),
            nbytes=self._batch_bytes(job, len(ids)),
        )
        self._opened += 1
        self._live[number] = batch
        starts = range(0, len(ids), self._request_size)
        self._pieces += [_Piece(batch, np.arange(s, min(s + self._request_size, len(ids)))) for s in starts]
        self._changed.notify_all()

    def _attempt(self, transport: Transport, piece: _Piece) -> None:
        """Ask one server for what is missing of ``piece``."""
        if self._closed:
            raise Stopped
        if piece.next == len(piece.rows):
            return
        batch, job = piece.batch, piece.batch.job
        ids = batch.ids[piece.rows[piece.next :]]
        receive = self._receive_features if job.split else self._receive_stored
        request, asked, received = job.request(ids, first=piece.next == 0), time.monotonic(), 0

        def read(reader: FrameReader) -> messages.RequestReport:
            nonlocal received
            end = receive(reader, piece)
            received = reader.bytes_read
            if missing := len(piece.rows) - piece.next:
                raise WireError(f"{transport.url}: the stream ended {missing} samples early")
            try:
                return messages.RequestReport.from_json(end.report)
            except BadRequestError as error:
                raise WireError(f"{transport.url}: {error}") from None

        with self._tracer.span("request", "network", batch=batch.number, samples=len(ids)):
            report = transport.stream(job.path, request, read)
        self.traffic.answered(job.split, len(ids), report, received, time.monotonic() - asked)

    def _receive_features(self, reader: FrameReader, piece: _Piece) -> StreamEnd:
        batch = piece.batch

        def sink(header: FrameHeader) -> list[memoryview]:
            rows = _spot(self._rows(header, piece, batch.job.expected_tensors(len(header.ids))))
            return [_bytes_of(batch.features[rows]), _bytes_of(batch.labels[rows])]

        while True:
            header = self._next(reader, piece, sink)
            if isinstance(header, StreamEnd):
                return header
            self._arrived(piece.batch, self._next_rows(piece, len(header.ids)), header.ids)
            piece.next += len(header.ids)

    def _receive_stored(self, reader: FrameReader, piece: _Piece) -> StreamEnd:
        batch, cache = piece.batch, self._caches.get(piece.batch.job.dataset)
        received: list[npt.NDArray[Any]] = []

        def sink(header: FrameHeader) -> list[memoryview]:
            self._rows(header, piece, None)
            total, count = header.tensors[0].shape[0], len(header.ids)
            received[:] = [
                np.empty(total, np.uint8),
                np.empty(count + 1, np.int64),
                np.empty(count, np.int64),
            ]
            return [byte_view(a) for a in received]

        while True:
            header = self._next(reader, piece, sink)
            if isinstance(header, StreamEnd):
                return header
            rows = self._next_rows(piece, len(header.ids))
            samples = _checked_samples(np.asarray(header.ids), *received)
            self._take_stored(batch, rows, samples)
            piece.next += len(rows)
            if cache is not None:
                cache.put(samples)

    def _from_cache(self, piece: _Piece, cache: SampleCache) -> None:
        """Take what the cache has of a piece; the other rows are left to be asked for."""
        batch = piece.batch
        for found, samples in cache.parts(batch.ids[piece.rows]):
            if self._closed:
                raise Stopped
            self._take_stored(batch, piece.rows[found], samples)
            self.traffic.cached(batch.job.split, len(samples), len(samples.data))
        piece.rows = piece.rows[~batch.arrived[piece.rows]]

    def _take_stored(self, batch: _OpenBatch, rows: npt.NDArray[np.int64], samples: Samples) -> None:
        """Decode stored samples into ``rows`` of their batch."""
        job, started = batch.job, time.monotonic()
        with self.traffic.decoding(job.split), self._tracer.span("decode", "decode", samples=len(rows)):
            inputs = input_batch(samples, job.layout, job.transform)
            if tuple(inputs.shape[1:]) != job.shape:
                raise BadRequestError(
                    f"samples come out as {tuple(inputs.shape[1:])}, expected {job.shape}; "
                    "choose an image size (--image-size) that fits the data set"
                )
            spot = _spot(rows)
            batch.features[spot] = inputs
            batch.labels[spot] = torch.from_numpy(samples.labels)
        batch.spans.append(Span("client", "decode", started, time.monotonic()))
        self._arrived(batch, rows, samples.ids)

    def _next(self, reader: FrameReader, piece: _Piece, sink: Any) -> FrameHeader | StreamEnd:
        """The next frame; the network's clock runs from its header's arrival to its checksum."""
        spans, asked, before = piece.batch.spans, time.monotonic(), reader.bytes_read
        arrival = self.traffic.arrival(piece.batch.job.split)

        def timed(header: FrameHeader) -> Any:
            buffers = sink(header)
            spans.append(Span("server", "wait for a frame", asked, time.monotonic()))
            arrival.begin()
            return buffers

        try:
            return reader.next(timed)
        finally:
            if arrival.started is not None:
                spans.append(Span("network", "frame", arrival.started, time.monotonic()))
            arrival.end(reader.bytes_read - before)

    @staticmethod
    def _next_rows(piece: _Piece, count: int) -> npt.NDArray[np.int64]:
        return piece.rows[piece.next : piece.next + count]

    def _rows(
        self, header: FrameHeader, piece: _Piece, expected: tuple[TensorSpec, ...] | None
    ) -> npt.NDArray[np.int64]:
        """Where a frame's samples belong; :class:`WireError` when they are not the ones that come next."""
        if self._closed:
            raise Stopped  # nobody wants the rest of the answer; its connection is broken
        count = len(header.ids)
        rows = self._next_rows(piece, count)
        if not count or not np.array_equal(header.ids, piece.batch.ids[rows]):
            raise WireError("the server sent other samples than were asked for, or in another order")
        if expected is None:
            total = header.tensors[0].shape[0] if len(header.tensors[0].shape) == 1 else -1
            expected = (
                TensorSpec(messages.STORED, "uint8", (total,)),
                TensorSpec(messages.OFFSETS, "int64", (count + 1,)),
                TensorSpec(messages.LABELS, "int64", (count,)),
            )
        if header.tensors != expected:
            raise WireError(f"the server sent {header.tensors[0]}, expected {expected[0]}")
        return rows

    def _arrived(self, batch: _OpenBatch, rows: npt.NDArray[np.int64], ids: npt.ArrayLike) -> None:
        """The samples of ``rows``, which carried ``ids``, are in their places."""
        with self._changed:
            if batch.arrived[rows].any():
                raise HapiError(f"batch {batch.number}: a sample arrived twice; this is a defect of hapi")
            batch.arrived[rows] = True
            batch.arrived_ids[rows] = ids
            if batch.arrived.all():
                self._changed.notify_all()


def _spot(rows: npt.NDArray[np.int64]) -> Any:
    """An index of these rows (ascending), a slice where they are consecutive."""
    first, stop = int(rows[0]), int(rows[-1]) + 1
    return slice(first, stop) if stop - first == len(rows) else torch.from_numpy(rows)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Writable raw bytes of a contiguous host tensor of any dtype."""
    return byte_view(tensor.reshape(-1).view(torch.uint8).numpy())


def _checked_samples(
    ids: messages.IdArray, data: npt.NDArray[np.uint8], offsets: messages.IdArray, labels: messages.IdArray
) -> Samples:
    if offsets[0] != 0 or offsets[-1] != len(data) or (np.diff(offsets) < 0).any():
        raise WireError("the offsets of stored samples do not fit their bytes")
    return Samples(ids=ids, data=data, offsets=offsets, labels=labels)
