"""The server's account of its work: the cost of each request, beside the cost of all of them meanwhile.

A client plans with it: its own CPU seconds are the cost of its requests, the whole process's include the
server's overhead, and all tenants' tell how much is left for this one (HAPI, section 4.3: the server would
have to expose waiting time).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from hapi.clocks import BusyClock, StageClock
from hapi.process.processors import processor_count
from hapi.server.context import RequestClock, RequestContext
from hapi.wire.report import STAGES, RequestReport, ServerTier


@dataclass(frozen=True)
class Marks:
    """State of the account when a request began."""

    busy: float
    work: float
    others: float
    process: float
    clock: float


class Account:
    """One server's clocks. Thread-safe."""

    def __init__(
        self,
        server: str,
        device: torch.device,
        *,
        running: int,
        devices: int = 1,
        reuse: bool,
        elsewhere: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``running``: requests that are worked on at a time; ``devices``: of ``device``'s kind, that work at the same
        time; ``reuse``: layers stay loaded between requests.

        ``elsewhere``: CPU seconds that other processes have used for this one.
        """
        self.busy = BusyClock()
        self._server = server
        self._device = device.type
        self._running = running
        self._devices = devices
        self._reuse = reuse
        self._elsewhere = elsewhere
        self._total = StageClock(STAGES)
        self._lock = threading.Lock()
        self._jobs: WeakValueDictionary[str, StageClock] = WeakValueDictionary()
        """Held by their requests' clocks: as many as there are requests under way, whatever jobs are called."""

    def clock(self, job: str) -> RequestClock:
        """Return the clock of one request of ``job`` (empty: unknown); its counts go into the job's and the
        total too.
        """
        if not job:
            return RequestClock(self._total, None)
        with self._lock:
            of_job = self._jobs.get(job)
            if of_job is None:
                of_job = self._jobs[job] = StageClock(STAGES, self._total)
        return RequestClock(self._total, of_job)

    def totals(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Wall and CPU seconds by stage of all requests so far, those under way included."""
        return self._total.seconds(), self._total.cpu_seconds()

    def marks(self, clock: RequestClock) -> Marks:
        """The account as it stands, seen by the request of ``clock``: to be compared with a later look of its own."""
        work = self._work(self._total)
        # Of a job that is not known nobody can tell which work was its own.
        others = work - self._work(clock.job) if clock.job is not None else 0.0
        return Marks(self.busy.seconds, work, others, self._process(), time.monotonic())

    def report(
        self, begun: Marks, context: RequestContext, cos_batch: int = 0, layers: tuple[float, ...] = ()
    ) -> RequestReport:
        """Return the costs of a request, for its end frame.

        Args:
            begun: from :meth:`marks`.
            context: the request's.
            cos_batch: the largest that fitted, in samples; 0 for none.
            layers: seconds of each layer, if they were timed.
        """
        clock = context.clock
        now = self.marks(clock)
        return RequestReport(
            server=self._server,
            seconds=clock.seconds(),
            cpu=clock.cpu_seconds(),
            busy=(begun.busy, now.busy),
            work=(begun.work, now.work),
            others=(begun.others, now.others),
            process=(begun.process, now.process),
            clock=(begun.clock, now.clock),
            pages=clock.pages()["forward"],
            first=clock.first,
            cos_batch=cos_batch,
            layers=layers,
            wait=context.expected_wait(),
            tier=self._tier(),
        )

    def _work(self, clock: StageClock) -> float:
        """Seconds of the contended resource: on a CPU those of all stages, on a GPU those of the forward
        passes.
        """
        if self._device == "cpu":
            return sum(clock.cpu_seconds().values())
        return clock.seconds()["forward"]

    def _process(self) -> float:
        return time.process_time() + self._elsewhere() if self._device == "cpu" else 0.0

    def _tier(self) -> ServerTier:
        return ServerTier(
            device=self._device,
            processors=processor_count(),
            threads=torch.get_num_threads(),
            running=self._running,
            devices=self._devices,
            reuse=self._reuse,
        )
