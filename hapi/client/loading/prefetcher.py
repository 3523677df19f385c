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
(split 0) that are in a sample cache are not asked for; the others come into it. They are decoded by threads of their
own, while their connection is asked for the next ones. A scarce link brings one answer after the other (``pacing.py``).

Each batch has its own job, asked for when the batch opens, so that the split can change from one batch to the next
while the batches before are still under way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hapi.arrays import IntArray
from hapi.cache.samples import SampleCache
from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.job import ExtractionJob
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.pacing import RequestPacer
from hapi.client.loading.receiver import OpenBatch, Receiver, RequestSlice, StageSpan
from hapi.client.transport.http import Transport
from hapi.client.transport.server_pool import ServerPool, Stopped
from hapi.errors import BadRequestError, DeviceMemoryError, HapiError, HostMemoryError, WireError
from hapi.process.memory_errors import is_out_of_memory
from hapi.trace import Tracer
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import StreamEnd
from hapi.wire.references import DatasetReference
from hapi.wire.report import RequestReport
from hapi.wire.samples import Samples

_SAMPLE_BYTES, _ANSWER_BYTES, _HEAD_BYTES = 16, 2048, 300
"""Approximate bytes of an answer beside its samples' own and their labels: ids and offsets; frames' headers and the
report; HTTP's headers. Errors are corrected when the answer has come.
"""
SHORT_TRIES = 5
"""Times that servers may be out of memory for a request before another split is tried, where there is one."""
CLOSE_SECONDS = 1.0
"""Time for answers to end by themselves when nobody waits for more of them."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One training batch, whole and in order."""

    number: int
    job: ExtractionJob
    ids: IntArray
    """The ids that its frames carried, row by row."""
    features: torch.Tensor
    """[B, ...] host tensor."""
    labels: torch.Tensor
    """[B] int64 or [B, k] float32 host tensor."""
    spans: Sequence[StageSpan]
    """Times of its requests' parts, in the order of their ends."""
    origins: Sequence[tuple[npt.NDArray[np.int64], str]] = ()
    """Rows and the server that sent them."""


