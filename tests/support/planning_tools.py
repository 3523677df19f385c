"""A world whose costs are known: a meter that shows what batches would cost if a profile were the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hapi.client.loading.link_stats import Forward
from hapi.client.planning.controller import SplitController
from hapi.client.planning.counts import ClientCounts, Snapshot, SplitCounts, TrafficCounts, Work
from hapi.profiler.fit import Sizes, Tier
from hapi.profiler.profile import Job, LinkProfile, Profile
from hapi.profiler.strategies import plan
from support.profiler_tools import crafted, free_server, free_tier

MB = 1_000_000
OUTPUTS = (600_000, 300_000, 100_000, 20_000, 4_000)
"""Bytes of a sample after each layer: the deeper, the less to send."""
JOB = Job(bs=10, samples=100, epochs=3, request_size=5, micro_batch=4)


def truth(bits: float = 100e6, there: float = 0.004, here: float = 0.004, **changes: Any) -> Profile:
    """Four frozen layers of ``there`` and ``here`` seconds a sample, samples of 40 kB, a trained layer."""
    tier = {"codec_seconds_per_byte": 1e-10, "decode_seconds": 0.001, "overhead_seconds": 1e-4}
    base = crafted(
        OUTPUTS,
        [there] * 5,
        [here] * 5,
        server=free_server(concurrency=4),
        server_tier=free_tier("cpu", **tier),
        client_tier=free_tier("cpu", **tier),
        link=LinkProfile(bits_per_second=bits, variation=0.0, request_seconds=0.0),
        step_seconds=0.001,
    )
    samples = replace(base.samples, stored_bytes=40_000, uint8_bytes=150_000, tensor_bytes=600_000)
    return replace(base, samples=samples, **changes)


def sizes_in(profile: Profile) -> Sizes:
    """What is known of the job before it runs."""
    return Sizes(
        model=profile.model,
        freeze=profile.freeze,
        last_split=profile.last_split,
        layers=tuple(replace(x, server_seconds=0.0, client_seconds=0.0) for x in profile.layers),
        samples=profile.samples,
        client=Tier(device=profile.client_tier.device),
    )


class World:
    """Stands in for a :class:`hapi.client.planning.meter.Meter`; :meth:`batch` is a batch that was done."""

    def __init__(self, true: Profile) -> None:
        self.true = true
        self.noise: Callable[[], float] = lambda: 1.0
        """Factor of each cost."""
        self.slower = 1.0
        """Times as long as in truth that the client takes for its layers."""
        self.pages = 0
        """New pages that the client touches for a batch."""
        self.server_slower, self.server_pages = 1.0, 0
        """As much of the server for each request, which alone shows it in what it reports of single requests."""
        self.servers: dict[int, Tier] = {}
        self.share = 1.0
        """What other jobs leave of the server."""
        self.count = 1
        """Servers that share the work."""
        self._forwards: list[Forward] = []
        self.counts: dict[int, SplitCounts] = {}

    def snapshot(self) -> Snapshot:
        return dict(self.counts)

    def take_forwards(self) -> list[Forward]:
        taken, self._forwards = self._forwards, []
        return taken

    def batch(self, split: int, samples: int = 10, timed: bool = False) -> list[tuple[int, float]]:
        """Count a batch; what the link showed meanwhile."""
        true, noise = self.true, self.noise
        server, client, nbytes = true.server_tier, true.client_tier, round(samples * true.sent_bytes(split))
        there = [self.server_slower * x.server_seconds * samples for x in true.layers[:split]]
        here = [self.slower * x.client_seconds * samples for x in true.layers[split : true.last_split]]
        stages = {
            "decode": samples * server.decode_seconds * noise() if split else 0.0,
            "send": nbytes * server.codec_seconds_per_byte * noise(),
            "read": samples * server.overhead_seconds * noise(),
            "forward": sum(there) * noise(),
        }
        work = sum(stages.values())
        traffic = TrafficCounts(
            requests=2, samples=samples, bytes_received=nbytes, cos_batch=5,
            receive_cpu=nbytes * client.codec_seconds_per_byte * noise(),
            decode_cpu=0.0 if split else samples * client.decode_seconds * noise(),
            server_cpu=stages, server_wall=stages, work=work, process_cpu=work, clock=1.0, others=1.0 - self.share,
        )  # fmt: skip
        step = Work(samples, self.slower * samples * true.step_seconds * noise(), self.pages)
        suffix = Work(0 if split == true.last_split else samples, sum(here) * noise(), self.pages)
        main = step.seconds + suffix.seconds
        others = traffic.receive_cpu + traffic.decode_cpu + samples * client.overhead_seconds
        own = ClientCounts(
            batches=1, samples=samples, main_cpu=main, process_cpu=main + others, step=step,
            suffix=Work() if timed else suffix,
            timed=replace(suffix, samples=samples, layers=tuple(here)) if timed else Work(),
        )  # fmt: skip
        self.counts[split] = self.counts.get(split, SplitCounts()) + SplitCounts(client=own, traffic=traffic)
        if split:
            each, half = stages["forward"] / 2, tuple(seconds / 2 for seconds in there)
            layers = half if timed else ()
            forward = Forward(split, samples // 2, each, each, self.server_pages, layers)
            self._forwards += [forward, forward]
        self.servers[split] = Tier(device=server.device, running=true.server.concurrency, count=self.count)
        return [(nbytes, nbytes * 8 / (true.link.bits_per_second * self.noise()))]


def planning_in(world: World, strategy: str = "auto", job: Job = JOB, **options: Any) -> SplitController:
    return SplitController(strategy, sizes_in(world.true), job, world, **options)  # type: ignore[arg-type]


def run_epoch(
    planning: SplitController,
    world: World,
    epoch: int = 0,
    batches: int = 10,
    *,
    first: int = 0,
    ahead: int = 1,
    before: Callable[[int], None] = lambda batch: None,
) -> list[int]:
    """An epoch whose window opens ``ahead`` batches before they are done; the splits of its batches."""
    planning.begin_pass(epoch, batches - first)
    opened: list[tuple[int, bool]] = []
    for batch in range(first, batches):
        before(batch)
        while len(opened) < min(batches - first, batch - first + 1 + ahead):
            opened.append(planning.open(epoch, first + len(opened)))
        split, timed = opened[batch - first]
        planning.batch_done(epoch, batch, split, world.batch(split, timed=timed))
    return [split for split, _ in opened]


FREEZE, BEST = 4, 3
"""Of :func:`truth`: at 100 Mbit/s split 3 is the fastest, below 45 Mbit/s the freeze."""


def best_of(world: World, job: Job = JOB) -> int:
    return plan("auto", world.true, job).split


def slower_link(world: World, factor: float) -> None:
    link = world.true.link
    world.true = replace(world.true, link=replace(link, bits_per_second=link.bits_per_second * factor))


def decided(bits: float = 100e6, **options: Any) -> tuple[SplitController, World]:
    """A planning after its profiling epoch."""
    world = World(truth(bits))
    planning = planning_in(world, **options)
    run_epoch(planning, world)
    return planning, world


def knows_the_truth(planning: SplitController, world: World) -> None:
    """Of the seconds of both sides, and so the best split."""
    found = planning.profile
    assert found is not None
    assert found.step_seconds == pytest.approx(world.true.step_seconds)
    for layer, true in zip(found.layers[:FREEZE], world.true.layers, strict=False):
        assert layer.client_seconds == pytest.approx(true.client_seconds)
        assert layer.server_seconds == pytest.approx(true.server_seconds)
    assert planning.plan is not None and planning.plan.split == BEST


# -- the profiling epoch -------------------------------------------------------------------------------------------
