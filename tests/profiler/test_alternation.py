"""Two splits whose batches alternate: the pattern, the price, and when it is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.any_profile import jobs, profiles
from support.profiler_tools import crafted, free_server, free_tier

from hapi.profiler.cost import pipeline_at
from hapi.profiler.profile import Job, LinkProfile, Profile
from hapi.profiler.reuse.choose import choose_reuse
from hapi.profiler.reuse.facts import KeptShare, Prices, ReuseFacts, Storage
from hapi.profiler.reuse.job_cost import JobPricer
from hapi.profiler.stages.alternation import GAIN, STEPS, Alternating, Alternation, best_alternation
from hapi.profiler.stages.pipeline import Pipeline
from hapi.profiler.strategies import plan, seconds_at

JOB = Job(bs=10, samples=1000, epochs=1, request_size=10)
FAST = LinkProfile(bits_per_second=1e9, variation=0.0, request_seconds=0.0)
splits = st.integers(0, 30)


def halves(server: float = 0.01, client: float = 0.01, link: LinkProfile = FAST) -> Profile:
    """Two frozen layers of so many seconds a sample, with 10 MB between them and 1 kB at both ends."""
    base = crafted(
        [10_000_000, 1_000, 1_000],
        [server, server, 0.0],
        [client, client, 0.0],
        server=free_server(concurrency=4),
        link=link,
        step_seconds=0.0,
    )
    samples = replace(base.samples, stored_bytes=1_000, tensor_bytes=1_000)
    return replace(
        base, samples=samples, last_split=2, freeze=2, client_tier=free_tier(), server_tier=free_tier()
    )


# -- the pattern ----------------------------------------------------------------------------------------------------


@given(splits, splits, st.integers(0, STEPS // 2), st.integers(1, 200))
def test_the_other_split_gets_its_share_evenly_spread(split: int, other: int, steps: int, count: int) -> None:
    at = Alternation(split=split, other=other, share=steps / STEPS)
    pattern = [at.split_of(number) == other != split for number in range(count)]
    for first in range(count):
        for last in range(first + 1, min(count, first + 40) + 1):
            expected = at.share * (last - first) if split != other else 0
            assert abs(sum(pattern[first:last]) - expected) < 1


def test_one_split_alone() -> None:
    at = Alternation.only(7)
    assert {at.split_of(number) for number in range(100)} == {7} and at.text == ""


# -- the price ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(profiles(), jobs, st.data())
def test_any_mix_of_a_split_with_itself_costs_what_it_costs(
    profile: Profile, job: Job, data: st.DataObject
) -> None:
    split, steps = data.draw(st.integers(0, profile.last_split)), data.draw(st.integers(0, STEPS // 2))
    alone, bits = pipeline_at(profile, job, split), profile.link.bits_per_second
    mixed = Alternating(alone, alone, steps / STEPS)
    assert mixed.epoch(bits) == pytest.approx(alone.epoch(bits))
    assert mixed.server_epoch() == pytest.approx(alone.server_epoch())
    assert (mixed.sent_bytes, mixed.disk) == pytest.approx((alone.sent_bytes, alone.disk))
    assert seconds_at(profile, job, Alternation.only(split)) == pytest.approx(alone.epoch(bits))


@settings(deadline=None)
@given(profiles(), jobs, st.tuples(*[st.sampled_from([0.0, 0.1, 1.0, 30.0])] * 3))
def test_no_pair_is_cheaper(profile: Profile, job: Job, each: tuple[float, float, float]) -> None:
    """Whatever bytes, the server's hours and the trainer's hours cost; batches as they follow each other."""
    prices, bits = Prices(egress=each[0], server=each[1], trainer=each[2]), profile.link.bits_per_second
    every = [pipeline_at(profile, job, split) for split in range(profile.last_split + 1)]
    bs, batches = min(job.bs, job.samples), -(-job.samples // job.bs)

    def money(epoch: Pipeline | Alternating, seconds: float) -> float:
        return prices.of(job.samples * epoch.sent_bytes, epoch.server_epoch(), seconds)

    found, alone = best_alternation(every, bits, prices), min(money(one, one.epoch(bits)) for one in every)
    if found is None:
        return
    assert each[2] and money(found, found.epoch(bits)) <= (1 - GAIN) * alone * (1 + 1e-9)
    best = money(found, batches * found.cycle(bs, bits))
    for one in every:
        for other in every:
            depth = 1 + min(one.depth, other.depth)
            for steps in range(1, STEPS // 2 + 1):
                if one is not other and steps / STEPS * min(depth, batches) >= 1:
                    both = Alternating(one, other, steps / STEPS)
                    assert best <= money(both, batches * both.cycle(bs, bits)) * (1 + 1e-9)


@settings(deadline=None)
@given(profiles(), jobs)
def test_it_is_never_chosen_for_less_than_it_must_gain_and_no_pair_gains_more(
    profile: Profile, job: Job
) -> None:
    bits = profile.link.bits_per_second
    every = [pipeline_at(profile, job, split) for split in range(profile.last_split + 1)]
    epochs, alone = best_alternation(every, bits), min(one.epoch(bits) for one in every)
    if epochs is None:
        return
    found = epochs.alternation
    batches = -(-job.samples // job.bs)
    assert 0 < found.share <= 0.5 and found.share * batches >= 1
    seconds = seconds_at(profile, job, found)
    assert seconds <= (1 - GAIN) * alone
    cycle = (
        every[found.split]
        .loads(job.bs, bits)
        .mixed(every[found.other].loads(job.bs, bits), found.share)
        .cycle()
    )
    for one in every:
        for other in every:
            depth = 1 + min(one.depth, other.depth)
            for steps in range(1, STEPS // 2 + 1):
                if steps / STEPS * min(depth, batches) >= 1:
                    both = one.loads(job.bs, bits).mixed(other.loads(job.bs, bits), steps / STEPS).cycle()
                    assert cycle <= both * (1 + 1e-9)


def test_two_equal_tiers_halve_the_epoch_where_no_split_divides_the_work() -> None:
    """100 batches of 0.2 s on either tier; between the layers 0.8 s on the link."""
    profile = halves()
    found = plan("auto", profile, JOB)
    assert found.alternation is not None
    assert {found.alternation.split, found.alternation.other} == {0, 2} and found.alternation.share == 0.5
    assert found.candidates[0].estimate.epoch_seconds == pytest.approx(20, rel=0.1)
    assert found.epoch_seconds == pytest.approx(10.9, rel=0.05)


@pytest.mark.parametrize(("server", "more"), [(0.01 / 3, 2), (0.03, 0)])
def test_the_faster_tier_gets_more(server: float, more: int) -> None:
    found = plan("auto", halves(server=server), JOB).alternation
    assert found is not None and found.split == more and 0.15 < found.share < 0.3


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, alternate=False),
        replace(JOB, samples=10),
        replace(JOB, bs=1000, request_size=1000),
    ],
    ids=["switched off", "one small batch", "one batch"],
)
def test_nothing_alternates(job: Job) -> None:
    assert plan("auto", halves(), job).alternation is None


def test_one_machine_gains_nothing() -> None:
    """Its processors have the work of both tiers, whoever does it."""
    profile = replace(halves(), client_tier=free_tier("cpu"), server_tier=free_tier("cpu"))
    assert plan("auto", profile, JOB).alternation is not None
    assert plan("auto", replace(profile, one_machine=True), JOB).alternation is None


def test_a_link_that_is_the_bottleneck_gains_nothing() -> None:
    assert plan("auto", halves(link=replace(FAST, bits_per_second=1e5)), JOB).alternation is None


def test_only_splits_that_fit_the_memory_alternate() -> None:
    profile = replace(halves(), layers=tuple(replace(x, parameter_bytes=1 << 20) for x in halves().layers))
    free, peak = plan("auto", profile, JOB), plan("auto", profile, JOB).candidates[0].estimate.memory.peak
    assert free.alternation is not None
    short = plan("auto", profile, replace(JOB, memory_bytes=peak - 1)).alternation
    assert short is None or 0 not in (short.split, short.other)


@pytest.mark.parametrize("strategy", ["hapi", "none", "freeze", "nsg"])
def test_other_strategies_have_one_split(strategy: str) -> None:
    assert plan(strategy, halves(), JOB).alternation is None


# -- with what is kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 30])
def test_a_job_alternates_while_its_cache_fills(epochs: int) -> None:
    disk = Storage(bytes=10**12, read=1e9, write=1e9)
    job = replace(JOB, epochs=epochs)
    found = choose_reuse(halves(), job, ReuseFacts(client=disk))
    alone = choose_reuse(halves(), replace(job, alternate=False), ReuseFacts(client=disk))
    assert found.mode == alone.mode == ("recompute" if epochs == 1 else "keep here")
    assert found.alternation is not None and found.alternation.share == 0.5
    assert found.cost.first_epoch_seconds < 0.6 * alone.cost.first_epoch_seconds
    assert found.cost.last_epoch_seconds == pytest.approx(
        alone.cost.last_epoch_seconds if epochs > 1 else found.cost.first_epoch_seconds
    )
    assert JobPricer(halves(), job, ReuseFacts(client=disk), found.choice).job_cost(Prices()) == found.cost


@pytest.mark.parametrize("prices", [Prices(egress=1), Prices(server=1), Prices(egress=2, server=3)])
def test_money_that_no_second_costs_is_not_spent_on_a_second_split(prices: Prices) -> None:
    assert choose_reuse(halves(), JOB, ReuseFacts(), prices=prices, objective="money").alternation is None


def test_a_trainer_that_costs_by_the_hour_makes_alternating_cheaper() -> None:
    facts, job = ReuseFacts(), replace(JOB, alternate=False)
    by_time = choose_reuse(halves(), JOB, facts)
    for prices in (Prices(trainer=5), Prices(trainer=5, server=1e-3)):
        found = choose_reuse(halves(), JOB, facts, prices=prices, objective="money")
        alone = choose_reuse(halves(), job, facts, prices=prices, objective="money")
        assert found.alternation == by_time.alternation is not None
        assert found.money < 0.6 * alone.money and alone.alternation is None
    dear = choose_reuse(halves(), JOB, facts, prices=Prices(trainer=5, server=50), objective="money")
    assert dear.alternation is None and dear.split == 0  # the trainer computes all


def test_splits_after_what_is_kept_do_not_alternate() -> None:
    """Features of layer 1 are kept, all but a tenth: that is computed before it."""
    disk = Storage(bytes=10**12, read=1e9, write=1e9)
    known = ReuseFacts(client=disk, client_kept=(KeptShare(cut=1, share=0.9),))
    found = choose_reuse(halves(), JOB, known)
    at = found.alternation
    assert found.mode != "keep here" or at is None or max(at.split, at.other) <= found.cut
