"""The watch: it tells when a stage has left its estimate, after two batches that agree, and never for noise."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning_tools import JOB, World, truth

from hapi.client.planning.counts import SplitCounts, TrafficCounts
from hapi.client.planning.drift import Drift, DriftDetector
from hapi.profiler.cost import estimate
from hapi.profiler.fit import Tier
from hapi.profiler.profile import Profile


class Watched:
    """A world and a watch over the profile that it had at first."""

    def __init__(self, profile: Profile | None = None) -> None:
        profile = profile or truth()
        self.world = World(profile)
        self.watch = DriftDetector(self.world, Tier(), profile, JOB.bs)  # type: ignore[arg-type]

    def batches(self, count: int, split: int = 3) -> list[tuple[Profile, str] | None]:
        return [self.watch.batch_done(split, self.world.batch(split)) for _ in range(count)]

    def change(self, **fields: float) -> None:
        """Scale what the world costs: bits, server, client."""
        true, server, client = self.world.true, fields.get("server", 1.0), fields.get("client", 1.0)
        tier, link = true.server_tier, true.link
        self.world.true = replace(
            true,
            layers=tuple(
                replace(x, server_seconds=x.server_seconds * server, client_seconds=x.client_seconds * client)
                for x in true.layers
            ),
            step_seconds=true.step_seconds * client,
            server_tier=replace(
                tier,
                decode_seconds=tier.decode_seconds * server,
                codec_seconds_per_byte=tier.codec_seconds_per_byte * server,
                overhead_seconds=tier.overhead_seconds * server,
            ),
            link=replace(link, bits_per_second=link.bits_per_second * fields.get("bits", 1.0)),
        )


def test_an_estimate_that_holds_is_not_told() -> None:
    assert Watched().batches(50) == [None] * 50


def test_encoding_that_the_plan_knows_of_is_no_drift() -> None:
    """It doubles what a server does beside its forward passes."""
    profile = truth()
    encoding = 20 * profile.server_tier.decode_seconds
    for known in (True, False):
        watched = Watched(profile)
        if known:
            watched.watch = DriftDetector(
                watched.world,
                Tier(),
                profile,
                JOB.bs,
                lambda split: encoding if split else 0.0,  # type: ignore[arg-type]
            )
        tier = replace(profile.server_tier, decode_seconds=profile.server_tier.decode_seconds + encoding)
        watched.world.true = replace(profile, server_tier=tier)
        assert (watched.batches(20) == [None] * 20) is known


def test_half_the_bandwidth_is_told_after_two_batches() -> None:
    watched = Watched()
    watched.batches(5)
    watched.change(bits=0.5)
    first, second = watched.batches(2)
    assert first is None and second is not None
    assert second[0].link.bits_per_second == pytest.approx(50e6)
    assert second[1] == "bandwidth is 50.0 Mbit/s, the plan had 100.0 Mbit/s"
    assert watched.batches(20) == [None] * 20, "what was told once is the estimate from then on"


def test_it_recovers() -> None:
    watched = Watched()
    watched.batches(3)
    watched.change(bits=0.5)
    watched.batches(4)
    watched.change(bits=2.0)
    found = [f for f in watched.batches(4) if f is not None]
    assert len(found) == 1 and found[0][0].link.bits_per_second == pytest.approx(100e6)


@pytest.mark.parametrize("split", [0, 1, 3, 4])
@pytest.mark.parametrize("factor", [1.5, 3.0, 0.5])
@pytest.mark.parametrize("stage", ["server", "client"])
def test_a_tier_that_changed_is_told_once_and_agrees_then(stage: str, factor: float, split: int) -> None:
    """Also at split 0, where the server computes nothing and reading is all that it does."""
    watched = Watched()
    watched.batches(3, split)
    watched.change(**{stage: factor})
    found = [f for f in watched.batches(30, split) if f is not None]
    assert len(found) == 1
    assert f"{factor:.2g} times the plan's seconds" in found[0][1]
    assert found[0][1].startswith(f"the {stage}'s") or split == 4
    job_at = [estimate(p, JOB, split).stages for p in (found[0][0], watched.world.true)]
    assert getattr(job_at[0], stage) == pytest.approx(getattr(job_at[1], stage), rel=0.15)


def test_a_part_that_hardly_counts_is_not_compared() -> None:
    """One layer is left here, of microseconds, beside a step of milliseconds."""
    profile = truth()
    layers = tuple(replace(x, client_seconds=1e-6) for x in profile.layers)
    watched = Watched(replace(profile, layers=layers))
    watched.batches(3)
    watched.change(client=9.0)
    watched.world.true = replace(watched.world.true, step_seconds=profile.step_seconds)
    assert watched.batches(20) == [None] * 20


def test_the_weights_update_is_part_of_the_step() -> None:
    """A profile of ``hapi plan`` tells it apart, what a batch shows is both: 1 ms a sample and 40 ms a batch."""
    profile = truth(update_seconds=0.04)
    watched = Watched(profile)
    watched.world.true = replace(profile, step_seconds=0.001 + 0.04 / JOB.bs)
    assert watched.batches(20) == [None] * 20
    watched.world.true = replace(profile, step_seconds=3 * (0.001 + 0.04 / JOB.bs))
    (found,) = [f for f in watched.batches(20) if f is not None]
    assert found[0].step_seconds == pytest.approx(0.003) and found[0].update_seconds == pytest.approx(0.12)


def test_layers_that_did_not_change_are_left_alone() -> None:
    """Layers here are 8 times as slow and the step is not: at another split that leaves no layer here it holds."""
    watched = Watched()
    watched.batches(3, split=2)
    watched.change(client=8.0)
    watched.world.true = replace(watched.world.true, step_seconds=truth().step_seconds)
    assert [f is not None for f in watched.batches(4, split=2)] == [False, True, False, False]
    assert watched.batches(10, split=4) == [None] * 10


def test_layers_that_were_not_run_change_with_the_rest_of_their_tier() -> None:
    profile = truth(step_seconds=0.005)
    watched = Watched(profile)
    watched.batches(3, split=4)
    watched.change(client=3.0)
    (found,) = [f for f in watched.batches(4, split=4) if f is not None]
    assert found[0].layers[0].client_seconds == pytest.approx(3 * profile.layers[0].client_seconds)
    assert found[0].layers[0].server_seconds == profile.layers[0].server_seconds

    profile = truth(there=5e-5)
    watched = Watched(replace(profile, server_tier=replace(profile.server_tier, decode_seconds=1e-4)))
    watched.batches(3, split=0)
    watched.change(server=3.0)
    (found,) = [f for f in watched.batches(4, split=0) if f is not None]
    assert found[0].layers[0].server_seconds == pytest.approx(3 * profile.layers[0].server_seconds)
    assert found[0].server_tier.decode_seconds == pytest.approx(3e-4)


def test_of_a_small_part_nothing_follows_for_layers_that_were_not_run() -> None:
    """A server that only reads for a slow link takes three times as long for 0.1 ms: its layers take 16."""
    watched = Watched()
    watched.batches(3, split=0)
    watched.change(server=3.0)
    (found,) = [f for f in watched.batches(4, split=0) if f is not None]
    assert [x.server_seconds for x in found[0].layers] == [x.server_seconds for x in truth().layers]
    assert found[0].server_tier.decode_seconds == truth().server_tier.decode_seconds
    assert found[0].server_tier.overhead_seconds == pytest.approx(3 * truth().server_tier.overhead_seconds)

    watched = Watched(truth(here=0.004, step_seconds=0.001))
    watched.batches(3, split=4)
    watched.change(client=3.0)
    (found,) = [f for f in watched.batches(4, split=4) if f is not None]
    assert [x.client_seconds for x in found[0].layers] == [x.client_seconds for x in truth().layers]
    assert found[0].step_seconds == pytest.approx(0.003)


def test_another_tenant_is_told() -> None:
    watched = Watched()
    watched.batches(3)
    watched.world.share = 0.6
    found = [f for f in watched.batches(6) if f is not None]
    assert len(found) == 1 and found[0][0].server.share == pytest.approx(0.6)
    assert found[0][1] == "other jobs leave 60% of the server, in the plan 100%"
    watched.world.share = 1.0
    found = [f for f in watched.batches(6) if f is not None]
    assert len(found) == 1 and found[0][0].server.share == 1.0


def test_waiting_for_a_slot_is_a_smaller_share() -> None:
    """The queue's seconds are in no stage's, so that they count once: as the part of the server that is had."""
    watched = Watched()
    watched.batches(3)
    watched.world.slot_share = lambda split: 0.25
    assert not any(watched.batches(6)), "they wait for each other: nobody else is served"
    watched.world.share = 0.6
    found = [f for f in watched.batches(6) if f is not None]
    assert len(found) == 1 and found[0][0].server.share == pytest.approx(0.25)
    watched.world.share, watched.world.slot_share = 0.3, lambda split: 1.0
    assert not any(watched.batches(6)), "nothing waits, but others take most of it"
    watched.world.share = 1.0
    (after,) = [f for f in watched.batches(6) if f is not None]
    assert after[0].server.share == 1.0


def test_a_small_request_that_waits_tells_nothing() -> None:
    """One for stored samples waits until another tenant's long one is over, whatever its share."""
    watched = Watched()
    watched.batches(3, split=0)
    watched.world.share, watched.world.slot_share = 0.85, lambda split: 0.05
    assert not any(watched.batches(6, split=0))


