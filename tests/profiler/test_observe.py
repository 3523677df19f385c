"""From what requests and batches cost to a profile: known costs come out, gaps are filled, nothing divides by zero."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.profiler_tools import crafted, free_server, free_tier

from hapi.profiler.cost import estimate
from hapi.profiler.fit import Observed, Sizes, Tier, link_rate, profile_of
from hapi.profiler.profile import Job, LinkProfile, Profile, SampleProfile

KIB = 1024

# -- the link ------------------------------------------------------------------------------------------------------


def test_the_link_has_the_rate_of_its_fastest_quarter() -> None:
    """By bytes: three quarters of them arrived at 8 Mbit/s or less, the rest faster."""
    rates = [(1_000_000, 1.0)] * 3 + [(1_000_000, 0.5)] + [(10_000, 1e-6)]  # the last one too short to count
    found = link_rate(rates)
    assert found is not None and found[0] == 8e6
    slow = link_rate([(1_000_000, 1.0)] * 2 + [(1_000_000, 0.5)] * 2)
    assert slow is not None and slow[0] == 16e6


def test_the_links_variation_is_weighed_by_bytes() -> None:
    found = link_rate([(1_000_000, 1.0), (1_000_000, 0.5)])  # 8 and 16 Mbit/s
    assert found == (16e6, pytest.approx(4 / 12))
    alike = link_rate([(500_000, 0.5)] * 7)
    assert alike == (8e6, 0.0)


@pytest.mark.parametrize("rates", [[], [(0, 1.0)], [(100, 0.0)], [(-5, 1.0), (7, -1.0)]])
def test_no_arrivals_no_rate(rates: list[tuple[int, float]]) -> None:
    assert link_rate(rates) is None


def test_short_stretches_count_only_for_want_of_others() -> None:
    short = [(10_000, 1e-5)]  # 8 Gbit/s out of some buffer
    assert link_rate(short) == pytest.approx((8e9, 0.0))
    assert link_rate(short, sound=True) is None
    assert link_rate([*short, (128 * KIB, 1.0)]) == pytest.approx((128 * KIB * 8, 0.0))  # enough bytes
    assert link_rate([*short, (100, 0.08)], sound=True) == pytest.approx((10_000, 0.0))  # enough seconds


@given(
    st.lists(
        st.tuples(st.integers(-10, 1 << 40), st.sampled_from([-1.0, 0.0, 1e-9, 0.01, 0.1, 1e6])), max_size=30
    )
)
def test_any_arrivals_give_a_usable_link(rates: list[tuple[int, float]]) -> None:
    found = link_rate(rates)
    if found is not None:
        assert 0 < found[0] < math.inf and 0 <= found[1] < 1


# -- what was never seen -------------------------------------------------------------------------------------------

LAYERS = 5


def sizes(last_split: int = LAYERS - 1, encoded: bool = True, client: Tier | None = None) -> Sizes:
    """Five layers whose operations are as their numbers, the last one trained."""
    made = crafted([5000, 4000, 3000, 2000, 1000], [0.0] * LAYERS)
    layers = tuple(replace(layer, flops=float(i)) for i, layer in enumerate(made.layers, start=1))
    samples = replace(made.samples, encoded=encoded)
    return Sizes(
        model="crafted", freeze=last_split, last_split=last_split, layers=layers, samples=samples,
        client=client or Tier(),
    )  # fmt: skip


def observed(split: int, **changes: Any) -> Observed:
    """Ten samples in one request that cost nothing, unless ``changes`` says so."""
    fields: dict[str, Any] = {
        "batches": 1, "samples": 10, "bytes_received": 10, "requests": 1, "suffix_seconds": 0.0, "step_seconds": 0.0,
        "server_cpu": {}, "server_wall": {},
    }  # fmt: skip
    return Observed(split=split, **(fields | changes))


def seconds(profile: Profile) -> tuple[list[float], list[float]]:
    return [x.server_seconds for x in profile.layers], [x.client_seconds for x in profile.layers]


def test_nothing_observed_knows_bytes_and_memory() -> None:
    profile = profile_of(sizes(), {}, (1e9, 0.1))
    assert seconds(profile) == ([0.0] * LAYERS, [0.0] * LAYERS)
    priced = estimate(profile, Job(bs=10, samples=20), 2)
    assert priced.wire_bytes == 40_000 and priced.memory.peak > 0
    assert 0 < priced.epoch_seconds < 1e-2  # the link alone


def test_layers_timed_on_both_sides_are_taken_as_they_are() -> None:
    there = observed(4, server_layers=(1.0, 2.0, 3.0, 4.0), server_timed=10, server_cpu={"forward": 10.0})
    here = observed(0, client_layers=(2.0, 4.0, 6.0, 8.0), client_timed=10, suffix_seconds=20.0)
    server, client = seconds(profile_of(sizes(), {0: here, 4: there}, (1e9, 0.0)))
    assert server[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert client[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_a_layer_that_one_tier_never_ran_is_scaled_from_the_other() -> None:
    """Layers 3 and 4 ran on both sides, where the client is twice as slow; 1 and 2 ran on the server alone."""
    there = observed(4, server_layers=(1.0, 2.0, 3.0, 4.0), server_timed=10, server_cpu={"forward": 10.0})
    here = observed(2, client_layers=(6.0, 8.0), client_timed=10, suffix_seconds=14.0)
    server, client = seconds(profile_of(sizes(), {2: here, 4: there}, (1e9, 0.0)))
    assert client[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert server[4] == pytest.approx(0.1 * 5)  # which neither ran: by its operations, 0.1 s each
    assert client[4] == pytest.approx(0.2 * 5)


def test_only_the_freeze_observed_gives_the_client_the_servers_seconds() -> None:
    only = observed(4, server_layers=(1.0, 2.0, 3.0, 4.0), server_timed=10, server_cpu={"forward": 10.0})
    server, client = seconds(profile_of(sizes(), {4: only}, (1e9, 0.0)))
    assert server == client


def test_timed_layers_are_scaled_to_what_they_take_together() -> None:
    """Timed one by one they took 10 s, in one piece 5 s: half of each."""
    there = observed(4, server_layers=(1.0, 2.0, 3.0, 4.0), server_timed=10, server_cpu={"forward": 5.0})
    here = observed(
        0, samples=20, client_layers=(2.0, 4.0, 6.0, 8.0), client_timed=10, suffix_seconds=10.0
    )  # a quarter: 20 samples took 10 s, 10 of them one by one 20 s
    server, client = seconds(profile_of(sizes(), {0: here, 4: there}, (1e9, 0.0)))
    assert server[:4] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert client[:4] == pytest.approx([0.05, 0.1, 0.15, 0.2])


def test_of_several_splits_each_tiers_most_complete_counts() -> None:
    parts = {
        4: observed(4, server_layers=(1.0, 2.0, 3.0, 4.0), server_timed=10, server_cpu={"forward": 10.0}),
        2: observed(
            2, server_layers=(9.0, 9.0), server_timed=10, server_cpu={"forward": 18.0},
            client_layers=(7.0, 7.0), client_timed=10, suffix_seconds=14.0,
        ),
        0: observed(0, client_layers=(2.0, 4.0, 6.0, 8.0), client_timed=10, suffix_seconds=20.0),
    }  # fmt: skip
    server, client = seconds(profile_of(sizes(), parts, (1e9, 0.0)))
    assert server[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert client[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_a_gpu_and_a_server_with_threads_are_timed_by_the_wall() -> None:
    for tier in (Tier(device="cuda"), Tier(threads=2, processors=4)):
        there = observed(
            4, server=tier, server_layers=(1.0,) * 4, server_timed=10, server_cpu={"forward": 99.0},
            server_wall={"forward": 8.0},
        )  # fmt: skip
        server, _ = seconds(profile_of(sizes(), {4: there}, (1e9, 0.0)))
        assert server[:4] == pytest.approx([0.2] * 4)


def test_a_server_that_sends_more_layers_than_there_are_breaks_nothing() -> None:
    there = observed(4, server_layers=(1.0,) * 50, server_timed=10, server_cpu={"forward": 50.0})
    assert seconds(profile_of(sizes(), {4: there}, (1e9, 0.0)))[0] == pytest.approx([0.1] * 5)


def test_what_is_beside_the_layers() -> None:
    there = observed(
        4,
        bytes_received=10 * 2100,
        requests=4,
        request_seconds=0.03,
        step_seconds=1.0,
        receive_seconds=2.1,
        client_other_seconds=0.5,
        server_cpu={"decode": 0.6, "send": 2.1, "read": 0.2},
        server_wall={"read": 0.7, "queue": 0.4, "model": 2.0},
        server_factor=2.0,
        cos_batch=16,
        share=0.75,
        server=Tier(processors=4, threads=8, running=3, reuse=False),
    )
    here = observed(0, bytes_received=10 * 1100, requests=2, request_seconds=0.02, step_seconds=1.0)
    here = replace(here, decode_seconds=0.3)
    cached = observed(2, requests=0)  # nobody was asked
    profile = profile_of(sizes(), {0: here, 4: there}, (1e9, 0.25), ("a note",))
    assert profile_of(sizes(), {2: cached, 4: there}, (1e9, 0.25)).link.request_seconds == 0.03
    assert profile.link.request_seconds == 0.02
    server, client = profile.server_tier, profile.client_tier
    assert server.decode_seconds == pytest.approx(0.6 * 2 / 10)
    assert server.codec_seconds_per_byte == pytest.approx(2.1 * 2 / 32_000)
    assert server.overhead_seconds == pytest.approx(0.2 * 2 / 20)
    assert (server.processors, server.threads) == (4, 4)  # no more threads than processors
    assert client.decode_seconds == pytest.approx(0.03)
    assert client.codec_seconds_per_byte == pytest.approx(2.1 / 32_000)
    assert client.overhead_seconds == pytest.approx(0.5 / 20)
    assert profile.server.read_seconds == pytest.approx(0.5 / 20)
    assert (profile.server.concurrency, profile.server.cos_batch, profile.server.share) == (3, 16, 0.75)
    assert profile.server.model_load_seconds == pytest.approx(0.5)
    assert profile.server.waiting_seconds == 0  # at the earliest split nothing queued
    assert profile.step_seconds == pytest.approx(0.1)
    assert profile.link.sample_bytes == pytest.approx(100)
    assert (profile.link.bits_per_second, profile.link.variation) == (1e9, 0.25)
    assert Profile.from_json(profile.to_json()) == profile


def test_samples_out_of_the_cache_are_the_clients_alone() -> None:
    """What the servers and the link cost is shared by the samples that crossed, what this side costs by all."""
    whole = observed(
        0, bytes_received=10 * 1100, step_seconds=1.0, decode_seconds=0.3, suffix_seconds=0.5,
        server_cpu={"send": 0.1, "read": 0.2}, server_wall={"read": 0.7},
    )  # fmt: skip
    half = replace(
        whole, samples=20, cached=10, step_seconds=2.0, decode_seconds=0.6, suffix_seconds=1.0,
    )  # fmt: skip
    assert profile_of(sizes(), {0: half}, (1e9, 0.0)) == profile_of(sizes(), {0: whole}, (1e9, 0.0))
    there = observed(4, bytes_received=10 * 2100, server_cpu={"read": 0.2}, server_wall={"read": 0.7})
    nothing = observed(0, samples=10, cached=10, bytes_received=0, decode_seconds=0.3)
    profile = profile_of(sizes(), {0: nothing, 4: there}, (1e9, 0.0))
    assert profile.server.read_seconds == pytest.approx(0.05)
    assert profile.client_tier.decode_seconds == pytest.approx(0.03)


def test_several_servers_work_on_more_requests_at_a_time() -> None:
    profile = profile_of(sizes(), {4: observed(4, server=Tier(running=4, count=3))}, (1e9, 0.0))
    assert profile.server.concurrency == 12


def test_decoding_that_was_never_done_here_is_as_on_the_server() -> None:
    there = observed(4, server_cpu={"decode": 0.6}, server_factor=2.0)
    profile = profile_of(sizes(), {4: there}, (1e9, 0.0))
    assert profile.client_tier.decode_seconds == pytest.approx(0.06)
    stored = profile_of(sizes(encoded=False), {4: there}, (1e9, 0.0))
    assert stored.client_tier.decode_seconds == pytest.approx(0.06), "also making stored tensors into batches"


def test_sums_below_zero_cost_nothing() -> None:
    """Clocks that were read at different moments may differ the wrong way."""
    there = observed(
        4, client_other_seconds=-3.0, server_wall={"read": 0.1}, server_cpu={"read": 0.2}, step_seconds=-1.0
    )
    profile = profile_of(sizes(), {4: there}, (1e9, 0.0))
    assert profile.client_tier.overhead_seconds == profile.server.read_seconds == profile.step_seconds == 0


# -- the round trip ------------------------------------------------------------------------------------------------

some_seconds = st.floats(1e-6, 1e-2)
device = st.sampled_from(["cpu", "cuda"])


@st.composite
def true_profiles(draw: st.DrawFn) -> Profile:
    """Any profile of what observations can tell: no copies to devices apart, no cost of an update."""
    count = draw(st.integers(2, 7))
    outputs = draw(st.lists(st.integers(100, 100_000), min_size=count, max_size=count))
    there = draw(st.lists(some_seconds, min_size=count, max_size=count))
    here = draw(st.lists(some_seconds, min_size=count, max_size=count))
    last = draw(st.integers(1, count - 1))
    encoded, processors = draw(st.booleans()), draw(st.integers(1, 8))
    tier = {"codec_seconds_per_byte": draw(st.floats(0, 1e-7)), "overhead_seconds": draw(some_seconds)}
    decode = draw(some_seconds) if encoded else 0.0
    return crafted(
        outputs,
        there,
        here,
        freeze=draw(st.integers(1, last)),
        last_split=last,
        samples=SampleProfile(stored_bytes=1000, encoded=encoded, uint8_bytes=1500, tensor_bytes=6000),
        server=free_server(
            read_seconds=draw(some_seconds),
            model_load_seconds=draw(st.sampled_from([0.0, 0.25])),
            concurrency=draw(st.integers(1, 8)),
            waiting_seconds=draw(some_seconds),
            share=draw(st.sampled_from([1.0, 0.6])),
        ),
        server_tier=free_tier(draw(device), processors=processors, decode_seconds=decode, **tier),
        client_tier=free_tier(draw(device), processors=2, decode_seconds=decode, **tier),
        link=LinkProfile(
            bits_per_second=draw(st.floats(1e6, 1e10)),
            variation=draw(st.floats(0, 0.9)),
            request_seconds=0.0,
            sample_bytes=float(draw(st.integers(0, 200))),
        ),
        step_seconds=draw(some_seconds),
    )


def costs_of(true: Profile, split: int, samples: int, beside: float) -> Observed:
    """What ``samples`` at ``split`` would show if ``true`` were the truth, timed layers 30% dearer than untimed."""
    server, client, requests = true.server_tier, true.client_tier, 5
    nbytes = samples * (true.sent_bytes(split) + int(true.link.sample_bytes))
    there = [x.server_seconds for x in true.layers[:split]]
    here = [x.client_seconds for x in true.layers[split : true.last_split]]
    factor = beside if server.device == "cpu" else 1.0
    cpu = {
        "decode": samples * server.decode_seconds if split else 0.0,
        "send": nbytes * server.codec_seconds_per_byte,
        "read": samples * server.overhead_seconds,
        "forward": samples * sum(there),
    }
    cpu = {stage: value / factor for stage, value in cpu.items()}
    return Observed(
        split=split,
        batches=3,
        samples=samples,
        bytes_received=nbytes,
        requests=requests,
        suffix_seconds=samples * sum(here),
        step_seconds=samples * true.step_seconds,
        client_layers=tuple(1.3 * 8 * s for s in here),
        client_timed=8,
        receive_seconds=nbytes * client.codec_seconds_per_byte,
        decode_seconds=0.0 if split else samples * client.decode_seconds,
        client_other_seconds=samples * client.overhead_seconds,
        server_cpu=cpu,
        server_wall={
            "read": cpu["read"] + samples * true.server.read_seconds,
            "forward": samples * sum(there),
            "queue": requests * true.server.waiting_seconds,
            "model": requests * true.server.model_load_seconds,
        },
        server_layers=tuple(1.3 * 8 * s for s in there),
        server_timed=8,
        server_factor=factor,
        share=true.server.share,
        cos_batch=true.server.cos_batch,
        server=Tier(
            device=server.device,
            processors=server.processors,
            running=true.server.concurrency,
            reuse=not true.server.model_load_seconds,
        ),
    )


def profiled(true: Profile, splits: tuple[int, ...], beside: float) -> Profile:
    known = Sizes(
        model=true.model,
        freeze=true.freeze,
        last_split=true.last_split,
        layers=tuple(replace(x, server_seconds=0.0, client_seconds=0.0) for x in true.layers),
        samples=true.samples,
        client=Tier(device=true.client_tier.device, processors=true.client_tier.processors),
    )
    seen = {s: costs_of(true, s, samples, beside) for s, samples in zip(splits, (40, 56), strict=False)}
    return profile_of(known, seen, (true.link.bits_per_second, true.link.variation))


def check_same_estimates(found: Profile, true: Profile, splits: range) -> None:
    job = Job(bs=32, samples=100, request_size=10, in_flight=3)
    for split in splits:
        mine, theirs = estimate(found, job, split), estimate(true, job, split)
        assert (mine.wire_bytes, mine.memory) == (theirs.wire_bytes, theirs.memory)
        assert vars(mine.stages) == pytest.approx(vars(theirs.stages), rel=1e-6), split
        assert mine.epoch_seconds == pytest.approx(theirs.epoch_seconds, rel=1e-6)
        assert mine.paper_epoch_seconds == pytest.approx(theirs.paper_epoch_seconds, rel=1e-6)
        assert mine.epoch_range == pytest.approx(theirs.epoch_range, rel=1e-6)


@given(true_profiles(), st.floats(1, 3), st.data())
def test_a_profile_of_its_own_observations_gives_its_estimates_back(
    true: Profile, beside: float, data: st.DataObject
) -> None:
    """Observed at the freeze and at the earliest split, all splits between come out: both tiers ran their layers."""
    earliest = data.draw(st.integers(0, true.freeze))
    found = profiled(true, (true.freeze, earliest), beside)
    check_same_estimates(found, true, range(earliest, true.freeze + 1))


@given(true_profiles(), st.floats(0.1, 10))
def test_with_one_speed_ratio_all_splits_come_out(true: Profile, ratio: float) -> None:
    """Past the freeze no server ran a layer: taken from the client, by the ratio of the others."""
    layers = tuple(replace(x, client_seconds=x.server_seconds * ratio) for x in true.layers)
    true = replace(true, layers=layers)
    found = profiled(true, (true.freeze, 0), 1.0)
    check_same_estimates(found, true, range(true.last_split + 1))
