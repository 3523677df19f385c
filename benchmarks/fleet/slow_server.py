"""``benchmarks stragglers --simulated``: one of four servers is ten times as slow, in simulated time.

Servers are the simulator's, with the server's own scheduler. They are chosen, and stragglers' requests are sent twice,
by the client's own rules; other ways stand beside. Nothing of the machine that computes it enters: the same seed gives
the same figures. Each request is timed from when it is wanted.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import simpy

from benchmarks.load.overload_figures import percentile
from hapi.cluster.simulation.costs import SplitCosts
from hapi.cluster.simulation.network import Network
from hapi.cluster.simulation.processors import Processors
from hapi.cluster.simulation.server import SimulatedServer, Steps
from hapi.cluster.simulation.training.choice import KnownServer, KnownServers, ServerList
from hapi.cluster.simulation.training.planning import FixedSplits
from hapi.cluster.simulation.training.requests import (
    Messages,
    Requests,
    Sender,
    SimulatedBatch,
    TrainerCounts,
    Work,
)
from hapi.profiler.profile import Job, TierProfile
from hapi.server.scheduling.fair_queue import ANONYMOUS

WAYS = ("in turn", "requests in flight", "answer times", "hedged")
"""Ways to choose a server; the last one is the client's own, and also asks a second one."""
SPLIT, SAMPLES = 1, 8
SECONDS = 0.1
"""Seconds of a request at an idle server."""
JITTER = 0.1
"""Mean delay of an answer by chance, over these."""
SLOTS, MAX_QUEUED = 4, 1 << 20
TIER = TierProfile(
    device="cpu", decode_seconds=0.0, codec_seconds_per_byte=0.0,
    to_device_seconds_per_byte=0.0, from_device_seconds_per_byte=0.0,
)  # fmt: skip
"""Both sides: a request's seconds are :data:`SECONDS` in all."""
REQUESTS = 2000
"""Requests of a run, where no other number is given: their 99th percentile is the twentieth longest."""
LOADS, WINDOW = (0.1, 0.2, 0.3), 16
"""Requests wanted over those that all servers can do, and those that are always under way."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Load on the servers, and when one of them becomes slow."""

    name: str
    load: float | None
    """Requests wanted over those that all servers can do; None: ``window`` are always under way."""
    since: float = 0.0
    """Share of the requests before the server becomes slow."""
    servers: int = 4
    window: int = WINDOW
    requests: int = REQUESTS
    slower: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """Figures of one run."""

    seconds: tuple[float, ...]
    """Seconds of each request, ascending."""
    extra: int
    slow: int
    """Requests that were sent to the slow server."""

    @property
    def p99(self) -> float:
        """Seconds in which all but a hundredth came."""
        return percentile(self.seconds, 0.99)


class InTurn(KnownServers):
    """One server after the other."""

    def __init__(self, listed: ServerList) -> None:
        """Know ``listed``, of which none was asked yet."""
        super().__init__(listed)
        self._chosen_times: Counter[int] = Counter()

    def best(self, servers: Sequence[KnownServer], split: int, now: float) -> KnownServer:
        """Return the one that was chosen least often."""
        found = min(servers, key=lambda known: (self._chosen_times[known.number], known.number))
        self._chosen_times[found.number] += 1
        return found


class ByFlight(KnownServers):
    """The server with the fewest requests in flight."""

    def best(self, servers: Sequence[KnownServer], split: int, now: float) -> KnownServer:
        """Return the one with the fewest requests in flight."""
        return min(servers, key=lambda known: (known.in_flight, known.place))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way in one case."""

    case: Case
    way: str
    even: Sequence[Run]
    """Without a slow server, by seed."""
    slow: Sequence[Run]
    """With it."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures: medians over the seeds, and all ratios."""
        ratios = [with_it.p99 / without.p99 for without, with_it in zip(self.even, self.slow, strict=True)]
        return {
            "case": asdict(self.case),
            "way": self.way,
            "without": statistics.median(run.p99 for run in self.even),
            "with": statistics.median(run.p99 for run in self.slow),
            "p99_ratios": [round(ratio, 3) for ratio in ratios],
            "p99_ratio": round(statistics.median(ratios), 3),
            "extra": max(run.extra for run in self.slow) / self.case.requests,
            "at_the_slow_one": max(run.slow for run in self.slow),
        }


@dataclass(frozen=True, kw_only=True)
class SlowServer:
    """All cases."""

    rows: Sequence[Row]

    def to_json(self) -> dict[str, Any]:
        """Return the figures; the goal is 1.3 at most 2 % extra requests."""
        return {"benchmark": "stragglers, simulated", "rows": [row.to_json() for row in self.rows]}

    def table(self) -> list[str]:
        """Return the figures as lines for a person."""
        lines, shown = list[str](), ""
        for row in self.rows:
            if row.case.name != shown:
                shown = row.case.name
                lines.append(f"{shown}:")
            found = row.to_json()
            ratios = ", ".join(f"{ratio:.2f}" for ratio in found["p99_ratios"])
            lines.append(
                f"  {row.way:<20}p99 {1e3 * found['without']:8.0f} ms, with it {1e3 * found['with']:8.0f} ms: "
                f"{found['p99_ratio']:.2f}, the median of {ratios}; extra {found['extra']:.2%}"
            )
        return lines


