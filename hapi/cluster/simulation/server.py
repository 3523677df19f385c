"""One server in simulated time: a queue for its slots, a device in turns, frames that leave while the next is made.

A request's steps are those of :mod:`hapi.server.extraction`: the next frame is read and decoded while one is computed,
and one that is made is sent under the next forward pass. Not in the model: memory (the COS batch is the profile's),
features that are kept or shared, and the sockets' buffers: a frame counts as sent when it has crossed.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import simpy

from hapi.cluster.simulation.admission import SimulatedAdmission
from hapi.cluster.simulation.costs import SplitCosts
from hapi.cluster.simulation.network import Network, Transfer
from hapi.cluster.simulation.processors import Processors
from hapi.errors import TransportError
from hapi.profiler.profile import TierProfile
from hapi.server.scheduling.costs import Costs, Request, Server, Used
from hapi.server.scheduling.device_share import DeviceScheduler
from hapi.server.scheduling.fair_queue import Tenant, Ticket
from hapi.wire.report import RequestReport, ServerTier

Steps = Generator[simpy.Event, Any, None]
MAX_WAIT = 600.0
"""Seconds for which a request may wait for a slot, as by default in the server's settings."""


class Reader(Protocol):
    """The trainer's side of an answer."""

    def frame_begins(self, transfer: Transfer, server: str) -> None:
        """Note that a frame of ``server`` begins to arrive."""

    def frame_ends(self, transfer: Transfer, samples: int) -> None:
        """Take a frame that has crossed; 0 samples for one that is about to break off."""


@dataclass(eq=False, kw_only=True)
class SimulatedRequest:
    """One request on its way through a server."""

    tenant: Tenant
    job: str
    asked: Request
    """As on the wire: what the server's own estimates go by."""
    costs: SplitCosts
    samples: int
    frame: int
    """Samples of a frame."""
    path: tuple[int, ...]
    """Links beyond the server's."""
    reader: Reader
    report: RequestReport | None = None
    """The server's report, once it is answered."""


class _Forward(NamedTuple):
    """A forward pass that waits for a device."""

    tenant: Tenant
    order: int
    seconds: float
    since: float
    done: simpy.Event


class SimulatedDevice:
    """Devices that run one forward pass each, of the tenant that the server's scheduler chooses."""

    def __init__(self, env: simpy.Environment, tier: TierProfile, processors: Processors) -> None:
        """Compute as ``tier`` does: on a CPU with its ``processors``."""
        self._env, self._tier, self._processors = env, tier, processors
        self._scheduler: DeviceScheduler[_Forward] = DeviceScheduler()
        self._idle = tier.devices
        self.busy = 0.0
        """Seconds of forward passes that are over."""

    def forward(self, tenant: Tenant, order: int, seconds: float) -> simpy.Event:
        """Return an event for the end of a forward pass; its value is the seconds for which it waited.

        Args:
            tenant: to be charged.
            order: number of its request.
            seconds: that it takes on an idle device.
        """
        done = self._env.event()
        self._scheduler.add(tenant, order, _Forward(tenant, order, seconds, self._env.now, done))
        self._begin()
        return done

    def leave(self, order: int) -> None:
        """Drop the forward passes of a request that have not begun."""
        self._scheduler.take(lambda waiting: waiting.order == order)

    def _begin(self) -> None:
        while self._idle and len(self._scheduler):
            tenant, _, seconds, since, done = self._scheduler.next(self._env.now)
            self._idle -= 1
            wait = self._env.now - since
            on_cpu = self._tier.device == "cpu"
            over = (
                self._processors.work(seconds, self._tier.threads) if on_cpu else self._env.timeout(seconds)
            )
            over.callbacks.append(partial(self._over, tenant, self._env.now, wait, done))

    def _over(self, tenant: Tenant, began: float, wait: float, done: simpy.Event, event: simpy.Event) -> None:
        seconds = self._env.now - began
        self._idle += 1
        self.busy += seconds
        self._scheduler.charge(tenant, seconds, self._env.now)
        done.succeed(wait)
        self._begin()


@dataclass
class _Work:
    """Seconds of one request by stage so far."""

    cpu: dict[str, float]
    wall: dict[str, float]
    began: float
    first: float = 0.0
    slot: float = 0.0


