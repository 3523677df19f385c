"""The window: what is under way between the servers and the training loop.

Each training batch is cut into requests; several are under way at once, on several servers, and may arrive in
any order. The window puts every sample into its place of its batch and hands the batches out in order.

A batch's states::

    planned -> open      its memory is taken, what is kept of it is read, and its requests are given out, in order
    open    -> full      every row has arrived and passed its frame's checksum
    full    -> consumed  it was handed out, and the consumer came back for the next

A batch opens when the batches that are open, full or in the consumer's hands, and itself, fit the byte budget;
one batch beyond the consumer's is always allowed, so that one is prefetched whatever the budget
(HAPI, section 4.2: requests for iteration i+1 are sent before the client starts on i).

Where features are kept, a batch's rows that are in the cache are read first, by the threads that also make requests;
only the others are asked for. A batch that is there whole asks for nothing. How the pieces of batches come is told in
``fetching.py``. A scarce link brings one answer after the other (``pacing.py``).

Each batch that asks for anything has its own job, given when the batch opens, so that the split can change from one
batch to the next while the batches before are still under way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hapi.arrays import Flags, IntArray
from hapi.client.caching.sources import KeptRows, PassFeatures, rows_to_ask
from hapi.client.loading.fetching import Fetcher
from hapi.client.loading.job import ExtractionJob
from hapi.client.loading.pass_loading import PassLoading
from hapi.client.loading.receiver import OpenBatch, RequestSlice, StageSpan
from hapi.client.loading.request_line import RequestLine
from hapi.client.transport.holders import HeldRows
from hapi.client.transport.server_pool import Stopped
from hapi.errors import DeviceMemoryError, HapiError
from hapi.process.memory_errors import is_out_of_memory

CLOSE_SECONDS = 1.0
"""Time for answers to end by themselves when nobody waits for more of them."""
READ_AHEAD = 8
"""Batches that are read ahead when servers are asked for nothing; as many buffers are kept for reuse."""


@dataclass(frozen=True, eq=False)
class Fetched:
    """The rows of a batch that servers sent."""

    job: ExtractionJob
    rows: IntArray
    """Their rows in the batch, ascending."""
    ids: IntArray
    """The ids that their frames carried, row by row."""
    features: torch.Tensor
    """[n, ...] host tensor."""
    labels: torch.Tensor
    """[n] int64 or [n, k] float32 host tensor."""
    spans: Sequence[StageSpan]
    """Times of its requests' parts, in the order of their ends."""
    origins: Sequence[tuple[npt.NDArray[np.int64], str]] = ()
    """Rows of these and the server that sent them."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One training batch, whole and in order."""

    number: int
    ids: IntArray
    """Row by row: as frames carried them, and as the cache was asked for."""
    fetched: Fetched | None
    """None when all rows were in the cache."""
    kept: KeptRows | None
    """None when no row was."""


@dataclass(eq=False)
class LiveBatch:
    """A batch between its opening and its consumption."""

    number: int
    ids: IntArray
    nbytes: int
    held: Flags | None
    """Rows that were kept when it opened."""
    kept: KeptRows | None = None
    rows: IntArray | None = None
    """Rows that are asked for, once that is known."""
    job: ExtractionJob | None = None
    """Job of the samples asked for, as far as it was known when the batch opened."""
    part: OpenBatch | None = None
    """Part that comes from servers; None when nothing does."""

    @property
    def full(self) -> bool:
        """True when every row is in its place."""
        return self.rows is not None and (self.part is None or bool(self.part.arrived.all()))

    def handed_out(self) -> Batch:
        """Return the batch for its consumer."""
        part, rows = self.part, self.rows
        if part is None or rows is None:
            return Batch(self.number, self.ids, None, self.kept)
        fetched = Fetched(
            part.job, rows, part.arrived_ids, part.features, part.labels, part.spans, part.origins
        )
        ids = part.arrived_ids
        if self.kept is not None:
            ids = self.ids.copy()
            ids[rows] = part.arrived_ids
        return Batch(self.number, ids, fetched, self.kept)


