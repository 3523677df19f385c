"""Requests of one trainer in simulated time: at the link's pace, to servers by the client's own choice, until all came.

They go out by the client's own pacer, as in :mod:`hapi.client.loading.prefetcher`, go on where they broke, and are sent
to a second server when they straggle.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import simpy

from hapi.client.loading.pacing import RequestPacer
from hapi.client.transport.server_choice import Asked
from hapi.cluster.simulation.costs import SplitCosts
from hapi.cluster.simulation.network import Network, Transfer
from hapi.cluster.simulation.server import SimulatedRequest, Steps
from hapi.cluster.simulation.training.choice import KnownServer, KnownServers
from hapi.cluster.simulation.training.hedging import Flight, Rescue, SimulatedHedging
from hapi.cluster.simulation.training.incoming import IncomingLink
from hapi.cluster.simulation.training.planning import Splits
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
    extra_bytes: float = 0.0
    """Bytes of second servers' answers that were not taken."""
    requests: int = 0
    retries: int = 0
    extra: int = 0
    """Requests that were sent to a second server, too."""
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


class Taker(Protocol):
    """The training loop, which takes what has come."""

    counts: TrainerCounts

    def receive(self, batch: SimulatedBatch, samples: int) -> None:
        """Take samples that have crossed."""

    def request_over(self) -> None:
        """Note that all samples of a request have crossed."""


@dataclass(frozen=True, kw_only=True)
class Sender:
    """How servers know a trainer, and where its answers cross."""

    name: str
    """Its own, unlike all others'."""
    tenant: Tenant
    path: tuple[int, ...]
    """Links between it and the servers' own."""
    messages: Callable[[int, int], Request]
    """Makes the message for a split and a number of samples."""