class SimulatedServer:
    """Answers requests over its link."""

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        *,
        tier: TierProfile,
        slots: int,
        max_queued: int,
        processors: Processors,
        network: Network,
        path: tuple[int, ...],
        overhead: float,
    ) -> None:
        """Begin idle.

        Args:
            env: simulated time.
            name: its own, unlike all others'.
            tier: its machine; costs come with the requests.
            slots: requests worked on at a time.
            max_queued: requests that may wait.
            processors: of its machine, perhaps shared with others.
            network: of the fleet.
            path: links that all its answers cross.
            overhead: CPU seconds of a request beside what the profile has.
        """
        self.name, self.slow, self._failures = name, 1.0, 0
        """``slow``: times that all its work takes as long as usual."""
        self.processors, self.path = processors, path
        self.sent_bytes, self.served, self.waits = 0.0, 0, list[float]()
        self._env, self._tier, self._network, self._overhead = env, tier, network, overhead
        self._slots, self._max_queued = slots, max_queued
        self._resources = Server(slots, tier.processors, tier.devices)
        self._described = ServerTier(
            device=tier.device,
            processors=tier.processors,
            threads=tier.threads,
            running=slots,
            devices=tier.devices,
            reuse=True,
        )
        self._costs = Costs()
        self._active: dict[simpy.Process, None] = {}
        self._work, self._work_of = 0.0, dict[str, float]()
        self._orders = 0
        self._restart()

    def _restart(self) -> None:
        self.admission = SimulatedAdmission(self._env, self._slots, self._max_queued, MAX_WAIT)
        self.device = SimulatedDevice(self._env, self._tier, self.processors)

    @property
    def alive(self) -> bool:
        """False during a failure."""
        return not self._failures

    def fail(self) -> None:
        """Break all requests; new ones are refused until each failure is over (:meth:`recover`)."""
        self._failures += 1
        for process in list(self._active):
            process.interrupt()

    def recover(self) -> None:
        """End a failure; begin anew, with nothing that waits, if it is the last one."""
        self._failures -= 1
        if self.alive:
            self._restart()

    def serve(self, request: SimulatedRequest) -> Steps:
        """Answer ``request``, in the calling process.

        Raises:
            BusyError: the queue has no room.
            TransportError: the server is gone, or fails meanwhile.
        """
        if not self.alive:
            raise TransportError(f"{self.name}: no answer")
        process = self._env.active_process
        if process is None:
            raise RuntimeError("requests are served within a process")
        self._active[process] = None
        admission, ticket = self.admission, None
        try:
            ticket, granted = admission.enter(request.tenant, self._costs.expected(request.asked))
            asked = self._env.now
            if not (granted.triggered and granted.ok):
                yield granted
            self.waits.append(self._env.now - asked)
            yield from self._answer(request, ticket, asked)
        except simpy.Interrupt:
            if ticket is not None and self.alive:  # its client has left
                admission.leave(ticket)
            raise TransportError(f"{self.name}: the connection broke") from None
        except BaseException:
            if ticket is not None and ticket.state == "waiting":
                admission.leave(ticket)
            raise
        finally:
            del self._active[process]

    def _answer(self, request: SimulatedRequest, ticket: Ticket, asked: float) -> Steps:
        env, costs = self._env, request.costs
        self._orders += 1
        order, work = self._orders, _Work({}, dict.fromkeys(("forward", "device_wait", "model"), 0.0), asked)
        work.slot = env.now
        marks = self._marks(request.job)
        yield from self._compute("read", request, work, self._overhead)
        if costs.load_seconds:
            yield from self._compute("model", request, work, costs.load_seconds)
        frames, children = _frames(request.samples, request.frame), list[simpy.Process]()
        loading: simpy.Process | None = None
        sending: simpy.Process | None = None
        try:
            yield from self._load(request, work, frames[0])
            for number, count in enumerate(frames):
                if loading is not None:
                    yield loading
                last = number + 1 == len(frames)
                if not last:
                    loading = env.process(_to_its_end(self._load(request, work, frames[number + 1])))
                    children.append(loading)
                if costs.forward_seconds:
                    yield from self._forward(request, work, order, count)
                if sending is not None:
                    yield sending
                else:
                    work.first = env.now - asked
                if last:
                    yield from self._send(request, work, count)
                else:
                    sending = env.process(_to_its_end(self._send(request, work, count)))
                    children.append(sending)
        except simpy.Interrupt:
            self.device.leave(order)
            for child in children:
                if child.is_alive:
                    child.interrupt()
            raise
        self._finish(request, ticket, work, marks)

    def _load(self, request: SimulatedRequest, work: _Work, count: int) -> Steps:
        """Read and decode the samples of a frame."""
        if request.costs.read_seconds:
            yield self._env.timeout(count * request.costs.read_seconds * self.slow)
        yield from self._compute("decode", request, work, count * request.costs.decode_seconds)

    def _forward(self, request: SimulatedRequest, work: _Work, order: int, count: int) -> Steps:
        seconds, began = count * request.costs.forward_seconds * self.slow, self._env.now
        waited = yield self.device.forward(request.tenant, order, seconds)
        work.wall["device_wait"] += waited
        work.wall["forward"] += self._env.now - began - waited
        on_cpu = self._tier.device == "cpu"
        if on_cpu:
            work.cpu["forward"] = work.cpu.get("forward", 0.0) + seconds
        self._account(request.job, seconds)

    def _compute(self, stage: str, request: SimulatedRequest, work: _Work, seconds: float) -> Steps:
        """Keep a processor busy for a stage."""
        seconds *= self.slow
        if seconds > 0:
            yield self.processors.work(seconds)
            work.cpu[stage] = work.cpu.get(stage, 0.0) + seconds
            if self._tier.device == "cpu":
                self._account(request.job, seconds)

    def _send(self, request: SimulatedRequest, work: _Work, count: int) -> Steps:
        """Write a frame, and let it cross."""
        nbytes, reader = count * request.costs.wire_bytes, request.reader
        yield from self._compute("send", request, work, count * request.costs.send_seconds)
        transfer = self._network.send((*self.path, *request.path), nbytes)
        reader.frame_begins(transfer, self.name)
        try:
            yield transfer.done
        except simpy.Interrupt:
            reader.frame_ends(transfer, 0)
            self._network.abort(transfer)
            raise
        self.sent_bytes += nbytes
        reader.frame_ends(transfer, count)

    def _account(self, job: str, seconds: float) -> None:
        self._work += seconds
        self._work_of[job] = self._work_of.get(job, 0.0) + seconds

    def _marks(self, job: str) -> tuple[float, float]:
        """All work so far, and that for other jobs."""
        return self._work, self._work - self._work_of.get(job, 0.0)

    def _finish(
        self, request: SimulatedRequest, ticket: Ticket, work: _Work, marks: tuple[float, float]
    ) -> None:
        now, held = self._env.now, self._env.now - work.slot
        cpu = {"forward": 0.0, **work.cpu}
        cost = Used(work.wall, cpu, held).cost(self._resources)
        self._costs.seen(request.asked, cost)
        self.admission.finish(ticket, cost)
        self.served += 1
        total, others = self._marks(request.job)
        # A GPU's account is of forward passes alone, and tells nothing of the process.
        process = (marks[0], total) if self._tier.device == "cpu" else (0.0, 0.0)
        request.report = RequestReport(
            server=self.name,
            seconds=work.wall,
            cpu=work.cpu,
            busy=(0.0, 0.0),
            work=(marks[0], total),
            others=(marks[1], others),
            process=process,
            clock=(work.slot, now),
            pages=0.0,
            first=work.first,
            cos_batch=min(request.frame, request.samples) if request.costs.split else 0,
            wait=self.admission.queue.expected_wait(request.tenant, now),
            tier=self._described,
        )


def _to_its_end(steps: Steps) -> Steps:
    """The steps of a process that an interrupt just ends."""
    try:
        yield from steps
    except simpy.Interrupt:
        return


def _frames(samples: int, frame: int) -> list[int]:
    """Samples of each frame of an answer."""
    full, remainder = divmod(samples, frame)
    return [frame] * full + ([remainder] if remainder else [])
