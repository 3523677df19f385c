"""A cache without room for all samples: what is missing crosses at one split while it fills, then at another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.any_profile import jobs, profiles
from support.profiler_tools import turning

from hapi.client.planning.reuse_choice import ReuseChooser
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choice import Choice, Crossing
from hapi.profiler.reuse.choose import choose_reuse
from hapi.profiler.reuse.facts import CodecCost, KeptShare, Prices, ReuseFacts, Storage
from hapi.profiler.reuse.job_cost import RECORD_BYTES, JobPricer

JOB = Job(bs=64, samples=6400, epochs=20, request_size=64, alternate=False)
BYTES = 1_000
DISK = Storage(bytes=int(0.6 * JOB.samples * (BYTES + RECORD_BYTES)), read=1e12, write=1e12)


def test_the_split_changes_once_the_cache_is_full() -> None:
    profile, facts = turning(), ReuseFacts(client=DISK)
    found = choose_reuse(profile, JOB, facts)
    choice = found.choice
    assert (found.mode, choice.cut, choice.crossing) == ("keep here", 2, Crossing(split=0))
    assert choice.later == Crossing(split=2) and found.cost.later_epoch == 1
    assert choice.settled == replace(choice, crossing=Crossing(split=2), later=None)
    assert choice.unchanging == replace(choice, later=None)
    for one in (choice.unchanging, choice.settled):
        whole = JobPricer(profile, JOB, facts, one).job_cost(Prices())
        assert found.seconds < whole.seconds and whole.later_epoch == 1
    first, later = (
        JobPricer(profile, JOB, facts, one).job_cost(Prices()) for one in (choice.unchanging, choice.settled)
    )
    assert found.cost.first_epoch_seconds == first.first_epoch_seconds
    assert found.cost.last_epoch_seconds == later.last_epoch_seconds
    expected = first.first_epoch_seconds + (JOB.epochs - 1) * later.last_epoch_seconds
    assert found.seconds == pytest.approx(expected)
    document = found.to_json()["cost"]["choice"]
    assert (document["crossing"]["split"], document["later"]["split"]) == (0, 2)


@pytest.mark.parametrize(
    "facts",
    [
        ReuseFacts(client=replace(DISK, bytes=10**12)),
        ReuseFacts(client=DISK, client_kept=(KeptShare(cut=2, share=0.6),)),
        ReuseFacts(client=DISK, client_kept=(KeptShare(cut=2, share=0.1),), rounded=True),
        ReuseFacts(),
    ],
    ids=["room for all", "full already", "one split alone fits what is kept", "no cache"],
)
def test_nothing_changes(facts: ReuseFacts) -> None:
    found = choose_reuse(turning(), JOB, facts)
    assert all(one.cost is None or one.cost.choice.later is None for one in found.candidates)


def test_two_splits_may_alternate_in_one_of_the_phases_alone() -> None:
    """Tiers of equal speed have as much to do at first; later the server has least where it computes all."""
    profile = turning(server=0.010, client=0.010, step=0.004)
    found = choose_reuse(profile, replace(JOB, alternate=True), ReuseFacts(client=DISK))
    alone = choose_reuse(profile, JOB, ReuseFacts(client=DISK))
    assert found.seconds < alone.seconds
    crossings = [found.choice.crossing, found.choice.settled.crossing]
    assert crossings[0] != crossings[1] and any(one.alternation for one in crossings)


def test_views_change_after_each_has_its_part() -> None:
    facts = ReuseFacts(client=replace(DISK, bytes=3 * DISK.bytes), samples=3 * JOB.samples, views=3)
    found = choose_reuse(turning(), JOB, facts)
    assert found.choice.later == Crossing(split=2) and found.cost.later_epoch == 3


@given(profiles(), jobs, st.floats(0.01, 0.99), st.integers(1, 40), st.booleans())
def test_no_split_for_all_epochs_is_better(
    profile: Profile, job: Job, room: float, epochs: int, alternate: bool
) -> None:
    job = replace(job, epochs=epochs, memory_bytes=None, alternate=alternate)
    cut = profile.last_split
    need = job.samples * (profile.sent_bytes(cut) + RECORD_BYTES)
    facts = ReuseFacts(client=Storage(bytes=int(room * need), read=1e9, write=1e9))
    found = choose_reuse(profile, job, facts, always=True)
    if not cut:
        return
    assert found.mode == "keep here" and found.choice.within(range(cut + 1))
    for split in range(cut + 1):
        choice = Choice(mode="keep here", cut=cut, crossing=Crossing(split=split))
        assert found.seconds <= JobPricer(profile, job, facts, choice).job_cost(Prices()).seconds * (1 + 1e-9)


def test_a_choice_goes_as_far_as_its_later_splits() -> None:
    choice = Choice(mode="keep here", cut=3, crossing=Crossing(split=1))
    assert choice.then(choice.crossing) == choice and choice.settled is choice
    both = choice.then(Crossing(split=2, wire=CodecCost(name="zeros", ratio=2.0, encode=1.0, decode=1.0)))
    assert choice.within([1]) and not both.within([1]) and both.within([1, 2])
    assert both.crossing.wire_of(2) is None
    assert both.settled.crossing.wire_of(2) == both.settled.crossing.wire == both.later.wire  # type: ignore[union-attr]


def test_a_run_changes_when_its_cache_is_full_or_nearly_so() -> None:
    """Records are a little larger than a plan takes them for, so that the last percent never comes."""
    share = [0.0]
    reuse = ReuseChooser(
        lambda: ReuseFacts(client=DISK, client_kept=(KeptShare(cut=2, share=share[0]),) if share[0] else ())
    )
    splits = range(3)
    assert reuse.choose(turning(), JOB, splits)
    assert reuse.plan is not None and reuse.plan.split == 0
    share[0] = 0.1
    assert not reuse.choose(turning(), replace(JOB, epochs=19), splits) and reuse.plan.split == 0
    share[0] = 0.59
    assert reuse.choose(turning(), replace(JOB, epochs=18), splits)
    assert reuse.plan.split == 2 and not reuse.choose(turning(), replace(JOB, epochs=17), splits)
