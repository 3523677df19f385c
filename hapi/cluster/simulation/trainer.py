"""One trainer in simulated time: batches open ahead, requests go to servers by the client's own choice, steps follow.

Batches are handed out in order, one more opens when one is over, and an epoch begins when the one before is over, as
in :mod:`hapi.client.loading.prefetcher`. Not in the model: the pacing of requests on a scarce link, which changes the
order of answers and not their number.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from hapi.client.transport.server_choice import ServerLoad, soonest
from hapi.client.transport.server_pool import FIRST_PAUSE, LONGEST_PAUSE
from hapi.cluster.simulation.costs import SplitCosts
from hapi.cluster.simulation.planning import SimulatedMeter, Splits
from hapi.cluster.simulation.processors import Processors
from hapi.cluster.simulation.server import SimulatedRequest, SimulatedServer, Steps
from hapi.errors import HapiError
from hapi.profiler.profile import Job, TierProfile
from hapi.server.scheduling.costs import Request
from hapi.server.scheduling.fair_queue import Tenant
from hapi.wire.messages import ExtractRequest, SamplesRequest
from hapi.wire.references import DatasetReference, ModelReference
from hapi.wire.rendezvous import ranking


@dataclass(eq=False, kw_only=True)
class KnownServer(ServerLoad):
    """A server as one trainer knows it."""

    server: SimulatedServer
    failures: int = 0
    well_at: float = 0.0
    """Time before which it is left alone."""


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
    """Seconds in which it waited for a batch."""
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
        servers: Sequence[SimulatedServer],
        splits: Splits,
        meter: SimulatedMeter,
        *,
        tenant: Tenant,
        processors: Processors,
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
            meter: counts for ``splits``.
            tenant: as which servers know it.
            processors: of its machine.
            path: links between it and the servers' own.
            rng: its own chance.
            requests: makes the message for a split and a number of samples.
            start: seconds.
        """
        self.name, self.work, self.counts = name, work, TrainerCounts()
        self.splits = splits
        self.split = -1
        """That of the newest batch; -1 before the first."""
        self._env, self._meter, self._rng, self._requests = env, meter, rng, requests
        self._tenant, self._processors, self._path = tenant, processors, path
        self._known = [KnownServer(server=server) for server in servers]
        ranked = ranking({server.name for server in servers}, work.content)
        self._places = {name: place for place, name in enumerate(ranked)}
        self._live: deque[SimulatedBatch] = deque()
        self._slices: deque[tuple[SimulatedBatch, int]] = deque()
        self._opened = self._in_flight = 0
        self._flowing, self._flow_since = 0, 0.0
        self._flow_seconds = self._flow_bytes = 0.0
        env.process(self._train(start))

    def reset(self) -> None:
        """Count from now on."""
        self.counts = TrainerCounts()

    # -- the training loop -------------------------------------------------------------------------------

    def _train(self, start: float) -> Steps:
        if start > 0:
            yield self._env.timeout(start)
        while self._open_ahead():
            batch, asked = self._live[0], self._env.now
            yield batch.full
            self.counts.stalled += self._env.now - asked
            suffix, step = yield from self._compute(batch)
            self._live.popleft()
            self.counts.samples += batch.samples
            self.counts.batches += 1
            self.counts.splits[batch.split] += 1
            self._meter.batch(batch.split, batch.samples, suffix, step, batch.received)
            nbytes, seconds = self._arrivals()
            self.splits.done(batch.number, batch.split, nbytes, seconds)

    def _compute(self, batch: SimulatedBatch) -> Generator[simpy.Event, Any, tuple[float, float]]:
        """Run the frozen suffix and the step; their seconds."""
        costs, began = self.work.costs(batch.split), self._env.now
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
        """Open batches as far ahead as may be; False when there is none to train."""
        job, limit = self.work.job, self.work.batches
        of_epoch = -(-job.samples // job.bs)
        while limit is None or self._opened < limit:
            if self._live and self._opened % of_epoch == 0:
                break  # the next epoch begins when this one is over
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
        while self._slices and self._in_flight < self.work.job.in_flight:
            self._in_flight += 1
            self._env.process(self._fetch(*self._slices.popleft()))

    def _fetch(self, batch: SimulatedBatch, samples: int) -> Steps:
        """Ask servers until all samples have come; the request goes on where it broke."""
        env, costs = self._env, self.work.costs(batch.split)
        part = _Part(self, batch, samples)
        tried: set[int] = set()
        began = env.now
        while part.missing:
            known = yield from self._choose(batch.split, tried)
            asked, before = known.asked(batch.split, part.missing, env.now), part.missing
            request = SimulatedRequest(
                tenant=self._tenant,
                job=self.name,
                asked=self._requests(batch.split, part.missing),
                costs=costs,
                samples=part.missing,
                frame=self.work.frame if batch.split else part.missing,
                path=self._path,
                reader=part,
            )
            try:
                yield env.timeout(self.work.request_seconds)
                yield from known.server.serve(request)
            except HapiError as error:
                self._failed(known, error)
                tried = {id(known)} if part.missing < before else {*tried, id(known)}
                continue
            known.end(env.now)
            known.answered(asked, env.now)
            known.failures, known.well_at = 0, 0.0
            self._answered(batch, request, before)
        self.counts.requests += 1
        self.counts.latencies.append(env.now - began)
        self._in_flight -= 1
        self._send_requests()

    def _choose(self, split: int, tried: set[int]) -> Generator[simpy.Event, Any, KnownServer]:
        """Wait until a server is well, and return the one that is expected to answer first."""
        while True:
            now = self._env.now
            well = [known for known in self._known if known.well_at <= now]
            if well:
                fresh = [known for known in well if id(known) not in tried] or well
                best = soonest(fresh, split, now)
                place = self._places if split else {}
                chosen = min(best, key=lambda known: (known.in_flight, place.get(known.server.name, 0)))
                chosen.begin()
                return chosen
            yield self._env.timeout(min(known.well_at for known in self._known) - now)

    def _failed(self, known: KnownServer, error: HapiError) -> None:
        known.end(self._env.now)
        known.failures += 1
        self.counts.retries += 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(16, known.failures - 1))
        if error.retry_after is not None:
            pause = min(60.0, max(pause, error.retry_after))
        known.well_at = self._env.now + pause * self._rng.uniform(0.75, 1.25)

    def _answered(self, batch: SimulatedBatch, request: SimulatedRequest, samples: int) -> None:
        if request.report is not None:
            began = self.work.request_seconds + request.report.first
            nbytes = samples * request.costs.wire_bytes
            self._meter.answered(batch.split, samples, nbytes, request.report, began)

    # -- what comes in -----------------------------------------------------------------------------------

    def flow_begins(self) -> None:
        """Note that another frame crosses."""
        if not self._flowing:
            self._flow_since = self._env.now
        self._flowing += 1

    def flow_ends(self, nbytes: float) -> None:
        """Note that one has crossed."""
        self._flowing -= 1
        if not self._flowing:
            self._flow_seconds += self._env.now - self._flow_since
        self._flow_bytes += nbytes
        self.counts.nbytes += nbytes

    def _arrivals(self) -> tuple[float, float]:
        """Bytes since the last call, and the seconds in which any arrived."""
        now = self._env.now
        seconds = self._flow_seconds + (now - self._flow_since if self._flowing else 0.0)
        nbytes, self._flow_bytes = self._flow_bytes, 0.0
        self._flow_seconds, self._flow_since = 0.0, now
        return nbytes, seconds

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
    missing: int

    def frame_begins(self) -> None:
        self.trainer.flow_begins()

    def frame_ends(self, samples: int, nbytes: float) -> None:
        self.trainer.flow_ends(nbytes)
        if samples:
            self.missing -= samples
            self.trainer.receive(self.batch, samples)


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
