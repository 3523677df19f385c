"""Counts what every batch costs on both tiers, split by split, for profiles and for the watch over the plan."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from hapi.client.loading.link_stats import Forward, SplitTraffic, Traffic
from hapi.clocks import new_pages
from hapi.process.processors import processor_count
from hapi.profiler.fit import Observed, Tier
from hapi.profiler.timing import work_clock

Counts = dict[str, float]
"""Sums by name; ``client_layer:3`` and the like for lists."""
Snapshot = Mapping[int, Counts]
"""Counts by split."""

_PAGES = frozenset(("rest_pages", "timed_pages", "step_pages"))
_WORK = frozenset(("main_cpu", "rest", "rested", "timed", "step", "client_timed"))
_OWN = frozenset(("batches", "handed_out", "process_cpu")) | _WORK | _PAGES
_LARGEST, _LEAST = "cos_batch", "trip"
"""The counts that are no sums."""
MOST_BESIDE = 8.0
"""Largest factor of a server process's CPU seconds over its requests' that is taken for the price of serving them."""
QUIET = 0.1
"""Utilisation of a server by others below which it counts as ours alone."""
FAIR_SHARE = 0.5
"""Of a server's device, what is left to us at least when others take all they can get."""


def tier_of(device: torch.device) -> Tier:
    """This process as a tier."""
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
        self._own: dict[int, Counts] = defaultdict(lambda: defaultdict(float))
        self._past: dict[int, Counts] = defaultdict(lambda: defaultdict(float))
        """Of the traffic of passes that are over."""
        self._traffic: Traffic | None = None
        self._answered: list[str] = []
        """Servers of the newest answers of passes that are over."""
        self._cpu = time.process_time()
        self.servers: dict[int, Tier] = {}
        """What the servers of each split compute with."""

    def follow(self, traffic: Traffic) -> None:
        """A pass begins; the one before is over."""
        _add(self._past, self._of_traffic())
        self._answered = self._newest()
        self._traffic = traffic
        self._cpu = time.process_time()

    @contextmanager
    def working(self, split: int, name: str) -> Iterator[None]:
        """The main thread works on a batch: ``rest`` (frozen layers), ``timed`` (them one by one) or ``step``."""
        pages, start, cpu = new_pages(), self._clock(), time.thread_time()
        try:
            yield
        finally:
            counts = self._own[split]
            counts[name] += self._clock() - start
            counts["main_cpu"] += time.thread_time() - cpu
            counts[f"{name}_pages"] += new_pages() - pages

    def rested(self, split: int, samples: int) -> None:
        """``samples`` went through the frozen layers after ``split`` in one piece."""
        self._own[split]["rested"] += samples

    def layers(self, split: int, samples: int, seconds: list[float]) -> None:
        """They went through one by one, and each was timed."""
        counts = self._own[split]
        counts["client_timed"] += samples
        for i, value in enumerate(seconds):
            counts[f"client_layer:{i}"] += value

    def batch(self, split: int, samples: int) -> None:
        """A batch was handed out and worked on."""
        counts, now = self._own[split], time.process_time()
        counts["batches"] += 1
        counts["handed_out"] += samples
        counts["process_cpu"] += now - self._cpu
        self._cpu = now

    def take_forwards(self) -> list[Forward]:
        """What the servers' forward passes cost for each request that was answered in this pass since last asked."""
        return [] if self._traffic is None else self._traffic.take_forwards()

    def snapshot(self) -> Snapshot:
        """All sums so far, by split."""
        sums: dict[int, Counts] = defaultdict(lambda: defaultdict(float))
        for part in (self._own, self._past, self._of_traffic()):
            _add(sums, part)
        return {split: dict(counts) for split, counts in sums.items()}

    def _of_traffic(self) -> dict[int, Counts]:
        shares = {} if self._traffic is None else self._traffic.shares()
        count = self._sharing()
        for split, share in shares.items():
            if share.tier is not None:
                self.servers[split] = Tier(**vars(share.tier), count=count)
        return _counted(shares)

    def _sharing(self) -> int:
        """How many servers share the requests: those of the newest answers, also behind a balancer.

        Counted from the first answer of the one that came last: a server that was restarted is another one by its id,
        and the one it was before answers no more.
        """
        newest = self._newest()
        latest = max((newest.index(server) for server in set(newest)), default=0)
        return max(1, len(set(newest[latest:])))

    def _newest(self) -> list[str]:
        """Servers of the newest answers, the latest last; one that died is soon not among them."""
        now = [] if self._traffic is None else self._traffic.answered_by(self._recent)
        return [*self._answered, *now][-self._recent :]


def _add(sums: dict[int, Counts], part: Mapping[int, Counts]) -> None:
    for split, counts in part.items():
        into = sums[split]
        for name, value in counts.items():
            if name == _LEAST:
                into[name] = min(into.get(name, value), value)
            else:
                into[name] = max(into[name], value) if name == _LARGEST else into[name] + value