def test_several_stages_at_once_are_told_together() -> None:
    watched = Watched()
    watched.batches(3)
    watched.change(bits=0.5, client=2.0)
    found = [f for f in watched.batches(4) if f is not None]
    assert len(found) == 1
    assert (
        found[0][1] == "bandwidth is 50.0 Mbit/s, the plan had 100.0 Mbit/s, "
        "the client's frozen layers: 2 times the plan's seconds, the training step: 2 times the plan's seconds"
    )


@settings(derandomize=True)
@given(st.integers(0, 1 << 32), st.integers(0, 4), st.sampled_from([0.08, 0.33]))
def test_noise_is_not_told(seed: int, split: int, noise: float) -> None:
    """One forward pass varies by 8%, two tiers that share two cores by a third.

    The same courses every time, as any noise looks like a change now and then: one of 38,000 courses of 60 batches did.
    """
    watched, random = Watched(), Random(seed)
    watched.world.noise = lambda: random.uniform(1 - noise, 1 + noise)
    assert watched.batches(60, split) == [None] * 60


@pytest.mark.parametrize(
    ("factor", "batches"),
    [
        (10.0, 2),
        (2.0, 2),
        (0.5, 2),
        (0.1, 2),
        (1.5, 6),
        (1 / 1.5, 6),
        (1.3, 24),
        (1.24, None),
        (1 / 1.24, None),
    ],
)
def test_a_smaller_change_takes_more_batches(factor: float, batches: int | None) -> None:
    drift = Drift()
    told = [drift.add(factor) for _ in range(200)]
    found = [i + 1 for i, change in enumerate(told) if change is not None]
    assert found[:1] == ([] if batches is None else [batches])
    if batches is not None:
        assert told[batches - 1] == pytest.approx(factor)


