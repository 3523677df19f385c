"""The watch over a plan: the split moves when a stage changes, never flaps, and looks at what does not show."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning_tools import (
    BEST,
    JOB,
    World,
    decided,
    planning_in,
    run_epoch,
    slower_link,
    truth,
)

from hapi.client.planning.change_hold import ChangeHold
from hapi.client.planning.controller import SplitController
from hapi.client.planning.link_probe import LinkProbe
from hapi.client.planning.split_range import SplitRange
from hapi.profiler.cost import estimate
from hapi.profiler.fit import ENOUGH_BYTES
from hapi.profiler.stages.alternation import Alternation


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_slower_link_moves_the_split_and_a_faster_one_moves_it_back(ahead: int) -> None:
    planning, world = decided()
    run_epoch(planning, world, 1)

    def at_5(factor: float) -> Any:
        return lambda batch: slower_link(world, factor) if batch == 5 else None

    splits = run_epoch(planning, world, 2, batches=12, ahead=ahead, before=at_5(0.3))
    # Two batches of evidence (5 and 6), and what had opened before.
    assert splits == [BEST] * (7 + ahead) + [4] * (5 - ahead)
    splits = run_epoch(planning, world, 3, batches=12, ahead=ahead, before=at_5(1 / 0.3))
    assert splits == [4] * (7 + ahead) + [BEST] * (5 - ahead)
    down, up = planning.changes[1:]
    assert (down.epoch, down.batch, down.before, down.after) == (2, 7 + ahead, BEST, 4)
    assert re.fullmatch(
        r"bandwidth is 30\.0 Mbit/s, the plan had 100\.0 Mbit/s; \d+% faster by estimate", down.why
    )
    assert (up.epoch, up.batch, up.before, up.after) == (3, 7 + ahead, 4, BEST)


def test_replan_off_stays() -> None:
    planning, world = decided(replan=False)
    slower_link(world, 0.01)
    assert run_epoch(planning, world, 1) == [BEST] * 10 == run_epoch(planning, world, 2)
    assert len(planning.changes) == 1


def test_a_small_gain_is_not_worth_a_change() -> None:
    planning, world = decided()
    slower_link(world, 0.49)  # split 4 becomes the fastest, by less than 5%
    before, after = (estimate(world.true, JOB, s).epoch_seconds for s in (BEST, 4))
    assert 0.95 < after / before < 1
    assert run_epoch(planning, world, 1, batches=30) == [BEST] * 30


def test_another_tenant_and_slower_tiers_move_the_split() -> None:
    planning, world = decided(1e9)
    start = planning.split
    world.share = 0.5
    run_epoch(planning, world, 1)
    assert planning.split < start, "less of the server: more is done here"
    planning, world = decided(1e9)
    layers = tuple(replace(x, client_seconds=x.client_seconds * 8) for x in world.true.layers)
    world.true = replace(world.true, layers=layers)
    run_epoch(planning, world, 1)
    assert planning.split > start, "a slower client: more is done there"


@pytest.mark.parametrize("alike", [True, False], ids=["at every split", "at late splits"])
def test_a_crowded_server_moves_the_cut_and_an_empty_one_moves_it_back(alike: bool) -> None:
    """Requests wait three times as long as they are worked on, for a slot on a server that many ask. It never flaps."""
    planning, world = decided(1e9)
    start = planning.split
    world.share = 0.4
    world.slot_share = lambda split: 0.25 if alike or split >= start else 1.0
    for epoch in range(1, 5):
        crowded = run_epoch(planning, world, epoch)
    assert set(crowded) == {planning.split} and planning.split < start
    assert len(planning.changes) == 2 and "other jobs leave 25% of the server" in planning.changes[-1].why
    world.share, world.slot_share = 1.0, lambda split: 1.0
    for epoch in range(5, 9):
        run_epoch(planning, world, epoch)
    assert planning.split == start and len(planning.changes) == 3


pace = st.lists(st.integers(1, 12), min_size=1, max_size=60)


@settings(max_examples=8)
@given(pace, st.sampled_from([0.1, 0.3]), st.integers(0, 3))
def test_the_split_never_flaps(times: list[int], factor: float, ahead: int) -> None:
    check_no_flapping(times, factor, ahead)


@pytest.mark.slow
@settings(max_examples=25)
@given(pace, st.sampled_from([0.1, 0.3]), st.integers(0, 3))
def test_the_split_never_flaps_however_the_link_changes(times: list[int], factor: float, ahead: int) -> None:
    check_no_flapping(times, factor, ahead)


def check_no_flapping(times: list[int], factor: float, ahead: int) -> None:
    """A link that goes to and fro, staying for as long as ``times`` says: the split follows ever more rarely."""
    planning, world = decided()
    slow, left, turns = False, times[0], iter([*times[1:], *[10**9]])

    def step(batch: int) -> None:
        nonlocal slow, left
        if left == 0:
            slow, left = not slow, next(turns)
            slower_link(world, factor if slow else 1 / factor)
        left -= 1

    batches = sum(times) + 5
    run_epoch(planning, world, 1, batches=batches, ahead=ahead, before=step)
    changes = planning.changes[1:]
    back = [b.batch - a.batch for a, b in pairwise(changes) if b.after < b.before]
    assert all(held >= ChangeHold.FIRST - ahead for held in back), "to where a fast link is hoped for"
    if max(times) < 2:
        assert len(changes) <= 1, "two batches that agree come only in the end"
    if all(t <= 3 for t in times):  # nothing ever stays
        assert len(changes) <= 2 + math.log2(1 + batches) + batches / ChangeHold.LONGEST
    # In the end the link stays: so does the split, after the longest hold, where the truth has it.
    run_epoch(planning, world, 2, batches=ChangeHold.LONGEST + 10, ahead=0)
    seconds = [estimate(world.true, JOB, s).epoch_seconds for s in range(5)]
    assert seconds[planning.split] <= min(seconds) * 1.06
    settled = len(planning.changes)
    run_epoch(planning, world, 3, batches=50)
    assert len(planning.changes) == settled


@pytest.mark.slow_except("300000.0-4")
@pytest.mark.parametrize(
    ("bucket", "ahead"),
    [
        (300e3, 4),
        (2e6, 1),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in ((300e3, 1), (2e6, 4))),
    ],
)
def test_a_link_that_is_fast_for_little_is_tried_ever_more_rarely(bucket: float, ahead: int) -> None:
    """A token bucket: what is sent after a pause comes at 100 Mbit/s, and the link goes on with 10.

    Of split 4 a batch is 200 kB in 190 ms, which the bucket makes up for; of the split that is best on a faster link
    more than goes through. What looks like a faster link there is none.
    """
    planning, world = decided(10e6)
    run_epoch(planning, world, 1)
    assert planning.split == 4
    tokens = bucket

    def batch(split: int, **options: Any) -> list[tuple[int, float]]:
        nonlocal tokens
        nbytes = original(split, **options)[0][0]
        fast = min(nbytes, tokens)
        seconds = fast * 8 / 100e6 + (nbytes - fast) * 8 / 10e6
        passed = max(seconds, estimate(world.true, JOB, 4).epoch_seconds / JOB.samples * 10)
        tokens = min(bucket, tokens - fast + passed * 10e6 / 8)
        return [(nbytes, seconds)]

    original, world.batch = world.batch, batch  # type: ignore[method-assign]
    splits = run_epoch(planning, world, 2, batches=3000, ahead=ahead)
    elsewhere = sum(split != 4 for split in splits)
    assert 1 <= len(planning.changes[1:]) <= 16
    assert elsewhere <= 0.06 * len(splits)
    assert sum(split != 4 for split in splits[-1000:]) <= 0.03 * 1000


def unseen_at_the_freeze(sent: int = 5_000) -> tuple[SplitController, World]:
    """Of split 4 ten samples, 50 kB, show nothing of a link; the plan was made when it was fast."""
    true = truth()
    deepest = replace(true.layers[3], output_bytes=sent)
    world = World(replace(true, layers=(*true.layers[:3], deepest, true.layers[4])))
    planning = planning_in(world)
    run_epoch(planning, world)
    assert planning.split == BEST
    return planning, world


def test_a_link_that_recovered_is_noticed_where_nothing_shows_it() -> None:
    planning, world = unseen_at_the_freeze(sent=1_000)
    slower_link(world, 0.1)
    assert run_epoch(planning, world, 1, batches=12)[-1] == 4
    slower_link(world, 10)
    splits = run_epoch(planning, world, 2, batches=80)
    assert splits[-1] == BEST and planning.probes == 2
    assert "bandwidth is 100.0 Mbit/s" in planning.changes[-1].why
    assert planning.to_json()["looks"] == 2


def test_a_look_whose_answers_are_there_before_anybody_looks_is_followed_by_another() -> None:
    """A link that is faster than its readers shows in bounds only."""
    planning, world = unseen_at_the_freeze(sent=1_000)
    slower_link(world, 0.1)
    run_epoch(planning, world, 1, batches=12)
    slower_link(world, 10)
    planning.begin_pass(2, 80)
    splits = []
    for batch in range(80):
        splits.append(planning.open(2, batch)[0])
        arrivals = world.batch(splits[-1])
        planning.batch_done(2, batch, splits[-1], [(n // 10, s / 10) for n, s in arrivals], arrivals)
    assert splits[-1] == BEST and planning.probes == 2


def test_a_look_sends_more_than_what_just_shows_a_link() -> None:
    """On a fast link a part of it is there before anybody looks, and a rest that is too small shows nothing."""
    _, world = unseen_at_the_freeze()
    slower_link(world, 0.1)
    samples = min(JOB.request_size, world.true.server.cos_batch)
    wide, just, large = world.true.layers[0], -(-ENOUGH_BYTES // samples), -(-2 * ENOUGH_BYTES // samples)
    layers = (
        replace(wide, output_bytes=4 * large),
        replace(world.true.layers[1], output_bytes=large),
        replace(world.true.layers[2], output_bytes=just),
        *world.true.layers[3:],
    )
    profile = replace(world.true, layers=layers, samples=replace(world.true.samples, stored_bytes=8 * large))
    assert profile.sent_bytes(3) * samples >= ENOUGH_BYTES and profile.sent_bytes(2) > profile.sent_bytes(3)
    assert LinkProbe().split("auto", profile, JOB, SplitRange(0, 4), Alternation.only(4)) == 2


def test_a_link_that_stays_slow_is_looked_at_ever_more_rarely() -> None:
    planning, world = unseen_at_the_freeze(sent=1_000)
    slower_link(world, 0.1)
    run_epoch(planning, world, 1, batches=12)
    splits = run_epoch(planning, world, 2, batches=600)
    assert len(planning.changes) == 2 and planning.split == 4
    elsewhere = [s for s in splits if s != 4]
    assert elsewhere == [0] * planning.probes, "the split that sends least of those that show the link"
    assert planning.probes == 600 // LinkProbe.WAIT


def test_looks_that_take_long_are_rarer() -> None:
    """In the long run they take a fiftieth of all seconds, whatever one takes."""
    _, world = unseen_at_the_freeze()
    slower_link(world, 0.04)
    profile, look, looks, batches = world.true, LinkProbe(), 0, 20_000
    for _ in range(batches):
        if look.due([]):
            at = look.split("auto", profile, JOB, SplitRange(0, 4), Alternation.only(4))
            assert at is not None
            looks += 1
    probing, staying = (estimate(profile, JOB, s).epoch_seconds for s in (at, 4))
    assert probing > 4 * staying
    assert looks > 3
    assert (looks - 1) * (probing / staying - 1) <= LinkProbe.SHARE * batches


def test_a_link_that_shows_itself_or_does_not_matter_is_not_looked_at() -> None:
    planning, world = decided()
    slower_link(world, 0.1)
    run_epoch(planning, world, 1, batches=200)
    assert planning.split == 4 and planning.probes == 0, "100 kB a request show it"
    planning, world = unseen_at_the_freeze()
    layers = tuple(replace(x, client_seconds=x.client_seconds * 50) for x in world.true.layers)
    world.true = replace(world.true, layers=layers)
    run_epoch(planning, world, 1, batches=200)
    assert planning.split == 4 and planning.probes == 0, "no link makes it better to compute here"


@settings(max_examples=25)
@given(st.integers(0, 1 << 32), st.sampled_from([0.08, 0.2]))
def test_noise_never_moves_the_split(seed: int, noise: float) -> None:
    source = Random(seed)
    world = World(truth())
    world.noise = lambda: source.uniform(1 - noise, 1 + noise)
    planning = planning_in(world)
    run_epoch(planning, world)
    assert len(set(run_epoch(planning, world, 1, batches=60))) == 1
    assert len(planning.changes) == 1


# -- memory --------------------------------------------------------------------------------------------------------