class Prefetcher:
    """Receives the batches of one pass; iterate it once, from one thread, and close it."""

    def __init__(
        self, job_of: Callable[[int], ExtractionJob], batches: Sequence[IntArray], loading: PassLoading
    ) -> None:
        """Begin to receive.

        Args:
            job_of: asked once for batch n, when it opens and something of it is to come from servers, from any thread;
                all jobs are of one dataset.
            batches: sample ids of each batch.
            loading: means of the pass.
        """
        self._job_of, self._batches = job_of, batches
        self.loading = loading
        """Means of the pass."""
        self._features = loading.features
        self._request_size = loading.request_size
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._opened = 0
        self._slices: list[RequestSlice] = []
        self._to_read: list[LiveBatch] = []
        """Batches that have opened, whose kept rows nobody has begun to read."""
        self._reading = 0
        """Batches whose kept rows are being read."""
        self._live: dict[int, LiveBatch] = {}
        self._next_job: ExtractionJob | None = None
        """Job of the batch that opens next, once it was asked for."""
        self._next_held: Flags | None = None
        """Which rows of the batch that opens next are kept, once that was looked up."""
        self._looking_up = False
        self._failure: BaseException | None = None
        each = 1 if loading.holders is None else loading.servers.size  # requests for as many rows
        count = min(loading.in_flight, each * sum(-(-len(b) // self._request_size) for b in batches))
        line = RequestLine(
            loading.pacing, self._changed, lambda: self._closed.is_set() or self._failure is not None
        )
        self._fetcher = Fetcher(
            loading, line, self._closed, threads=max(1, count), arrived=self._arrived, failed=self._fail
        )
        self._threads = [
            threading.Thread(target=self._work, name=f"hapi-window-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def refused(self) -> int | None:
        """The split that a server said its device has no memory for."""
        return self._fetcher.refused

    def __iter__(self) -> Iterator[Batch]:
        """The batches in order; each is the consumer's until it asks for the next."""
        for number in range(len(self._batches)):
            with self._changed:
                self._changed.wait_for(lambda n=number: self._failure or self._is_full(n))  # type: ignore[misc]
                if self._failure is not None:
                    raise self._failure
                batch = self._live[number].handed_out()
            yield batch
            del batch
            with self._changed:
                del self._live[number]
                self._changed.notify_all()
        self._joined(CLOSE_SECONDS)  # the last answers' reports come after their samples
        self._fetcher.close()

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
            self.loading.servers.interrupt()  # a server that is silent would hold them until its timeout
        self._fetcher.close(cancel=True)

    def _joined(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _is_full(self, number: int) -> bool:
        batch = self._live.get(number)
        return batch is not None and batch.full

    # -- worker threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                if isinstance(task, RequestSlice):
                    self._fetcher.fetch(task)
                elif isinstance(task, LiveBatch):
                    self._read(task)
                else:
                    self._look_up(task)
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

    def _next_task(self) -> RequestSlice | LiveBatch | PassFeatures | None:
        """Return the next task, in this order: a piece nobody fetches, a batch nobody reads, looking up which
        features are kept of the batch that opens next; opens that batch when the budget allows.
        """
        with self._changed:
            while True:
                if self._closed.is_set() or self._failure is not None:
                    return None
                if self._slices:
                    return self._slices.pop(0)
                if self._to_read:
                    self._reading += 1
                    return self._to_read.pop(0)
                if self._opened == len(self._batches) and not self._reading:
                    return None
                features = self._features
                if self._opened == len(self._batches) or self._looking_up:
                    self._changed.wait()
                elif features is not None and self._next_held is None:
                    self._looking_up = True
                    return features
                elif self._may_open():
                    self._open_next()
                else:
                    self._changed.wait()

    def _look_up(self, features: PassFeatures) -> None:
        """Look up what is kept of the batch that opens next."""
        held = features.held(self._batches[self._opened])
        with self._changed:
            self._next_held, self._looking_up = held, False
            self._changed.notify_all()

    def _may_open(self) -> bool:
        if len(self._live) < 2:
            return True
        if self._next_held is not None and self._next_held.all():
            if len(self._live) >= READ_AHEAD:
                return False
        elif not self.loading.may_open(len(self._live)):
            return False
        return sum(b.nbytes for b in self._live.values()) + self._coming_bytes() <= self.loading.budget

    def _coming_bytes(self) -> int:
        """Bytes of the batch that opens next."""
        held, count, nbytes = self._next_held, len(self._batches[self._opened]), 0
        if held is not None and held.any() and self._features is not None:
            nbytes, count = count * self._features.sample_bytes, int((~held).sum())
        return nbytes + (_batch_bytes(self._coming_job(), count) if count else 0)

    def _coming_job(self) -> ExtractionJob:
        if self._next_job is None:
            self._next_job = self._job_of(self._opened)
        return self._next_job

    def _open_next(self) -> None:
        number, held = self._opened, self._next_held
        batch = LiveBatch(number, self._batches[number], self._coming_bytes(), held)
        self._live[number] = batch
        if held is None or not held.any():
            self._request(batch, np.arange(len(batch.ids)), self._coming_job())
        else:
            batch.job = None if held.all() else self._coming_job()
            self._to_read.append(batch)
        self._opened += 1
        self._next_job = self._next_held = None
        self._changed.notify_all()

    def _read(self, batch: LiveBatch) -> None:
        """Read what is kept of a batch, and ask for the rest: also for what turned out to be damaged, or gone."""
        found: Flags = np.zeros(len(batch.ids), dtype=np.bool_)
        if self._features is not None and batch.held is not None:
            kept = self._features.read(batch.number, batch.ids, batch.held)
            found = kept.found
            batch.kept = kept if found.any() else None
        with self._changed:
            rows = rows_to_ask(found, self._request_size)
            if len(rows):
                self._request(batch, rows, batch.job or self._job_of(batch.number))
            else:
                batch.rows = rows
            self._reading -= 1
            self._changed.notify_all()

    def _request(self, batch: LiveBatch, rows: IntArray, job: ExtractionJob) -> None:
        """Make room for these rows of a batch, and give out the requests for them."""
        count = len(rows)
        batch.rows = rows
        batch.part = part = OpenBatch(
            number=batch.number,
            job=job,
            ids=batch.ids[rows],
            features=self.loading.buffers.tensor((count, *job.shape), job.dtype),
            labels=torch.from_numpy(job.labels.empty(count)),
            arrived=np.zeros(count, dtype=bool),
            arrived_ids=np.full(count, -1, dtype=np.int64),
        )
        self._slices += [RequestSlice(part, held.rows, content=held.content) for held in self._divided(part)]

    def _divided(self, part: OpenBatch) -> Sequence[HeldRows]:
        """The requests for what a batch needs: to the servers that keep features, or as its rows follow each other."""
        count, size, job, holders = len(part.ids), self._request_size, part.job, self.loading.holders
        if holders is not None and job.keepable:
            return holders.divided(job.dataset, part.ids, size)
        return [HeldRows(np.arange(start, min(start + size, count)), "") for start in range(0, count, size)]

    def _arrived(self, batch: OpenBatch, rows: npt.NDArray[np.int64], ids: npt.ArrayLike) -> None:
        """The samples of ``rows``, which carried ``ids``, are in their places."""
        with self._changed:
            if batch.arrived[rows].any():
                raise HapiError(f"batch {batch.number}: a sample arrived twice; this is a defect of hapi")
            batch.arrived[rows] = True
            batch.arrived_ids[rows] = ids
            if batch.arrived.all():
                self._changed.notify_all()


def _batch_bytes(job: ExtractionJob, count: int) -> int:
    """Bytes of ``count`` samples that come from servers."""
    stored = 0 if job.split else count * job.mean_stored_bytes
    return count * job.sample_bytes() + int(stored)
