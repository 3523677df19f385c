"""Counts what every batch costs on both tiers, split by split, for profiles and for the watch over the plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hapi.client.loading.link_stats import Forward, Traffic
from hapi.client.planning.counts import ClientCounts, Kind, Snapshot, SplitCounts, TrafficCounts, Work
from hapi.clocks import new_pages
from hapi.process.processors import processor_count
from hapi.profiler.fit import Tier
from hapi.profiler.timing import work_clock


def tier_of(device: torch.device) -> Tier:
    """Return this process as a tier."""
    return Tier(device=device.type, processors=processor_count(), threads=torch.get_num_threads())


class Meter:
    """Sums of a whole run; not thread-safe (the traffic that it reads is).

    A pass's traffic is taken in with :meth:`follow`; what lies between two :meth:`snapshot` is
    :func:`observed_between` them.
    """

    def __init__(self, device: torch.device, recent: int = 16) -> None:
        """``recent``: answers among which every server that shares the requests has one."""
        self._device = device
        self._recent = recent
        self._clock = work_clock(device)
        self._own: dict[int, ClientCounts] = {}
        self._past: dict[int, SplitCounts] = {}
        """The traffic of passes that are over."""
        self._traffic: Traffic | None = None
        self._answered: list[str] = []
        """Servers of the newest answers of passes that are over."""
        self._cpu = time.process_time()
        self._shift = 0.0
        """Seconds that the next step counts beside its own."""
        self.servers: dict[int, Tier] = {}
        """Resources of the servers of each split."""

    def follow(self, traffic: Traffic) -> None:
        """Begin a pass; the one before is over."""
        for split, counts in self._of_traffic().items():
            self._past[split] = self._past.get(split, SplitCounts()) + counts
        self._answered = self._newest()
        self._traffic = traffic
        self._cpu = time.process_time()

    @contextmanager
    def working(self, split: int, kind: Kind, samples: int, share: float = 1.0) -> Iterator[None]:
        """Measure the main thread's work on ``samples`` in the block; they count when it is done.

        ``share``: the part of the work that is theirs, where the block works on others too.
        """
        pages, start, cpu = new_pages(), self._clock(), time.thread_time()
        done = 0
        try:
            yield
            done = samples
        finally:
            seconds = share * (self._clock() - start)
            if kind == "step":
                seconds, self._shift = max(0.0, seconds + self._shift), 0.0
            work: dict[str, Any] = {kind: Work(done, seconds, share * (new_pages() - pages))}
            self._count(split, ClientCounts(main_cpu=share * (time.thread_time() - cpu), **work))

    def shift_step(self, seconds: float) -> None:
        """Count ``seconds`` more (or less) for the training step that is under way.

        For loops whose batches share costs, which would otherwise fall on one of them.
        """
        self._shift += seconds

    def layers(self, split: int, seconds: list[float]) -> None:
        """Add the seconds in each layer of timed work."""
        self._count(split, ClientCounts(timed=Work(layers=tuple(seconds))))

    def batch(self, split: int, samples: int, share: float = 1.0) -> None:
        """Count a batch that was handed out and worked on, of which ``samples``, this share, came from servers."""
        now = time.process_time()
        cpu = share * (now - self._cpu)
        self._count(split, ClientCounts(batches=1, samples=samples, process_cpu=cpu))
        self._cpu = now

    def leave_out(self) -> None:
        """Let the work since the last batch count for none: on one that asked servers for nothing."""
        self._cpu = time.process_time()

    def _count(self, split: int, more: ClientCounts) -> None:
        self._own[split] = self._own.get(split, ClientCounts()).plus(more)

    def take_forwards(self) -> list[Forward]:
        """Return the servers' forward costs for each request answered in this pass since the last call."""
        return [] if self._traffic is None else self._traffic.take_forwards()

    def snapshot(self, split: int | None = None) -> Snapshot:
        """Return all sums so far, by split; or those of ``split`` alone, if it has any."""
        now, nothing = self._of_traffic(), SplitCounts()
        counted = self._past.keys() | now.keys() | self._own.keys()
        wanted = counted if split is None else counted & {split}
        sums = {s: self._past.get(s, nothing) + now.get(s, nothing) for s in wanted}
        return {s: replace(both, client=self._own.get(s, both.client)) for s, both in sums.items()}

    def _of_traffic(self) -> dict[int, SplitCounts]:
        """The sums of the pass that is under way."""
        shares = {} if self._traffic is None else self._traffic.shares()
        count = self._sharing()
        for split, share in shares.items():
            if share.tier is not None:
                self.servers[split] = Tier(**vars(share.tier), count=count)
        return {split: SplitCounts(traffic=TrafficCounts.of(share)) for split, share in shares.items()}

    def _sharing(self) -> int:
        """Number of servers that share the requests: those of the newest answers, also behind a balancer.

        It counts from the first answer of the server that came last: a restarted server has another id, and
        the former one answers no more.
        """
        newest = self._newest()
        changed = max((newest.index(server) for server in set(newest)), default=0)
        return max(1, len(set(newest[changed:])))

    def _newest(self) -> list[str]:
        """Servers of the newest answers, the latest last; one that died is soon not among them."""
        now = [] if self._traffic is None else self._traffic.answered_by(self._recent)
        return [*self._answered, *now][-self._recent :]
