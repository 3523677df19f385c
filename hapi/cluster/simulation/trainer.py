"""One trainer in simulated time: batches open ahead, requests go to servers by the client's own choice, steps follow.

Batches are handed out in order, one more opens when one is over, and an epoch begins when the one before is over, as
in :mod:`hapi.client.loading.prefetcher`. Requests go out at the pace of the link, by the client's own pacer. Not in the
model: hedged requests.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from hapi.client.loading.pacing import RequestPacer
from hapi.cluster.simulation.choice import KnownServer, KnownServers, ServerList
from hapi.cluster.simulation.costs import SplitCosts
from hapi.cluster.simulation.incoming import IncomingLink
from hapi.cluster.simulation.network import Network, Transfer
from hapi.cluster.simulation.planning import BatchCost, Splits
from hapi.cluster.simulation.processors import Processors
from hapi.cluster.simulation.server import SimulatedRequest, Steps
from hapi.errors import HapiError
from hapi.profiler.profile import Job, TierProfile
from hapi.server.scheduling.costs import Request
from hapi.server.scheduling.fair_queue import Tenant
from hapi.wire.messages import ExtractRequest, SamplesRequest
from hapi.wire.references import DatasetReference, ModelReference


@dataclass(eq=False)
class SimulatedBatch:
    """A training batch whose samples come in."""

    number: int
    split: int
    samples: int
    full: simpy.Event
    missing: int
    received: float = 0.0
    """CPU seconds of receiving it."""


@dataclass(kw_only=True)
class TrainerCounts:
    """Counts of a trainer since the last :meth:`SimulatedTrainer.reset`."""

    samples: int = 0
    batches: int = 0
    nbytes: float = 0.0
    requests: int = 0
    retries: int = 0
    stalled: float = 0.0
    """Seconds in which it waited for batches that have come."""
    latencies: list[float] = field(default_factory=list)
    """Seconds of each answered request."""
    splits: Counter[int] = field(default_factory=Counter)
    """Batches by split."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of trainer: its job, and what that costs."""

    content: str
    """Name of the model, whose providers among the servers are preferred."""
    job: Job
    costs: Callable[[int], SplitCosts]
    """Costs of each split."""
    tier: TierProfile
    frame: int
    """Samples of a frame."""
    request_seconds: float
    jitter: float
    """Mean seconds, by chance, by which an answer begins later."""
    pause: float
    """Seconds of waiting that belong to each step."""
    batches: int | None
    """After so many it ends; None: it goes on."""


