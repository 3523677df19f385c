"""The replay of whole jobs: simulated time, disks and caches, epochs that a hand can compute, and its lower bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.profiler_tools import crafted, free_server, free_tier

from benchmarks.keep.disks import CacheAtWork, Disk, DiskAtWork
from benchmarks.keep.epochs import Epoch
from benchmarks.keep.events import Clock, Pool
from benchmarks.keep.machines import Machines, SideCache
from benchmarks.keep.whole_job import World, epoch_bound, replay
from hapi.profiler.profile import Job, LinkProfile
from hapi.profiler.reuse.choice import Choice, Crossing
from hapi.profiler.reuse.facts import RAW
from hapi.profiler.reuse.job_cost import LINE_BYTES
from hapi.profiler.stages.alternation import Alternation

FAST = LinkProfile(bits_per_second=1e15, variation=0.0, request_seconds=0.0)
JOB = Job(bs=20, samples=1000, epochs=5, request_size=20)
QUICK = Disk(read=1e12, write=1e12)
PLAIN = Choice(mode="recompute", cut=0, crossing=Crossing(split=1))
KEPT = Choice(mode="keep here", cut=1, crossing=Crossing(split=1))


def test_places_are_given_in_the_order_of_the_demands() -> None:
    clock, ended = Clock(), list[tuple[str, float]]()
    pool = Pool(clock, 2)

    def note(name: str) -> Callable[[], None]:
        return lambda: ended.append((name, clock.now))

    pool.use(3.0, note("a"))
    pool.use(1.0, note("both"), width=2)
    pool.use(1.0, note("c"))  # a place is free, but the one before wants two
    clock.run()
    assert ended == [("a", 3.0), ("both", 4.0), ("c", 5.0)] and pool.idle
    assert pool.busy_seconds == pytest.approx(3 + 2 + 1)


def test_long_work_lets_others_have_their_turns() -> None:
    clock, ended = Clock(), list[float]()
    pool = Pool(clock)
    pool.compute(8.0, lambda: ended.append(clock.now))
    pool.use(0.5, lambda: ended.append(clock.now))
    clock.run()
    assert ended == [pytest.approx(2.5), pytest.approx(8.5)]


def test_a_disk_becomes_slow_when_its_fast_part_is_full() -> None:
    disk = Disk(read=1.0, write=10.0, slow_write=2.0, fast_bytes=50)
    assert disk.writing(40, 0) == 4.0 and disk.writing(40, 30) == 2.0 + 10.0 and disk.writing(40, 60) == 20.0


def cache_of(budget: int, disk: Disk = QUICK) -> tuple[Clock, CacheAtWork]:
    clock = Clock()
    return clock, CacheAtWork(clock, Pool(clock), DiskAtWork(clock, disk), budget, 0, 100)


def test_the_simulated_cache_has_a_budget_and_its_line_a_bound() -> None:
    clock, cache = cache_of(10_000)
    shelf = cache.shelf(1, 1000.0)
    cache.offer(list(range(100)), shelf, RAW)
    clock.run()
    assert 5 < shelf.count < 10 and cache.most_bytes <= 10_000
    slow_clock, slow = cache_of(10**12, Disk(read=1.0, write=1.0))
    large = slow.shelf(1, LINE_BYTES / 2)
    for row in range(10):
        slow.offer([row], large, RAW)
    slow_clock.run()
    assert large.count == 2  # one at work, one that waits; the others were left out


def test_an_epochs_end_waits_for_the_line_but_for_no_open_segment() -> None:
    clock, cache = cache_of(1 << 40, Disk(read=1.0, write=10e6))
    shelf, ended = cache.shelf(1, 32e6), list[float]()
    cache.offer([0], shelf, RAW)
    cache.flush(lambda: ended.append(clock.now))
    clock.run()
    assert ended == [pytest.approx(0.0, abs=0.02)] and shelf.count == 1


def epoch_seconds(choice: Choice = PLAIN, job: Job = JOB, **changes: Any) -> float:
    fields: dict[str, Any] = {"link": FAST, "server": free_server(concurrency=4), **changes}
    profile = crafted([10_000, 1_000], [0.01, 0.0], **fields)
    return Epoch(Machines(profile, job, None, None), choice, 0).run()


def test_an_epoch_takes_as_long_as_its_busiest_stage() -> None:
    assert epoch_seconds(server_tier=free_tier("cpu")) == pytest.approx(10.0, rel=0.01)
    assert epoch_seconds(step_seconds=0.02) == pytest.approx(
        20.0 + 0.6, rel=0.01
    )  # four requests come at once
    slow = replace(FAST, bits_per_second=8e5)  # a sample crosses in 0.1 s
    assert epoch_seconds(link=slow) == pytest.approx(100.0, rel=0.01)
    assert epoch_seconds(link=replace(slow, request_seconds=100.0)) > 1000  # four at a time
    both = {"server_tier": free_tier("cpu"), "step_seconds": 0.01}
    assert epoch_seconds(**both) == pytest.approx(10.7, rel=0.02)
    assert epoch_seconds(**both, client_tier=free_tier("cpu"), one_machine=True) == pytest.approx(
        20.0, rel=0.02
    )


def test_samples_at_split_0_are_decoded_by_the_trainer() -> None:
    tier = free_tier("cpu", decode_seconds=0.004)
    found = epoch_seconds(PLAIN.at(Crossing(split=0)), client_tier=tier)
    assert found == pytest.approx(1000 * (0.004 + 0.01), rel=0.02)  # its only core also computes


def halves(choice: Choice) -> Choice:
    both = Alternation(split=1, other=0, share=0.5)
    return replace(choice, crossing=replace(choice.crossing, split=1, alternation=both))


def test_batches_of_two_splits_keep_both_tiers_at_work() -> None:
    tiers = {"server_tier": free_tier("cpu"), "client_tier": free_tier("cpu")}
    assert epoch_seconds(**tiers) == pytest.approx(10.0, rel=0.01)
    assert epoch_seconds(PLAIN.at(Crossing(split=0)), **tiers) == pytest.approx(10.0, rel=0.02)
    assert epoch_seconds(halves(PLAIN), **tiers) == pytest.approx(5.0, rel=0.15)


def world(disk: Disk = QUICK, budget: int = 1 << 40, epochs: int = 5) -> World:
    profile = crafted(
        [10_000, 1_000], [0.01, 0.0], link=FAST, server=free_server(concurrency=2), step_seconds=0.001
    )
    return World(
        profile=profile, job=replace(JOB, epochs=epochs), client=SideCache(disk=disk, budget=budget), server=None
    )  # fmt: skip


def test_later_epochs_read_what_was_kept() -> None:
    found = replay(world(), lambda machines, epoch: KEPT)
    assert found.first_epoch_seconds == pytest.approx(10.0, rel=0.02)
    assert found.last_epoch_seconds == pytest.approx(1.0, rel=0.05) and found.kept_share == 1
    assert found.seconds == pytest.approx(14.0, rel=0.02) and found.sent_bytes == 1000 * 10_000
    half = replay(world(budget=5_000_000), lambda machines, epoch: KEPT)
    assert 0.4 < half.kept_share < 0.5 and half.most_bytes[0] <= 5_000_000
    assert found.seconds < half.seconds < replay(world(), lambda machines, epoch: PLAIN).seconds


def test_epochs_after_one_without_change_are_not_replayed() -> None:
    asked: list[int] = []

    def choose(machines: Machines, epoch: int) -> Choice:
        asked.append(epoch)
        return KEPT

    many = replay(world(epochs=1000), choose)
    assert len(asked) < 5 and many.seconds == pytest.approx(10 + 999 * 1.0, rel=0.05)


@pytest.mark.parametrize("mode", ["recompute", "keep here", "keep samples", "keep there"])
def test_no_replay_is_shorter_than_the_bound(mode: str) -> None:
    for split in (0, 1):
        cut = 0 if mode in ("recompute", "keep samples") else 1
        choice = Choice(mode=mode, cut=cut, crossing=Crossing(split=split))  # type: ignore[arg-type]
        if (mode, split) in (("keep samples", 1), ("keep there", 0)):
            continue
        truth = replace(world(), server=SideCache(disk=QUICK, budget=1 << 40))
        both = [halves(choice)] if mode in ("recompute", "keep here") else []
        for one in (choice, *both):
            found = replay(truth, lambda machines, epoch, c=one: c)  # type: ignore[misc]
            assert found.first_epoch_seconds >= epoch_bound(truth, one, 0.0)
            assert found.last_epoch_seconds >= epoch_bound(truth, one, found.kept_share)


def test_a_job_that_takes_too_long_is_left() -> None:
    truth = world(epochs=100)
    found = replay(truth, lambda m, e: PLAIN, limit=50.0, bound=lambda c: epoch_bound(truth, c, 0.0))
    assert found.seconds == float("inf")