class Prefetcher:
    """Receives the batches of one pass; iterate it once, from one thread, and close it."""

    def __init__(
        self,
        job_of: Callable[[int], ExtractionJob],
        servers: ServerPool,
        batches: Sequence[IntArray],
        *,
        request_size: int,
        in_flight: int,
        budget: int,
        buffers: BufferPool,
        tracer: Tracer,
        traffic: Traffic | None = None,
        caches: Mapping[DatasetReference, SampleCache] | None = None,
        pacing: RequestPacer | None = None,
        check: bool = True,
        movable: Callable[[int], bool] = lambda split: False,
    ) -> None:
        """``job_of(n)`` is asked once, when batch ``n`` opens, from any thread; all jobs are of one dataset.

        ``in_flight`` requests are under way at most, with ``pacing`` no more than the link needs. ``check``: as in
        :class:`Receiver`. ``movable(split)``: whether what servers have no memory for at ``split`` may be asked for at
        an earlier one.
        """
        self._job_of = job_of
        self._tracer = tracer
        self._servers = servers
        self._batches = batches
        self._request_size = request_size
        self._budget = budget
        self._buffers = buffers
        self.traffic = traffic or Traffic(servers.received_bytes)
        self._closed = threading.Event()
        self._receiver = Receiver(self.traffic, tracer, caches or {}, self._closed, check)
        self._pacing = pacing
        self._movable = movable
        self._changed = threading.Condition()
        self._opened = 0
        self._slices: list[RequestSlice] = []
        self._in_line: list[RequestSlice] = []
        """Batches whose requests wait for their turn."""
        self._live: dict[int, OpenBatch] = {}
        self._next_job: ExtractionJob | None = None
        """Job of the batch that opens next, once it was asked for."""
        self._failure: BaseException | None = None
        self.refused: int | None = None
        """The split that a server said its device has no memory for."""
        count = min(in_flight, sum(-(-len(b) // request_size) for b in batches))
        self._decoders = ThreadPoolExecutor(max(1, count), thread_name_prefix="hapi-window-decode")
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
            yield Batch(
                number, batch.job, batch.arrived_ids, batch.features, batch.labels, batch.spans, batch.origins
            )
            with self._changed:
                del self._live[number], batch
                self._changed.notify_all()
        self._joined(CLOSE_SECONDS)  # the last answers' reports come after their samples
        self._decoders.shutdown()

    def close(self) -> None:
        """Stop receiving; returns once no thread writes into a batch any more."""
        # Ctrl-C may have come after the lock was taken and before the block that gives it back, or the other way
        # round; nobody else would ever get it then.
        with contextlib.suppress(RuntimeError):
            while True:
                self._changed.release()
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        while not self._joined(CLOSE_SECONDS):
            self._servers.interrupt()  # a server that is silent would hold them until its timeout
        self._decoders.shutdown(cancel_futures=True)

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
            while (part := self._next_slice()) is not None:
                self._fetch(part)
        except Stopped:
            self._fail(HapiError("the session was closed while an epoch was under way"))
        except BaseException as error:  # whatever it is, the consumer must learn of it and not wait for ever
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if is_out_of_memory(error):
            size = max(map(len, self._batches))
            error = DeviceMemoryError(
                f"this machine's memory does not hold training batches of {size} samples ({error}); "
                "choose a smaller --bs or a later --split"
            )
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _decode(self, batch: OpenBatch, rows: npt.NDArray[np.int64], samples: Samples) -> None:
        """Decode stored samples that came over the network, and keep them; for a thread of its own."""
        try:
            self._receiver.decode(batch, rows, samples)
            self._arrived(batch, rows, samples.ids)
            self._receiver.keep(batch, samples)
        except BaseException as error:
            self._fail(error)

    def _fetch(self, part: RequestSlice) -> None:
        for rows, ids, samples in self._receiver.cached(part):
            if samples is not None:
                self._receiver.decode(part.batch, rows, samples)
            self._arrived(part.batch, rows, ids)
        if part.next == len(part.rows):
            return
        received = None
        self._await_turn(part)
        try:
            received = self._servers.run(
                self._attempts_of(part),
                progress=lambda: part.next,
                cancelled=self._closed.is_set,
            )
        except DeviceMemoryError:
            self.refused = part.batch.job.split
            raise
        finally:
            if self._pacing is not None:
                with self._changed:
                    self._pacing.done(part, part.batch.job.split, received)
                    self._changed.notify_all()

    def _attempts_of(self, part: RequestSlice) -> Callable[[Transport], int]:
        """Attempts for ``part``; of servers that stay out of memory it has enough before the patience ends."""
        split, short = part.batch.job.split, 0

        def attempt(transport: Transport) -> int:
            """Ask one server; :class:`DeviceMemoryError` once it was short of memory often enough."""
            nonlocal short
            try:
                return self._attempt(transport, part)
            except HostMemoryError as error:
                short += 1
                if short < SHORT_TRIES or not self._movable(split):
                    raise
                raise DeviceMemoryError(str(error)) from None

        return attempt

    def _await_turn(self, part: RequestSlice) -> None:
        """Return when the request for ``part`` should go out: in the order of the pieces, as the pacing has it."""
        if self._pacing is None:
            return
        job = part.batch.job
        each = (
            (job.sample_bytes() if job.split else job.mean_stored_bytes) + _SAMPLE_BYTES + job.labels.nbytes
        )
        with self._changed:
            self._in_line.append(part)
            try:
                while True:
                    if self._closed.is_set() or self._failure is not None:
                        raise Stopped
                    first = min(self._in_line, key=lambda p: (p.batch.number, p.rows[0])) is part
                    delay = self._pacing.delay(job.split) if first else None
                    if delay == 0:
                        self._pacing.sent(part, len(part.rows) * each + _ANSWER_BYTES)
                        return
                    self._changed.wait(delay)
            finally:
                self._in_line.remove(part)
                self._changed.notify_all()

    def _next_slice(self) -> RequestSlice | None:
        """The first piece nobody works on; opens the next batch when the budget allows."""
        with self._changed:
            while True:
                if self._closed.is_set() or self._failure is not None:
                    return None
                if self._slices:
                    return self._slices.pop(0)
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
        batch = OpenBatch(
            number=number,
            job=job,
            ids=ids,
            features=self._buffers.tensor((len(ids), *job.shape), job.dtype),
            labels=torch.from_numpy(job.labels.empty(len(ids))),
            arrived=np.zeros(len(ids), dtype=bool),
            arrived_ids=np.full(len(ids), -1, dtype=np.int64),
            nbytes=self._batch_bytes(job, len(ids)),
        )
        self._opened += 1
        self._live[number] = batch
        starts = range(0, len(ids), self._request_size)
        self._slices += [
            RequestSlice(batch, np.arange(s, min(s + self._request_size, len(ids)))) for s in starts
        ]
        self._changed.notify_all()

    def _attempt(self, transport: Transport, part: RequestSlice) -> int:
        """Ask one server for what is missing of ``part``; the bytes of its answer."""
        if self._closed.is_set():
            raise Stopped
        if part.next == len(part.rows):
            return 0
        batch, job = part.batch, part.batch.job
        ids = batch.ids[part.rows[part.next :]]
        request, asked, received = job.request(ids, first=part.next == 0), time.monotonic(), 0
        began = asked

        def read(reader: FrameReader) -> RequestReport:
            """Take the answer; :class:`WireError` when samples are missing at its end."""
            nonlocal received, began
            began = time.monotonic()
            end = self._receive(reader, part, transport.url)
            received = reader.bytes_read
            if missing := len(part.rows) - part.next:
                raise WireError(f"{transport.url}: the stream ended {missing} samples early")
            try:
                return RequestReport.from_json(end.report)
            except BadRequestError as error:
                raise WireError(f"{transport.url}: {error}") from None

        with self._tracer.span("request", "network", batch=batch.number, samples=len(ids)):
            try:
                report = transport.stream(job.path, request, read)
            except BadRequestError as error:
                raise job.explained(error, transport.url) from None
        ended = time.monotonic()
        self.traffic.answered(job.split, len(ids), report, received, began - asked, ended - asked)
        return received + _HEAD_BYTES

    def _receive(self, reader: FrameReader, part: RequestSlice, server: str) -> StreamEnd:
        """Take the frames of an answer; stored samples are decoded while the connection is asked for the next ones."""
        while not isinstance(found := self._receiver.next(reader, part, server), StreamEnd):
            if found.samples is None:
                self._arrived(part.batch, found.rows, found.ids)
                continue
            try:
                self._decoders.submit(self._decode, part.batch, found.rows, found.samples)
            except RuntimeError:  # they have been shut down
                raise Stopped from None
        return found

    def _arrived(self, batch: OpenBatch, rows: npt.NDArray[np.int64], ids: npt.ArrayLike) -> None:
        """The samples of ``rows``, which carried ``ids``, are in their places."""
        with self._changed:
            if batch.arrived[rows].any():
                raise HapiError(f"batch {batch.number}: a sample arrived twice; this is a defect of hapi")
            batch.arrived[rows] = True
            batch.arrived_ids[rows] = ids
            if batch.arrived.all():
                self._changed.notify_all()