class SimulatedTrainer:
    """Trains batch after batch."""

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        work: Work,
        servers: ServerList,
        splits: Splits,
        *,
        tenant: Tenant,
        processors: Processors,
        network: Network,
        path: tuple[int, ...],
        rng: random.Random,
        requests: Callable[[int, int], Request],
        start: float,
    ) -> None:
        """Begin at ``start``.

        Args:
            env: simulated time.
            name: its own, unlike all others'.
            work: its kind.
            servers: those that it knows.
            splits: chooses its splits.
            tenant: as which servers know it.
            processors: of its machine.
            network: of the fleet.
            path: links between it and the servers' own.
            rng: its own chance.
            requests: makes the message for a split and a number of samples.
            start: seconds.
        """
        self.name, self.work, self.counts = name, work, TrainerCounts()
        self.splits = splits
        self.split = -1
        """That of the newest batch; -1 before the first."""
        self._env, self._rng, self._requests = env, rng, requests
        self._tenant, self._processors, self._path = tenant, processors, path
        self._known = KnownServers(servers)
        self._link = IncomingLink(env, network, len(servers.servers), self._send_requests)
        self._live: deque[SimulatedBatch] = deque()
        self._slices: deque[tuple[SimulatedBatch, int]] = deque()
        self._opened = self._in_flight = 0
        self._waits_since: float | None = None
        env.process(self._train(start))

    def reset(self) -> None:
        """Count from now on."""
        self.counts = TrainerCounts()
        self._waits_since = None if self._waits_since is None else self._env.now

    @property
    def stalled(self) -> float:
        """Seconds in which it waited for a batch, those of a wait that lasts included."""
        lasting = 0.0 if self._waits_since is None else self._env.now - self._waits_since
        return self.counts.stalled + lasting

    # -- the training loop -------------------------------------------------------------------------------

    def _train(self, start: float) -> Steps:
        if start > 0:
            yield self._env.timeout(start)
        while self._open_ahead():
            batch, self._waits_since = self._live[0], self._env.now
            yield batch.full
            self.counts.stalled, self._waits_since = self.stalled, None
            suffix, step = yield from self._compute(batch)
            self._live.popleft()
            self.counts.samples += batch.samples
            self.counts.batches += 1
            self.counts.splits[batch.split] += 1
            cost = BatchCost(batch.number, batch.split, batch.samples, suffix, step, batch.received)
            self.splits.done(cost, *self._link.news())

    def _compute(self, batch: SimulatedBatch) -> Generator[simpy.Event, Any, tuple[float, float]]:
        """Run the frozen suffix and the step; their seconds."""
        costs, began = self.work.costs(batch.split), self._env.now
        if costs.suffix_seconds > 0:
            yield self._run(batch.samples * costs.suffix_seconds)
        suffix, began = self._env.now - began, self._env.now
        yield self._run(batch.samples * costs.step_seconds + costs.update_seconds)
        if self.work.pause:
            yield self._env.timeout(self.work.pause)
        return suffix, self._env.now - began

    def _run(self, seconds: float) -> simpy.Event:
        tier = self.work.tier
        if tier.device == "cpu":
            return self._processors.work(seconds, tier.threads)
        return self._env.timeout(seconds)

    def _open_ahead(self) -> bool:
        """Open batches for as many requests as may be under way, as far ahead as may be; False: none to train."""
        job, limit = self.work.job, self.work.batches
        of_epoch = -(-job.samples // job.bs)
        while self._in_flight + len(self._slices) < job.in_flight and (limit is None or self._opened < limit):
            if self._opened % of_epoch == 0:
                if self._live:
                    break  # the next epoch begins when this one is over
                self._link.begin_pass()
            if len(self._live) >= 2 and len(self._live) >= 1 + self.work.costs(self.split).depth:
                break
            self.split = split = self.splits.open(self._opened)
            samples = self._batch_samples(self._opened)
            batch = SimulatedBatch(self._opened, split, samples, self._env.event(), samples)
            self._opened += 1
            self._live.append(batch)
            full, remainder = divmod(samples, job.request_size)
            self._slices.extend([(batch, job.request_size)] * full)
            if remainder:
                self._slices.append((batch, remainder))
        self._send_requests()
        return bool(self._live)

    def _batch_samples(self, number: int) -> int:
        """Samples of a batch: an epoch's last one may be smaller."""
        job = self.work.job
        batches = -(-job.samples // job.bs)
        last = number % batches == batches - 1
        return job.samples - (batches - 1) * job.bs if last else min(job.bs, job.samples)

    # -- requests ----------------------------------------------------------------------------------------

    def _send_requests(self) -> None:
        """Send as many requests as may be under way, as early as the link needs them."""
        while self._slices and self._in_flight < self.work.job.in_flight:
            batch, samples = self._slices[0]
            if self._link.held_back(batch.split):
                return
            self._slices.popleft()
            self._in_flight += 1
            part = _Part(self, batch, samples, self._link.pacer)
            part.pacer.sent(part, samples * self.work.costs(batch.split).wire_bytes)
            self._env.process(self._fetch(part))

    def _fetch(self, part: _Part) -> Steps:
        """Ask servers until all samples have come; the request goes on where it broke."""
        env, split = self._env, part.batch.split
        tried: set[int] = set()
        began = env.now
        while part.missing:
            known = self._known.choose(split, tried, env.now)
            if known is None:
                yield env.timeout(self._known.well_at() - env.now)
                continue
            asked, before = known.asked(split, part.missing, env.now), part.missing
            request = self._request(part)
            try:
                if (way := self.work.request_seconds + self._jitter()) > 0:
                    yield env.timeout(way)
                yield from known.server.serve(request)
            except HapiError as error:
                self._failed(known, error)
                tried = {known.number} if part.missing < before else {*tried, known.number}
                continue
            known.end(env.now)
            known.answered(asked, env.now)
            known.failures, known.well_at = 0, 0.0
            self._answered(split, request, before, env.now - asked.at)
        self.counts.requests += 1
        self.counts.latencies.append(env.now - began)
        self._in_flight -= 1
        part.pacer.done(part, split, round(part.samples * self.work.costs(split).wire_bytes))
        self._open_ahead()

    def _jitter(self) -> float:
        return self._rng.expovariate(1 / self.work.jitter) if self.work.jitter else 0.0

    def _request(self, part: _Part) -> SimulatedRequest:
        split = part.batch.split
        return SimulatedRequest(
            tenant=self._tenant,
            job=self.name,
            asked=self._requests(split, part.missing),
            costs=self.work.costs(split),
            samples=part.missing,
            frame=self.work.frame if split else part.missing,
            path=self._path,
            reader=part,
        )

    def _failed(self, known: KnownServer, error: HapiError) -> None:
        known.end(self._env.now)
        self.counts.retries += 1
        known.failed(error, self._env.now, self._rng.uniform(0.75, 1.25))

    def _answered(self, split: int, request: SimulatedRequest, samples: int, seconds: float) -> None:
        report = request.report
        if report is None:
            return
        nbytes = round(samples * request.costs.wire_bytes)
        # As for the client's own meter: what was sent after all of it was made has crossed since then.
        one_frame = report.cos_batch >= samples
        self._link.meter.crossed(
            nbytes, max(seconds - report.first, 0.05 * seconds) if one_frame else seconds
        )
        self._link.pacer.waits(report.wait)
        self.splits.answered(split, samples, nbytes, report, self.work.request_seconds + report.first)

    # -- what comes in -----------------------------------------------------------------------------------

    def frame_begins(self, transfer: Transfer, server: str) -> None:
        """Note that a frame of ``server`` begins to cross."""
        self._link.begins(transfer, server)

    def frame_ends(self, transfer: Transfer, batch: SimulatedBatch, samples: int) -> None:
        """Note that a frame has crossed; without ``samples`` that it breaks off."""
        nbytes = self._link.ends(transfer)
        if samples:
            self.counts.nbytes += nbytes
            self.receive(batch, samples)
        self._send_requests()

    def receive(self, batch: SimulatedBatch, samples: int) -> None:
        """Take samples that have crossed: they are checked, and at split 0 decoded, then they count."""
        seconds = samples * self.work.costs(batch.split).receive_seconds
        batch.received += seconds
        if seconds > 0:
            self._processors.work(seconds).callbacks.append(lambda _: self._count(batch, samples))
        else:
            self._count(batch, samples)

    @staticmethod
    def _count(batch: SimulatedBatch, samples: int) -> None:
        batch.missing -= samples
        if batch.missing < 0:
            raise RuntimeError(f"batch {batch.number}: a sample arrived twice; this is a defect of hapi")
        if not batch.missing:
            batch.full.succeed()


@dataclass(eq=False)
class _Part:
    """One request's samples that have not come yet."""

    trainer: SimulatedTrainer
    batch: SimulatedBatch
    samples: int
    pacer: RequestPacer
    missing: int = 0

    def __post_init__(self) -> None:
        self.missing = self.samples

    def frame_begins(self, transfer: Transfer, server: str) -> None:
        self.trainer.frame_begins(transfer, server)

    def frame_ends(self, transfer: Transfer, samples: int) -> None:
        self.missing -= samples
        self.trainer.frame_ends(transfer, self.batch, samples)


class Messages:
    """Messages of one kind of trainer, made once for each split and number of samples."""

    def __init__(self, name: str, model: str) -> None:
        """Name a dataset by the trainers' kind, and their model."""
        self._dataset = DatasetReference(name=name, version="0" * 64)
        self._model = ModelReference(source="store", name=model, weights="pushed", digest="0" * 64)
        self._made: dict[tuple[int, int], Request] = {}

    def __call__(self, split: int, samples: int) -> Request:
        """Return the message; its ids are any."""
        if (split, samples) not in self._made:
            ids = np.arange(samples, dtype=np.int64)
            made: Request = SamplesRequest(dataset=self._dataset, ids=ids)
            if split:
                made = ExtractRequest(
                    dataset=self._dataset,
                    model=self._model,
                    split=split,
                    split_name="",
                    ids=ids,
                    transform=None,
                )
            self._made[split, samples] = made
        return self._made[split, samples]
