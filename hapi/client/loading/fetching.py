"""Fetching of a batch's pieces: from the sample cache, then from any server until every row has arrived.

A request that breaks in the middle goes on, on any server, from the first sample that has not arrived. One for features
that straggles is sent to a second server (``hedging.py``). Stored samples
(split 0) that are in a sample cache are not asked for; the others come into it. They are decoded by threads of their
own, while their connection is asked for the next ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hapi.client.loading.pass_loading import PassLoading
from hapi.client.loading.receiver import OpenBatch, Receiver, RequestSlice
from hapi.client.loading.request_line import RequestLine
from hapi.client.transport.hedging import ArrivingSeconds, Measured
from hapi.client.transport.server_pool import Stopped
from hapi.errors import BadRequestError, DeviceMemoryError, HostMemoryError, WireError
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import StreamEnd
from hapi.wire.report import RequestReport
from hapi.wire.samples import Samples
from hapi.wire.transport.base import Transport
from hapi.wire.transport.cancellation import Cancellation

_HEAD_BYTES = 300
"""Approximate bytes of HTTP's headers."""
SHORT_TRIES = 5
"""Times that servers may be out of memory for a request before another split is tried, where there is one."""

Arrival = Callable[[OpenBatch, npt.NDArray[np.int64], npt.ArrayLike], None]
"""Called with a batch, rows of it that are in their places, and the ids that they carried."""


class _Answer(NamedTuple):
    """A whole answer, as :meth:`hapi.client.loading.link_stats.Traffic.answered` wants it."""

    samples: int
    report: RequestReport
    nbytes: int
    began: float
    seconds: float


