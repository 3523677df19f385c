"""A world whose costs are known: a meter that shows what batches would cost if a profile were the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.split.world import World, sizes_in
from hapi.client.planning.controller import SplitController
from hapi.profiler.profile import Job, LinkProfile, Profile
from hapi.profiler.strategies import plan
from support.profiler_tools import crafted, free_server, free_tier

MB = 1_000_000
OUTPUTS = (600_000, 300_000, 100_000, 20_000, 4_000)
"""Bytes of a sample after each layer: the deeper, the less to send."""
JOB = Job(bs=10, samples=100, epochs=3, request_size=5, micro_batch=4, alternate=False)
"""One split at a time, so that each is known by its seconds."""


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
