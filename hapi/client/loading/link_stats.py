"""Measurements of a pass at the border to the servers: bytes, the link's rate, each side's seconds by split.

A stage's wall seconds include delays by others; its CPU seconds are its own cost. Reports show the first,
plans are made from the second (HAPI, section 4.3, Table 1).
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hapi.client.transport.joint_rates import JointRates
from hapi.client.transport.link_meter import LinkMeter
from hapi.clocks import BusyClock
from hapi.wire.report import RequestReport, ServerTier

ANSWERS_KEPT = 4096


@dataclass(frozen=True)
class Forward:
    """Cost of the forward passes of one request."""

    split: int
    samples: int
    seconds: float
    """Wall seconds."""
    cpu_seconds: float
    pages: float
    """Memory pages that they touched for the first time."""
    layers: tuple[float, ...] = ()
    """Seconds in each of the layers 1..split, if they were timed."""


@dataclass
class SplitTraffic:
    """Sums of the costs of one split's requests."""

    requests: int = 0
    samples: int = 0
    """Samples that crossed."""
    cached_samples: int = 0
    """Samples that did not need to, since this side's sample cache had them (split 0)."""
    cached_bytes: int = 0
    """Their stored bytes."""
    bytes_received: int = 0
    shared_samples: int = 0
    """Samples of requests that a server answered, in part at least, with features that it had or that others computed:
    their seconds are in none of the server's sums."""
    keepable_samples: int = 0
    """Samples of requests whose features a server may keep: all but those that timed its layers."""
    kept_samples: int = 0
    """Samples whose features the servers had kept."""
    receive_cpu_seconds: float = 0.0
    """CPU seconds of receiving payloads and checking them."""
    decode_cpu_seconds: float = 0.0
    """CPU seconds of decoding stored samples on this side (split 0)."""
    server_cpu_seconds: dict[str, float] = field(default_factory=dict)
    """The servers' CPU seconds per stage."""
    server_wall_seconds: dict[str, float] = field(default_factory=dict)
    server_work: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds of work that each server had accounted to all tenants' requests when the first of these began, and when
    the last one ended. Over all of them: work counts when it is done, also what was begun before a request came."""
    server_process: dict[str, tuple[float, float]] = field(default_factory=dict)
    """CPU seconds of the whole server process, likewise."""
    server_others_seconds: float = 0.0
    """The part of the work that was for others; a sum."""
    server_clock_seconds: float = 0.0
    """Duration of these requests by the servers' clocks; a sum."""
    server_span: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Begin of the first of them and end of the last by each server's clock."""
    request_seconds: float | None = None
    """Shortest way of a request and its answer's head, behind other answers' bytes too; None before an answer."""
    cos_batch: int = 0
    tier: ServerTier | None = None
    """Resources of the last server that answered."""

    def add(self, samples: int, report: RequestReport, began: float) -> None:
        """Add one answered request.

        Args:
            samples: samples that it asked for.
            report: the server's report.
            began: seconds until its answer began.
        """
        trip = max(0.0, began - report.first)
        self.request_seconds = trip if self.request_seconds is None else min(self.request_seconds, trip)
        self.requests += 1
        self.samples += samples
        self.keepable_samples += 0 if report.layers else samples
        self.kept_samples += min(samples, report.kept)
        self.tier = report.tier
        if report.shared:
            self.shared_samples += samples
            return
        for sums, seconds in (
            (self.server_cpu_seconds, report.cpu),
            (self.server_wall_seconds, report.seconds),
        ):
            for stage, value in seconds.items():
                sums[stage] = sums.get(stage, 0.0) + value
        self.server_others_seconds += max(0.0, report.others[1] - report.others[0])
        for intervals, (start, end) in (
            (self.server_work, report.work),
            (self.server_process, report.process),
            (self.server_span, report.clock),
        ):
            first, last = intervals.get(report.server, (start, start))
            intervals[report.server] = (min(first, start), max(last, end))
        self.server_clock_seconds += max(0.0, report.clock[1] - report.clock[0])
        self.cos_batch = max(self.cos_batch, report.cos_batch)


class Arrival:
    """One frame's payload on its way; made by :meth:`Traffic.arrival`. Not begun when no payload came."""

    def __init__(self, traffic: Traffic, split: int, server: str) -> None:
        self._traffic = traffic
        self._split, self._server = split, server
        self._cpu = 0.0
        self.started: float | None = None
        """Time at which its payload began to arrive, in ``time.monotonic`` seconds."""

    def begin(self) -> None:
        """Note that its header has arrived."""
        self.started, self._cpu = time.monotonic(), time.thread_time()
        self._traffic.network.begin()
        self._traffic.link.begin(self._server)

    def end(self, nbytes: int, *, extra: bool = False) -> None:
        """Note that ``nbytes`` in all were read for it; ``extra`` ones of an answer that another one may replace."""
        cpu = 0.0
        if self.started is not None:
            self._traffic.link.end(nbytes, self._server)
            self._traffic.network.end()
            cpu = time.thread_time() - self._cpu
        if extra:
            self._traffic.extra(nbytes)
        else:
            self._traffic.received(self._split, nbytes, cpu)