def _counted(shares: Mapping[int, SplitTraffic]) -> dict[int, Counts]:
    found: dict[int, Counts] = {}
    for split, share in shares.items():
        counts = found[split] = {
            "requests": share.requests,
            "samples": share.samples,
            "cached": share.cached_samples,
            "bytes": share.bytes_received,
            "receive": share.receive_cpu_seconds,
            "decode": share.decode_cpu_seconds,
            "work": _passed(share.server_work),
            "process": _passed(share.server_process),
            "clock": share.server_clock_seconds,
            "others": share.server_others_seconds,
        }
        for kind, values in (("cpu", share.server_cpu_seconds), ("wall", share.server_wall_seconds)):
            counts.update({f"{kind}:{stage}": value for stage, value in values.items()})
        counts[_LARGEST] = share.cos_batch
        if share.request_seconds is not None:
            counts[_LEAST] = share.request_seconds
    return found


def _passed(spans: Mapping[str, tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans.values())


def merged(traffic: Snapshot, own: Snapshot) -> Snapshot:
    """The sums of the traffic from one snapshot, those of this side's own work from another."""
    return {
        split: {
            **{name: v for name, v in traffic.get(split, {}).items() if not _is_own(name)},
            **{name: v for name, v in own.get(split, {}).items() if _is_own(name)},
        }
        for split in traffic.keys() | own.keys()
    }


def _is_own(name: str) -> bool:
    return name in _OWN or _is_layer(name)


def _is_layer(name: str) -> bool:
    return name.startswith("client_layer:")


def observed_between(
    before: Snapshot, after: Snapshot, servers: Mapping[int, Tier], client: Tier
) -> dict[int, Observed]:
    """What the splits cost between two snapshots; those of which nothing was handed out are left away."""
    found = {}
    for split, counts in after.items():
        old = before.get(split, {})
        delta = {name: value - old.get(name, 0.0) for name, value in counts.items()}
        if delta.get("handed_out", 0) > 0 and delta.get("samples", 0) + delta.get("cached", 0) > 0:
            delta |= {name: counts.get(name, 0.0) for name in (_LARGEST, _LEAST)}
            found[split] = _observed(split, delta, servers.get(split, Tier()), client)
    return found


def _observed(split: int, d: Counts, server: Tier, client: Tier) -> Observed:
    cpu = {name.partition(":")[2]: value for name, value in d.items() if name.startswith("cpu:")}
    wall = {name.partition(":")[2]: value for name, value in d.items() if name.startswith("wall:")}
    factor, loads = _factor(d, cpu, server), not server.reuse
    # Requests ahead of the batches that were handed out are in one sum and not in the other.
    samples = d["samples"] + d.get("cached", 0.0)
    ahead = samples / d["handed_out"]
    receive, decode = d.get("receive", 0.0), d.get("decode", 0.0)
    main = d.get("main_cpu", 0.0)
    helpers = (client.threads - 1) * main if client.device == "cpu" else 0.0
    other = (d.get("process_cpu", 0.0) - main - helpers) * ahead - receive - decode
    return Observed(
        split=split,
        batches=round(d["batches"]),
        samples=round(samples),
        cached=round(d.get("cached", 0.0)),
        bytes_received=round(d["bytes"]),
        requests=round(d["requests"]),
        request_seconds=d[_LEAST],
        rest_seconds=_rest(d) * ahead,
        step_seconds=d.get("step", 0.0) * ahead,
        client_layers=tuple(d[f"client_layer:{i}"] for i in range(sum(map(_is_layer, d)))),
        client_timed=round(d.get("client_timed", 0)),
        receive_seconds=receive,
        decode_seconds=decode,
        client_other_seconds=other,  # below 0 where another split's batches did what was received for this one
        server_cpu={stage: v / server.count for stage, v in cpu.items() if loads or stage != "model"},
        server_wall={stage: _together(stage, v, cpu, server.count) for stage, v in wall.items()},
        server_factor=factor,
        share=_share(d, server),
        cos_batch=round(d[_LARGEST]),
        server=server,
    )


def _rest(d: Counts) -> float:
    """Seconds in the frozen layers of all that was handed out; timing each layer takes longer and counts at need."""
    if d.get("rested", 0.0) > 0:
        return d["rest"] / d["rested"] * d["handed_out"]
    return d.get("timed", 0.0)


def _together(stage: str, seconds: float, cpu: Counts, servers: int) -> float:
    """Wall seconds of a stage on several servers: its work is shared, waiting (also for the store) is not."""
    if stage in ("forward", "copy_out"):
        return seconds / servers
    return seconds - (1 - 1 / servers) * cpu.get(stage, 0.0)


def _factor(d: Counts, cpu: Counts, server: Tier) -> float:
    """What the server process needs beside its requests' stages; a forward pass's other threads are in neither."""
    if d["work"] <= 0:
        return 1.0
    helpers = (server.threads - 1) * cpu.get("forward", 0.0) / max(sum(cpu.values()), 1e-12)
    return min(MOST_BESIDE, max(1.0, d["process"] / d["work"] - helpers))


def _share(d: Counts, server: Tier) -> float:
    """What others leave of the server, from its own account of work."""
    if d["clock"] <= 0:
        return 1.0
    workers = server.processors if server.device == "cpu" else server.devices
    others = d["others"] / d["clock"] / workers
    return 1.0 if others < QUIET else max(FAIR_SHARE, 1.0 - others)
