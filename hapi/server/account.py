"""The server's account of its work: what each request cost, beside what all of them cost meanwhile.

A client plans with it: its own CPU seconds say what its requests cost, the whole process's what the server spends
beside, all tenants' what is left for this one (HAPI, section 4.3: the server would have to expose waiting time).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from hapi.clocks import BusyClock, StageClock
from hapi.wire.messages import STAGES, RequestReport, ServerTier


@dataclass(frozen=True)
class Marks:
    """Where the account stood when a request began."""

    busy: float
    work: float
    process: float
    clock: float


class Account:
    """One server's clocks. Thread-safe."""

    def __init__(self, server: str, device: torch.device, *, running: int, reuse: bool) -> None:
        """``running``: requests that are worked on at a time; ``reuse``: layers stay loaded between them."""
        self.busy = BusyClock()
        self._server = server
        self._device = device.type
        self._running = running
        self._reuse = reuse
        self._total = StageClock(STAGES)

    def clock(self) -> StageClock:
        """For one request; what it counts is in the total too."""
        return StageClock(STAGES, self._total)

    def marks(self) -> Marks:
        """The account as it stands."""
        return Marks(self.busy.seconds, self._work(), self._process(), time.monotonic())

    def report(
        self, begun: Marks, clock: StageClock, cos_batch: int = 0, layers: tuple[float, ...] = ()
    ) -> RequestReport:
        """What a request that began at ``begun`` has cost."""
        now = self.marks()
        return RequestReport(
            server=self._server,
            seconds=clock.seconds(),
            cpu=clock.cpu_seconds(),
            busy=(begun.busy, now.busy),
            work=(begun.work, now.work),
            process=(begun.process, now.process),
            clock=(begun.clock, now.clock),
            cos_batch=cos_batch,
            layers=layers,
            tier=self._tier(),
        )

    def _work(self) -> float:
        """On a CPU all stages compete for it, on a GPU the forward passes."""
        if self._device == "cpu":
            return sum(self._total.cpu_seconds().values())
        return self._total.seconds()["forward"]

    def _process(self) -> float:
        return time.process_time() if self._device == "cpu" else 0.0

    def _tier(self) -> ServerTier:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return ServerTier(
            device=self._device,
            processors=processors,
            threads=torch.get_num_threads(),
            running=self._running,
            reuse=self._reuse,
        )