class Traffic:
    """Counts of a pass. Thread-safe."""

    def __init__(
        self, arrived: Callable[[], int | None] = lambda: None, joint: JointRates | None = None
    ) -> None:
        """Count what ``arrived()`` tells; ``joint`` keeps what is learned of several servers at once."""
        self.network = BusyClock()
        """Seconds in which at least one frame's payload was arriving."""
        self.decode = BusyClock()
        """Seconds in which stored samples were decoded on this side (split 0)."""
        self.link = LinkMeter(arrived, joint=joint)
        self.splits: dict[int, SplitTraffic] = {}
        self.extra_requests = self.extra_bytes = 0
        """Requests that were sent to a second server; bytes that were not used, as another server's came before."""
        self._lock = threading.Lock()
        self._busy: dict[str, tuple[float, float]] = {}
        self._answered: deque[str] = deque(maxlen=ANSWERS_KEPT)
        self._forwards: deque[Forward] = deque(maxlen=ANSWERS_KEPT)

    def arrival(self, split: int, server: str) -> Arrival:
        """Return the measurement for the next frame of a server's answer at ``split``."""
        return Arrival(self, split, server)

    @contextmanager
    def decoding(self, split: int) -> Iterator[None]:
        """Measure the decoding of stored samples in the block."""
        started = time.thread_time()
        with self.decode.running():
            yield
        with self._lock:
            self._of(split).decode_cpu_seconds += time.thread_time() - started

    def received(self, split: int, nbytes: int, cpu_seconds: float) -> None:
        """Count a frame of ``nbytes`` that was read."""
        with self._lock:
            share = self._of(split)
            share.bytes_received += nbytes
            share.receive_cpu_seconds += cpu_seconds

    def extra(self, nbytes: int, requests: int = 0) -> None:
        """Count bytes of answers that others may replace (below 0: used after all), and requests to a second server."""
        with self._lock:
            self.extra_bytes += nbytes
            self.extra_requests += requests

    def cached(self, split: int, samples: int, nbytes: int) -> None:
        """Count samples that came out of the sample cache.

        Args:
            split: of the batch.
            samples: number of samples.
            nbytes: their stored bytes in all.
        """
        with self._lock:
            share = self._of(split)
            share.cached_samples += samples
            share.cached_bytes += nbytes

    def answered(
        self, split: int, samples: int, report: RequestReport, nbytes: int, began: float, seconds: float
    ) -> None:
        """Count an answered request.

        Args:
            split: of the request.
            samples: that it asked for.
            report: the server's report.
            nbytes: bytes of its frames.
            began: seconds until the first frame came.
            seconds: from the first frame to the last.
        """
        one_frame = report.cos_batch >= samples  # which was not sent before all of it was made
        self.link.crossed(nbytes, max(seconds - report.first, 0.05 * seconds) if one_frame else seconds)
        with self._lock:
            self._of(split).add(samples, report, began)
            self._answered.append(report.server)
            if split and not report.shared:
                wall, cpu = (stages.get("forward", 0.0) for stages in (report.seconds, report.cpu))
                self._forwards.append(Forward(split, samples, wall, cpu, report.pages, report.layers))
            start, end = self._busy.get(report.server, report.busy)
            self._busy[report.server] = (min(start, report.busy[0]), max(end, report.busy[1]))

    def _of(self, split: int) -> SplitTraffic:
        return self.splits.setdefault(split, SplitTraffic())

    def answered_by(self, newest: int) -> list[str]:
        """Return the servers of that many newest answers, the latest last."""
        with self._lock:
            return list(self._answered)[-newest:]

    def take_forwards(self) -> list[Forward]:
        """Return the forward passes of requests answered since the last call, the newest if they are many."""
        with self._lock:
            taken = list(self._forwards)
            self._forwards.clear()
        return taken

    def shares(self) -> dict[int, SplitTraffic]:
        """A copy of the sums by split, no request half counted."""
        with self._lock:
            return {split: copy.deepcopy(share) for split, share in self.splits.items()}

    @property
    def bytes_received(self) -> int:
        """Bytes of all answers."""
        with self._lock:
            return sum(share.bytes_received for share in self.splits.values())

    @property
    def cached_samples(self) -> int:
        """Samples that came out of the sample cache."""
        with self._lock:
            return sum(share.cached_samples for share in self.splits.values())

    @property
    def cached_bytes(self) -> int:
        """Their stored bytes."""
        with self._lock:
            return sum(share.cached_bytes for share in self.splits.values())

    @property
    def requests(self) -> int:
        """Requests answered whole."""
        with self._lock:
            return sum(share.requests for share in self.splits.values())

    @property
    def cos_batch(self) -> int:
        """Largest batch that a server ran on its device."""
        with self._lock:
            return max((share.cos_batch for share in self.splits.values()), default=0)

    def stages(self) -> dict[str, float]:
        """The servers' wall seconds per stage, summed over requests."""
        with self._lock:
            sums: dict[str, float] = {}
            for share in self.splits.values():
                for stage, seconds in share.server_wall_seconds.items():
                    sums[stage] = sums.get(stage, 0.0) + seconds
            return sums

    def server_seconds(self) -> float:
        """Seconds that the busiest server worked (for anyone) while this pass's requests ran."""
        with self._lock:
            return max((end - start for start, end in self._busy.values()), default=0.0)