def test_several_batches_that_came_at_once_are_so_much_evidence() -> None:
    assert Drift().add(2.0, batches=2.0) == pytest.approx(2.0)
    assert Drift().add(2.0, batches=0.1) is None and Drift().add(1.6, batches=100.0) is None
    watched = Watched()
    watched.batches(2)
    watched.change(bits=0.5)
    arrivals = [rate for _ in range(2) for rate in watched.world.batch(3)]
    found = watched.watch.batch_done(3, arrivals)
    assert found is not None and found[1].startswith("bandwidth is 50.0 Mbit/s")


@given(st.lists(st.floats(0.01, 100.0), min_size=2, max_size=40))
def test_what_is_told_lies_among_what_was_seen(ratios: list[float]) -> None:
    drift = Drift()
    for i, ratio in enumerate(ratios):
        change = drift.add(ratio)
        if change is not None:
            assert i > 0 and min(ratios) * 0.999 <= change <= max(ratios) * 1.001
            break


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(3, 6), st.sampled_from([0.2, 4.0])), max_size=20))
def test_it_takes_two_batches_that_agree(lone: list[tuple[int, float]]) -> None:
    """Single slow or fast batches, with three or more as planned between them, are told nobody."""
    watched = Watched()
    for between, factor in lone:
        assert watched.batches(between) == [None] * between
        watched.change(client=factor)
        assert watched.batches(1) == [None]
        watched.change(client=1 / factor)


