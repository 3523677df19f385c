"""The facts of one request, shared by HTTP, the service, reading, decoding and the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hapi.clocks import StageClock
from hapi.errors import BadRequestError
from hapi.server.scheduling.fair_queue import ANONYMOUS, Tenant
from hapi.waiting import Interest, moved
from hapi.wire.frames import WIRE_VERSION
from hapi.wire.report import STAGES


class RequestClock(StageClock):
    """The stages of one request."""

    def __init__(self, total: StageClock, job: StageClock | None) -> None:
        """Add everything to ``total`` too, and, if it is known, to ``job``, which adds to the total itself."""
        super().__init__(STAGES, job or total)
        self.job = job
        """Clock of all requests of its job that are under way, and while they are."""
        self.first = 0.0
        """Seconds until the answer's first frame was made, those in the queue included; 0 before."""
        self._began = time.monotonic()
        self._now: list[str] = []
        self.began: dict[str, float] = {}
        """Monotonic seconds at which each stage first began."""

    def add(self, name: str, seconds: float, cpu_seconds: float = 0.0, pages: float = 0.0) -> None:
        """See :meth:`StageClock.add`."""
        if name not in self.began:
            self.began[name] = time.monotonic() - seconds
        super().add(name, seconds, cpu_seconds, pages)

    def begin(self) -> None:
        """Begin the work, in a thread of its own: the seconds until the first frame count from here."""
        self._began = time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of the ``with`` block to ``name``, which is under way meanwhile."""
        self._now.append(name)
        try:
            with super().stage(name):
                yield
        finally:
            self._now.remove(name)

    def frame_made(self) -> None:
        """Note that a frame of the answer exists; the first one counts."""
        if not self.first:
            self.first = time.monotonic() - self._began + self.seconds()["queue"]

    def under_way(self) -> Sequence[str]:
        """Return the stages that threads are in now."""
        return list(self._now)


class Progress:
    """Progress of one request: written by the threads that work on it, read by any."""

    def __init__(
        self,
        chosen: Callable[[str, int], None] = lambda device, batch: None,
        stages_now: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Begin with nothing done.

        Args:
            chosen: told the device and the COS batch, in samples, once they are known.
            stages_now: returns the stages that threads are in, from the request's clock.
        """
        self._chosen = chosen
        self._stages_now = stages_now
        self.device = ""
        self.cos_batch = 0
        self.done = 0
        """Samples (of a request for tensors: tensors) that are computed or read."""
        self.forward: Callable[[], str] = str
        """The stage that its newest forward pass is in; empty when that is over."""

    def choose(self, device: str, batch: int) -> None:
        """Note that the request runs on ``device`` with COS batches of ``batch`` samples."""
        self.device, self.cos_batch = device, batch
        self._chosen(device, batch)

    def stages(self) -> tuple[str, ...]:
        """Return the stages (:data:`hapi.wire.report.STAGES`) under way; several, as reading runs ahead."""
        now = {*self._stages_now(), self.forward()}
        return tuple(stage for stage in STAGES if stage in now)


def _none() -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestContext:
    """Tenant, interest, deadline, progress and costs of a request."""

    clock: RequestClock
    tenant: Tenant = ANONYMOUS
    interest: Interest = field(default_factory=Interest)
    """Set once the client is gone; until its deadline the request waits for memory and for its reader."""
    progress: Progress = field(default_factory=Progress)
    wire: int = WIRE_VERSION
    """Version of the frames that answer it."""
    expected_wait: Callable[[], float] = _none
    """Asked when the request ends, from any thread: seconds that the tenant's next one has to expect."""

    def step(self) -> None:
        """Note that the work goes on.

        Raises:
            BadRequestError: the client is gone.
        """
        if self.interest.is_set():
            raise BadRequestError("the client went away")
        moved()