class Fetcher:
    """Fetches pieces of batches, in any number of threads."""

    def __init__(
        self,
        loading: PassLoading,
        line: RequestLine,
        closed: threading.Event,
        *,
        threads: int,
        arrived: Arrival,
        failed: Callable[[BaseException], None],
    ) -> None:
        """Fetch until ``closed`` is set.

        Args:
            loading: means of the pass.
            line: requests that wait for their turn.
            closed: ends everything.
            threads: that decode stored samples.
            arrived: told of rows that have arrived, from any thread.
            failed: told of errors in the threads that decode.
        """
        self._loading, self._line, self._closed = loading, line, closed
        self._receiver = Receiver(loading, closed)
        self._arrived, self._failed = arrived, failed
        network = loading.traffic.network
        self._arriving = ArrivingSeconds(lambda: network.seconds, loading.servers.received_bytes)
        self._decoders = ThreadPoolExecutor(threads, thread_name_prefix="hapi-window-decode")
        self.refused: int | None = None
        """The split that a server said its device has no memory for."""

    def close(self, *, cancel: bool = False) -> None:
        """Wait for the threads that decode; with ``cancel`` only for what they have begun."""
        self._decoders.shutdown(cancel_futures=cancel)

    def fetch(self, part: RequestSlice) -> None:
        """Return when every row of ``part`` has come; stored samples may yet have to be decoded."""
        for rows, ids, samples in self._receiver.cached(part):
            if samples is not None:
                self._receiver.decode(part.batch, rows, samples)
            self._arrived(part.batch, rows, ids)
        if part.next == len(part.rows):
            return
        received = None
        self._line.await_turn(part)
        model = part.batch.job.model
        measured = Measured(
            kind=part.batch.job.split,
            samples=lambda: len(part.rows) - part.next,
            second=partial(self._second, part) if part.batch.job.split else None,
            arriving_seconds=self._arriving,
        )
        try:
            received = self._loading.servers.run(
                self._attempts_of(part, measured),
                progress=lambda: part.next,
                cancelled=self._closed.is_set,
                resident=model.name if model is not None else "",
                held=part.content,
                measured=measured,
            )
        except DeviceMemoryError:
            self.refused = part.batch.job.split
            raise
        finally:
            self._line.done(part, received)

    def _attempts_of(self, part: RequestSlice, measured: Measured) -> Callable[[Transport], int]:
        """Attempts for ``part``; of servers that stay out of memory it has enough before the patience ends."""
        split, short = part.batch.job.split, 0

        def attempt(transport: Transport) -> int:
            """Ask one server; :class:`DeviceMemoryError` once it was short of memory often enough."""
            nonlocal short
            part.cancellation = measured.cancellation
            try:
                return self._attempt(transport, part, measured)
            except HostMemoryError as error:
                short += 1
                if short < SHORT_TRIES or not self._loading.movable(split):
                    raise
                raise DeviceMemoryError(str(error)) from None

        return attempt

    def _attempt(self, transport: Transport, part: RequestSlice, measured: Measured) -> int:
        """Ask one server for what is missing of ``part``; the bytes of its answer."""
        if self._closed.is_set():
            raise Stopped
        if part.next == len(part.rows):
            return 0
        answer = self._ask_for(transport, part)
        self._loading.traffic.answered(part.batch.job.split, *answer)
        self._line.waits(answer.report.wait)
        measured.shared = answer.report.shared > 0
        return answer.nbytes + _HEAD_BYTES

    def _second(
        self, part: RequestSlice, transport: Transport, cancellation: Cancellation
    ) -> Callable[[], int]:
        """Ask a second server for what is missing of ``part``; returns the function that puts it into its place."""
        other = part.for_second(self._loading.buffers, cancellation)
        self._loading.traffic.extra(0, 1)
        answer = self._ask_for(transport, other)
        return partial(self._take, part, other, answer, transport.url)

    def _take(self, part: RequestSlice, other: RequestSlice, answer: _Answer, server: str) -> int:
        """Put a second server's answer into its place, when nothing else writes there any more; its bytes."""
        rows, traffic, split = part.take(other, server), self._loading.traffic, part.batch.job.split
        if len(rows):
            self._arrived(part.batch, rows, part.batch.ids[rows])
        used = answer.nbytes * len(rows) // answer.samples
        traffic.extra(-used)
        traffic.received(split, used, 0.0)
        traffic.answered(split, *answer)
        return answer.nbytes + _HEAD_BYTES

    def _ask_for(self, transport: Transport, part: RequestSlice) -> _Answer:
        """Ask one server for what is missing of ``part``, some of which there is, and receive it."""
        batch, job = part.batch, self._loading.codecs.understood(part.batch.job, transport.url)
        ids = batch.ids[part.rows[part.next :]]
        request, asked, received = job.request(ids, first=part.next == 0), time.monotonic(), 0
        began = asked

        def read(reader: FrameReader) -> RequestReport:
            """Take the answer; :class:`WireError` when samples are missing at its end."""
            nonlocal received, began
            began = time.monotonic()
            if job.split and self._loading.features is not None:
                self._loading.features.watch.answered(transport.url, reader.code)
            end = self._receive(reader, part, transport.url)
            received = reader.bytes_read
            if missing := len(part.rows) - part.next:
                raise WireError(f"{transport.url}: the stream ended {missing} samples early")
            try:
                return RequestReport.from_json(end.report)
            except BadRequestError as error:
                raise WireError(f"{transport.url}: {error}") from None

        with self._loading.tracer.span("request", "network", batch=batch.number, samples=len(ids)):
            try:
                report = transport.stream(job.path, request, read, part.cancellation)
            except BadRequestError as error:
                if self._loading.codecs.refused(job, transport.url, error):
                    return self._ask_for(transport, part)
                raise job.explained(error, transport.url) from None
        return _Answer(len(ids), report, received, began - asked, time.monotonic() - asked)

    def _receive(self, reader: FrameReader, part: RequestSlice, server: str) -> StreamEnd:
        """Take the frames of an answer; stored samples are decoded while the connection is asked for the next ones."""
        while not isinstance(found := self._receiver.next(reader, part, server), StreamEnd):
            if found.samples is None:
                if not part.second:
                    self._arrived(part.batch, found.rows, found.ids)
                continue
            try:
                self._decoders.submit(self._decode, part.batch, found.rows, found.samples)
            except RuntimeError:  # they have been shut down
                raise Stopped from None
        return found

    def _decode(self, batch: OpenBatch, rows: npt.NDArray[np.int64], samples: Samples) -> None:
        """Decode stored samples that came over the network, and keep them; for a thread of its own."""
        try:
            self._receiver.decode(batch, rows, samples)
            self._arrived(batch, rows, samples.ids)
            self._receiver.keep(batch, samples)
        except BaseException as error:
            self._failed(error)