class Requests:
    """Requests of one trainer."""

    def __init__(
        self,
        env: simpy.Environment,
        work: Work,
        servers: KnownServers,
        splits: Splits,
        taker: Taker,
        sender: Sender,
        *,
        network: Network,
        rng: random.Random,
        hedged: bool = True,
    ) -> None:
        """Send none yet.

        Args:
            env: simulated time.
            work: the trainer's kind.
            servers: chooses among those that it knows.
            splits: told of each answer.
            taker: takes what has come.
            sender: the trainer, as servers know it.
            network: of the fleet.
            rng: the trainer's own chance.
            hedged: whether stragglers' requests are sent to a second server, as the client does.
        """
        self._env, self._work, self._splits, self._taker, self._rng = env, work, splits, taker, rng
        self._sender, self._hedged = sender, hedged and servers.count > 1
        self._known = servers
        self._link = IncomingLink(env, network, servers.count, self.send)
        self._hedging = SimulatedHedging(env, self._known, self._link.arriving_seconds)
        self._slices: deque[tuple[SimulatedBatch, int]] = deque()
        self._in_flight = 0

    @property
    def under_way(self) -> int:
        """Requests that are under way or wait to be sent."""
        return self._in_flight + len(self._slices)

    def told_waits(self) -> list[float]:
        """Return the seconds that servers tell when the trainer connects, see :func:`with_waits`."""
        return self._known.told_waits(self._sender.tenant)

    def begin_pass(self) -> None:
        """Begin to measure the link anew."""
        self._link.begin_pass()

    def news(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return what the link's meter has measured since the last call, see :meth:`IncomingLink.news`."""
        return self._link.news()

    def add(self, batch: SimulatedBatch) -> None:
        """Let all samples of ``batch`` be asked for, behind those of earlier ones."""
        full, remainder = divmod(batch.samples, self._work.job.request_size)
        self._slices.extend([(batch, self._work.job.request_size)] * full)
        if remainder:
            self._slices.append((batch, remainder))

    def send(self) -> None:
        """Send as many requests as may be under way, as early as the link needs them."""
        while self._slices and self._in_flight < self._work.job.in_flight:
            batch, samples = self._slices[0]
            if self._link.held_back(batch.split):
                return
            self._slices.popleft()
            self._in_flight += 1
            part = _Part(self, batch, samples, self._link.pacer)
            part.pacer.sent(part, samples * self._work.costs(batch.split).wire_bytes)
            part.process = self._env.process(self._fetch(part))

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
            before = part.missing
            error = yield from self._attempt(part, known)
            if error is not None:
                self._failed(known, error)
                tried = {known.number} if part.missing < before else {*tried, known.number}
        counts = self._taker.counts
        counts.requests += 1
        counts.latencies.append(env.now - began)
        self._in_flight -= 1
        part.pacer.done(part, split, round(part.samples * self._work.costs(split).wire_bytes))
        self._taker.request_over()

    def _attempt(self, part: _Part, known: KnownServer) -> Generator[simpy.Event, Any, HapiError | None]:
        """Ask one server for what is missing; returns the error when neither it nor a second one answered whole."""
        env, split = self._env, part.batch.split
        asked, request = known.asked(split, part.missing, env.now), self._request(part, part)
        flight: Flight | None = None
        if self._hedged and split and part.process is not None:  # stored samples are never asked for twice
            send = partial(self._send_second, part)
            flight = self._hedging.begin(part, known, asked, part.process, send)
        error: HapiError | None = None
        try:
            yield from self._answer(known, request)
        except HapiError as found:
            error = found
        except simpy.Interrupt:  # on the way: the second server was faster
            pass
        rescue = None if flight is None else flight.rescue
        known.end(env.now, asked)
        if flight is not None:
            self._hedging.end(flight, answered=rescue is not None or error is None)
        if rescue is not None:
            known.outrun(asked, env.now)
            self._take(part, rescue)
        elif error is None:
            known.answered(asked, env.now)
            known.failures, known.well_at = 0, 0.0
            self._answered(split, request, asked)
        return error if rescue is None else None

    def _answer(self, known: KnownServer, request: SimulatedRequest) -> Steps:
        """Let ``request`` reach a server, and be answered."""
        jitter = self._rng.expovariate(1 / self._work.jitter) if self._work.jitter else 0.0
        if (way := self._work.request_seconds + jitter) > 0:
            yield self._env.timeout(way)
        yield from known.server.serve(request)

    def _request(self, part: _Part, reader: _Part | _Second) -> SimulatedRequest:
        split, missing = part.batch.split, part.missing
        return SimulatedRequest(
            tenant=self._sender.tenant,
            job=self._sender.name,
            asked=self._sender.messages(split, missing),
            costs=self._work.costs(split),
            samples=missing,
            frame=self._work.frame if split else missing,
            path=self._sender.path,
            reader=reader,
        )

    def _failed(self, known: KnownServer, error: HapiError) -> None:
        self._taker.counts.retries += 1
        known.failed(error, self._env.now, self._rng.uniform(0.75, 1.25))

    def _answered(self, split: int, request: SimulatedRequest, asked: Asked) -> None:
        report, seconds = request.report, self._env.now - asked.at
        if report is None:
            return
        nbytes = round(asked.samples * request.costs.wire_bytes)
        # As for the client's own meter: what was sent after all of it was made has crossed since then.
        one_frame = report.cos_batch >= asked.samples
        self._link.meter.crossed(
            nbytes, max(seconds - report.first, 0.05 * seconds) if one_frame else seconds
        )
        self._link.pacer.waits(report.wait)
        self._splits.answered(split, asked.samples, nbytes, report, self._work.request_seconds + report.first)

    # -- second servers ----------------------------------------------------------------------------------

    def _send_second(self, part: _Part, flight: Flight, known: KnownServer, asked: Asked) -> simpy.Process:
        self._taker.counts.extra += 1
        return self._env.process(self._second(part, flight, known, asked))

    def _second(self, part: _Part, flight: Flight, known: KnownServer, asked: Asked) -> Steps:
        """Ask a second server for what is missing of ``part``; what it does wrong is its own matter."""
        answer = _Second(self)
        request = self._request(part, answer)
        try:
            yield from self._answer(known, request)
        except (HapiError, simpy.Interrupt) as problem:
            known.end(self._env.now, asked)
            if not flight.over and isinstance(problem, HapiError):
                known.failed(problem, self._env.now, self._rng.uniform(0.75, 1.25))
            self._taker.counts.extra_bytes += answer.nbytes
            return
        known.end(self._env.now, asked)
        known.answered(asked, self._env.now)
        if not self._hedging.win(flight, Rescue(request, asked, answer.nbytes)):
            self._taker.counts.extra_bytes += answer.nbytes

    def _take(self, part: _Part, rescue: Rescue) -> None:
        """Take what is missing from a second server's answer."""
        missing, part.missing, counts = part.missing, 0, self._taker.counts
        used = rescue.nbytes * missing / rescue.asked.samples
        counts.nbytes += used
        counts.extra_bytes += rescue.nbytes - used
        self._answered(part.batch.split, rescue.request, rescue.asked)
        self._taker.receive(part.batch, missing)

    # -- what comes in -----------------------------------------------------------------------------------

    def frame_begins(self, transfer: Transfer, server: str) -> None:
        """Note that a frame of ``server`` begins to cross."""
        self._link.begins(transfer, server)

    def frame_ends(self, transfer: Transfer, batch: SimulatedBatch, samples: int) -> None:
        """Note that a frame has crossed; without ``samples`` that it breaks off."""
        nbytes = self._link.ends(transfer)
        if samples:
            self._taker.counts.nbytes += nbytes
            self._taker.receive(batch, samples)
        self.send()

    def second_frame_ends(self, transfer: Transfer) -> float:
        """Note that a frame of a second server has crossed, or breaks off; return its bytes that have."""
        nbytes = self._link.ends(transfer)
        self.send()
        return nbytes


@dataclass(eq=False)
class _Part:
    """One request's samples that have not come yet."""

    requests: Requests
    batch: SimulatedBatch
    samples: int
    pacer: RequestPacer
    missing: int = 0
    process: simpy.Process | None = None

    def __post_init__(self) -> None:
        self.missing = self.samples

    def frame_begins(self, transfer: Transfer, server: str) -> None:
        self.requests.frame_begins(transfer, server)

    def frame_ends(self, transfer: Transfer, samples: int) -> None:
        self.missing -= samples
        self.requests.frame_ends(transfer, self.batch, samples)


@dataclass(eq=False)
class _Second:
    """A second server's answer, which is kept apart."""

    requests: Requests
    nbytes: float = 0.0

    def frame_begins(self, transfer: Transfer, server: str) -> None:
        self.requests.frame_begins(transfer, server)

    def frame_ends(self, transfer: Transfer, samples: int) -> None:
        self.nbytes += self.requests.second_frame_ends(transfer)


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