def cases(servers: int, requests: int) -> list[Case]:
    """Return all cases: loads, and requests that are always under way; slow from the start, and from the middle on."""
    found = []
    for since, words in ((0.0, ""), (0.5, ", slow from the middle")):
        for load in (*LOADS, None):
            name = f"{WINDOW} under way" if load is None else f"{load:.0%} busy"
            found.append(Case(name=name + words, load=load, since=since, servers=servers, requests=requests))
    return found


def simulate_slow_server(servers: int, requests: int, seeds: int, tell: Callable[[str], None]) -> SlowServer:
    """Simulate all ways in all cases.

    Args:
        servers: of which one is slow.
        requests: of each run.
        seeds: runs of each way, with and without the slow server.
        tell: given lines about the progress.
    """
    rows = []
    for case in cases(servers, requests):
        for way in WAYS:
            runs = {
                straggles: [Crowd(case, way, seed, straggles=straggles).run() for seed in range(seeds)]
                for straggles in (False, True)
            }
            rows.append(Row(case=case, way=way, even=runs[False], slow=runs[True]))
        tell(f"{case.name}: {rows[-1].to_json()['p99_ratio']:.2f}")
    return SlowServer(rows=rows)


_CHOICES: dict[str, Callable[[ServerList], KnownServers]] = {
    "in turn": InTurn,
    "requests in flight": ByFlight,
    "answer times": KnownServers,
    "hedged": KnownServers,
}


class Crowd:
    """Wants requests, and notes when each was answered."""

    def __init__(self, case: Case, way: str, seed: int, *, straggles: bool) -> None:
        """Want none yet.

        Args:
            case: load, and servers.
            way: of choosing a server, one of :data:`WAYS`.
            seed: of every chance; the times at which requests are wanted are the same for all ways.
            straggles: whether a server becomes slow.
        """
        self.counts = TrainerCounts()
        self._case, self._env, self._straggles = case, simpy.Environment(), straggles
        self._arrivals = random.Random(seed)
        network = Network(self._env)
        self._servers = [
            SimulatedServer(
                self._env,
                f"http://server-{number}:8099",
                tier=TIER,
                slots=SLOTS,
                max_queued=MAX_QUEUED,
                processors=Processors(self._env, 1.0),
                network=network,
                path=(network.add_link(None),),
                overhead=0.0,
            )
            for number in range(case.servers)
        ]
        self._slow = self._servers[seed % case.servers]
        listed = ServerList.of(self._servers, "model")
        self._requests = Requests(
            self._env,
            _work(case.window if case.load is None else 1 << 20),
            _CHOICES[way](listed),
            FixedSplits(SPLIT),
            self,
            Sender(name="job", tenant=ANONYMOUS, path=(), messages=Messages("data", "model")),
            network=network,
            rng=random.Random(seed + 1),
            hedged=way == "hedged",
        )
        self._wanted: dict[int, float] = {}
        self._seconds: list[float] = []
        self._over = self._env.event()

    def run(self) -> Run:
        """Return the figures once all requests were answered."""
        if self._case.load is None:
            for _ in range(self._case.window):
                self._want()
        else:
            self._env.process(self._arrive(self._case.load * self._case.servers / SECONDS))
        self._env.run(self._over)
        return Run(seconds=tuple(sorted(self._seconds)), extra=self.counts.extra, slow=self._slow.served)

    def _arrive(self, rate: float) -> Steps:
        while len(self._wanted) < self._case.requests:
            self._want()
            yield self._env.timeout(self._arrivals.expovariate(rate))

    def _want(self) -> None:
        number = len(self._wanted)
        if self._straggles and number == int(self._case.since * self._case.requests):
            self._slow.slow = self._case.slower
        self._wanted[number] = self._env.now
        self._requests.add(SimulatedBatch(number, SPLIT, SAMPLES, self._env.event(), SAMPLES))
        self._requests.send()

    def receive(self, batch: SimulatedBatch, samples: int) -> None:
        """Count what has come."""
        batch.missing -= samples
        if not batch.missing:
            self._seconds.append(self._env.now - self._wanted[batch.number])
            if len(self._seconds) == self._case.requests:
                self._over.succeed()

    def request_over(self) -> None:
        """Want the next one, where so many are always under way."""
        if self._case.load is None and len(self._wanted) < self._case.requests:
            self._want()


def _work(in_flight: int) -> Work:
    half = SECONDS / SAMPLES / 2
    costs = SplitCosts(
        split=SPLIT, load_seconds=0.0, read_seconds=0.0, decode_seconds=half, forward_seconds=half, send_seconds=0.0,
        wire_bytes=512.0, receive_seconds=0.0, suffix_seconds=0.0, step_seconds=0.0, update_seconds=0.0, depth=1,
    )  # fmt: skip
    return Work(
        content="model",
        job=Job(bs=SAMPLES, samples=1 << 20, request_size=SAMPLES, in_flight=in_flight),
        costs=lambda split: costs,
        tier=TIER,
        frame=SAMPLES,
        request_seconds=0.0,
        jitter=JITTER * SECONDS,
        pause=0.0,
        batches=None,
    )
