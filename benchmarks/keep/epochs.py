"""Epochs of a job in simulated time: batches open, come, are trained with, and what was computed is kept.

The trainer's side works as Hapi's prefetcher does: batches open in order as far as the budget of bytes goes, rows that
are kept are read first, the others are asked for in requests of which a few are under way.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from benchmarks.keep.disks import CacheAtWork, Shelf
from benchmarks.keep.events import Then
from benchmarks.keep.machines import Machines, Requests
from hapi.client.loading.prefetcher import READ_AHEAD
from hapi.client.memory import EVEN_ROWS
from hapi.profiler.reuse.choice import Choice, Crossing
from hapi.profiler.reuse.facts import RAW
from hapi.profiler.stages.alternation import Alternation


@dataclass(eq=False)
class _Batch:
    rows: list[int]
    split: int
    """Split of the rows that are asked for."""
    nbytes: float
    asked: list[int] = field(default_factory=list)
    hits: int = 0
    missing: int = 0
    """Samples that have not arrived."""
    known: bool = False
    """True once it is known what is asked for."""

    @property
    def full(self) -> bool:
        """True when every sample is in its place."""
        return self.known and not self.missing


@lru_cache(maxsize=128)
def _order(samples: int, number: int) -> list[int]:
    order = list(range(samples))
    random.Random(number).shuffle(order)
    return order


def alone(choice: Choice, split: int) -> Choice:
    """Return ``choice`` for the batches at one of its splits."""
    return choice.at(Crossing(split=split, wire=choice.crossing.wire_of(split) or RAW))


class _Way:
    """Batches of one split: their requests, and the seconds of a sample on this side."""

    def __init__(self, machines: Machines, choice: Choice, beside_store: Shelf | None) -> None:
        self.requests = Requests(machines, choice, beside_store)
        profile, split, codec = machines.profile, choice.crossing.split, choice.crossing.wire
        tier = profile.client_tier
        wire = profile.sent_bytes(split) / codec.ratio + profile.link.sample_bytes
        self.decode = tier.decode_seconds if split == 0 else 0.0
        self.arriving = wire * tier.codec_seconds_per_byte + tier.overhead_seconds
        self.arriving += 0.0 if codec == RAW else profile.sent_bytes(split) / codec.decode
        each = [layer.client_seconds for layer in profile.layers[: profile.last_split]]
        entering = profile.sent_bytes(split) if split else profile.samples.tensor_bytes
        cut = choice.cut if choice.mode == "keep here" else split
        self.first_layers = entering * tier.to_device_seconds_per_byte + sum(each[split:cut])
        """Seconds of a sample that was asked for, up to the cut."""
        self.later_layers = sum(each[cut:]) + profile.step_seconds
        self.sample_bytes = float(
            profile.sent_bytes(split)
            if split
            else profile.samples.stored_bytes + profile.samples.tensor_bytes
        )


class Epoch:
    """One epoch by one choice. Run it once."""

    def __init__(self, machines: Machines, choice: Choice, number: int) -> None:
        """Prepare epoch ``number``, whose order is its own."""
        self._machines, self._choice = machines, choice
        job, profile = machines.job, machines.profile
        order = _order(job.samples, number)
        self._batches = [order[at : at + job.bs] for at in range(0, job.samples, job.bs)]
        self._client, self._clock = machines.client, machines.clock
        self._cache: CacheAtWork | None = None if choice.mode == "recompute" else machines.client_cache
        self._shelf: Shelf | None = None
        beside_store: Shelf | None = None
        content = profile.sent_bytes(choice.cut)
        if choice.mode == "keep there" and machines.server_cache is not None:
            self._cache = None
            beside_store = machines.server_cache.shelf(choice.cut, content)
        elif self._cache is not None:
            self._shelf = self._cache.shelf(choice.cut, content)
        self._part = choice.limit * job.samples
        """Samples below this number are kept and read."""
        at = choice.crossing
        self._alternation = at.alternation or Alternation.only(at.split)
        self._ways = {
            split: _Way(machines, alone(choice, split), beside_store)
            for split in (self._alternation.split, self._alternation.other)
        }
        self._reading = content / choice.codec.decode
        self._kept_row = content * profile.client_tier.to_device_seconds_per_byte
        self._idle_threads = job.in_flight
        self._to_ask: deque[Callable[[Then], None]] = deque()
        self._to_read: deque[Callable[[Then], None]] = deque()
        self._live: dict[int, _Batch] = {}
        self._opened = self._trained = 0
        self._training = False

    def run(self) -> float:
        """Return the seconds until all was trained and what can be kept is."""
        began = self._clock.now
        self._open()
        self._clock.run()
        if not self._clock.halted:
            raise RuntimeError("the simulated epoch came to a stop; this is a defect of the benchmark")
        return self._clock.now - began

    # -- batches open ------------------------------------------------------------------------------------

    def _open(self) -> None:
        while self._opened < len(self._batches) and self._may_open():
            rows, split = self._batches[self._opened], self._alternation.split_of(self._opened)
            batch = _Batch(rows=rows, split=split, nbytes=self._bytes_of(len(rows), split))
            self._live[self._opened] = batch
            self._opened += 1
            kept = self._kept_of(rows)
            if kept:
                self._to_read.append(lambda done, b=batch, k=kept: self._read(b, k, done))  # type: ignore[misc]
            else:
                self._request(batch, rows)
            self._work()

    def _may_open(self) -> bool:
        if len(self._live) < 2:
            return True
        if self._shelf is not None and self._shelf.share == 1 and len(self._live) >= READ_AHEAD:
            return False
        coming = self._bytes_of(len(self._batches[self._opened]), self._alternation.split_of(self._opened))
        return sum(b.nbytes for b in self._live.values()) + coming <= self._machines.job.prefetch_bytes

    def _bytes_of(self, count: int, split: int) -> float:
        return count * self._ways[split].sample_bytes

    def _kept_of(self, rows: Sequence[int]) -> list[int]:
        """Rows whose features are kept on this side; stored samples are looked up by request."""
        shelf = self._shelf
        if shelf is None or not shelf.count or self._choice.mode != "keep here":
            return []
        return [row for row in rows if shelf.held[row] and row < self._part]

    # -- threads that read and ask -----------------------------------------------------------------------

    def _work(self) -> None:
        """Give each free thread a task: a request before a batch that is to be read."""
        while self._idle_threads and (line := self._to_ask or self._to_read):
            self._idle_threads -= 1
            line.popleft()(self._thread_done)

    def _thread_done(self) -> None:
        self._idle_threads += 1
        self._work()

    def _read(self, batch: _Batch, kept: list[int], done: Then) -> None:
        """Read what is kept of a batch, then ask for the others."""

        def decoded() -> None:
            """Ask for what was not kept, and for some rows more: no forward pass is a small one."""
            held = set(kept)
            missing = [row for row in batch.rows if row not in held]
            size, asked = self._machines.job.request_size, list(missing)
            while missing and len(asked) < len(batch.rows) and len(asked) % size % EVEN_ROWS:
                asked.append(kept[len(asked) - len(missing)])
            batch.hits = len(batch.rows) - len(asked)
            self._request(batch, asked)
            done()

        if self._cache is None or self._shelf is None:
            decoded()
            return
        self._cache.read(
            kept, self._shelf, lambda: self._client.cores.use(len(kept) * self._reading, decoded)
        )

    def _request(self, batch: _Batch, rows: list[int]) -> None:
        batch.asked, batch.missing, batch.known = rows, len(rows), True
        size = self._machines.job.request_size
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            self._to_ask.append(lambda done, b=batch, p=part: self._fetch(b, p, done))  # type: ignore[misc]
            self._work()
        self._train()

    def _fetch(self, batch: _Batch, rows: list[int], done: Then) -> None:
        """One request; stored samples that are kept are read in its stead."""
        shelf, cache = self._shelf, self._cache
        if self._choice.mode != "keep samples" or shelf is None or cache is None:
            self._send(batch, rows, done)
            return
        kept = [row for row in rows if shelf.held[row]]
        others = [row for row in rows if not shelf.held[row]]

        def go_on() -> None:
            """Ask for the others, which come into the cache."""
            if kept:
                seconds = len(kept) * (self._reading + self._ways[batch.split].decode)
                self._client.cores.use(seconds, lambda: self._came(batch, len(kept)))
            if others:
                self._send(batch, others, put)
            else:
                done()

        def put() -> None:
            """Keep what came."""
            cache.put_at_once(others, shelf)
            done()

        if kept:
            cache.read(kept, shelf, go_on)
        else:
            go_on()

    def _send(self, batch: _Batch, rows: list[int], done: Then) -> None:
        way = self._ways[batch.split]

        def arrived(count: int) -> None:
            """Receive a frame."""
            seconds = count * (way.arriving + way.decode)
            self._client.cores.use(seconds, lambda: self._came(batch, count))

        way.requests.send(rows, arrived, done)

    def _came(self, batch: _Batch, count: int) -> None:
        batch.missing -= count
        if batch.full:
            self._train()

    # -- training ----------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Begin the next step, if its batch is there and none is under way."""
        batch = self._live.get(self._trained)
        if self._training or batch is None or not batch.full:
            return
        self._training = True
        way = self._ways[batch.split]
        seconds = len(batch.asked) * way.first_layers + batch.hits * self._kept_row
        seconds += len(batch.rows) * way.later_layers + self._machines.profile.update_seconds
        self._client.forward(seconds, lambda: self._stepped(batch))

    def _stepped(self, batch: _Batch) -> None:
        self._training = False
        if self._choice.mode == "keep here" and self._cache is not None and self._shelf is not None:
            fresh = [row for row in batch.asked if not self._shelf.held[row] and row < self._part]
            self._cache.offer(fresh, self._shelf, self._choice.codec)
        del self._live[self._trained]
        self._trained += 1
        if self._trained == len(self._batches):
            self._end()
            return
        self._open()
        self._train()

    def _end(self) -> None:
        if self._cache is not None and self._choice.mode == "keep here":
            self._cache.flush(self._halt)
        else:
            self._halt()

    def _halt(self) -> None:
        self._clock.halted = True