def test_a_first_batch_after_a_gap_is_no_evidence() -> None:
    """Between two passes nothing was measured; their first batch's sums hold what the gap did."""
    watched = Watched()
    watched.batches(3)
    watched.watch.restart()
    for _ in range(5):
        watched.world.batch(3)  # counted by the meter, and never told to the watch (validation, say)
    watched.change(client=5.0)
    assert watched.batches(1) == [None]
    assert watched.batches(1) == [None]
    assert watched.batches(1) != [None]


def test_a_change_of_split_is_no_evidence() -> None:
    watched = Watched()
    for split in (3, 1, 4, 0, 3, 2):
        assert watched.batches(2, split) == [None, None]


def test_short_arrivals_are_no_evidence() -> None:
    """A batch of a few kilobytes comes out of some buffer at once, ten times as fast as the link."""
    watched = Watched()
    for _ in range(10):
        watched.world.batch(4)
        assert watched.watch.batch_done(4, [(4_000, 4_000 * 8 / 1e9)]) is None


def test_a_link_that_is_faster_than_its_readers_shows_in_bounds() -> None:
    """What arrived before anyone looked has no rate, but it took no longer than since it was made."""
    watched = Watched()
    watched.batches(2)
    for _ in range(10):  # slower than the plan's link: says nothing
        watched.world.batch(3)
        assert watched.watch.batch_done(3, [], [(300_000, 0.1)]) is None
    watched.world.batch(3)
    assert watched.watch.batch_done(3, [], [(50_000, 1e-4)] * 9) is None, "out of some bucket, perhaps"
    fast = [(300_000, 0.006), (300_000, 0.1), (300_000, 0.012)]
    assert watched.watch.batch_done(3, [], fast) is None
    found = watched.watch.batch_done(3, [], fast)
    assert found is not None and found[0].link.bits_per_second == pytest.approx(400e6)


def test_no_arrivals_are_no_evidence() -> None:
    watched = Watched()
    for _ in range(5):
        watched.world.batch(4)
        assert watched.watch.batch_done(4, []) is None


def test_a_server_of_another_kind_is_not_compared() -> None:
    """Of two servers, one with a GPU, the last that answered counts: its seconds mean something else."""
    watched = Watched()
    watched.batches(3)
    watched.change(server=9.0)
    for _ in range(5):
        rates = watched.world.batch(3)
        watched.world.servers[3] = Tier(device="cuda")
        assert watched.watch.batch_done(3, rates) is None


def test_loading_layers_is_not_compared() -> None:
    """With --no-model-reuse every request loads the front; the plan counts that apart from all else."""
    watched = Watched()
    watched.batches(3)
    for _ in range(5):
        rates = watched.world.batch(3)
        loading = SplitCounts(traffic=TrafficCounts(server_cpu={"model": 10.0}))
        watched.world.counts[3] += loading
        watched.world.servers[3] = Tier(reuse=False)
        assert watched.watch.batch_done(3, rates) is None


def test_a_gpu_is_compared_by_its_forward_passes() -> None:
    profile = truth()
    watched = Watched(replace(profile, server_tier=replace(profile.server_tier, device="cuda")))
    watched.batches(3)
    watched.change(server=2.0)
    found = [f for f in watched.batches(8) if f is not None]
    assert len(found) == 1 and "server's forward passes: 2 times" in found[0][1]
    decode = found[0][0].server_tier.decode_seconds
    assert decode == profile.server_tier.decode_seconds  # that is the processor's
