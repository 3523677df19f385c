"""The price of a split: computed by hand, and properties that any profile must have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.any_profile import jobs, profiles, seconds
from support.profiler_tools import crafted, free_server, free_tier

from hapi.errors import DeviceMemoryError
from hapi.profiler.cost import estimate, largest_batch, memory, prefetch_depth
from hapi.profiler.profile import PROFILE_VERSION, Job, LinkProfile, Profile
from hapi.profiler.stages.pipeline import OVERLAP_NORM, Mix
from hapi.profiler.strategies import PLANNERS, plan

SLOW = LinkProfile(bits_per_second=8e6, variation=0.0, request_seconds=0.002)  # 1 MB/s


def test_both_forms_by_hand() -> None:
    profile = crafted(
        [1000, 500, 100],
        [0.001, 0.002, 0.0],
        [0.002, 0.004, 0.0],
        server=free_server(read_seconds=0.0005, concurrency=2, cos_batch=2),
        link=SLOW,
        step_seconds=0.001,
        update_seconds=0.005,
    )
    job = Job(bs=10, samples=25, request_size=4, in_flight=4)
    got = estimate(profile, job, 1)
    # Requests of 4, 4 and 2 samples, two at a time: waves of 8 and 2 samples, the largest request 4 and 2.
    assert got.stages.server_waves == pytest.approx(10 * 0.001 + (4 + 2) * 0.0005 + 2 * 0.002)
    assert got.stages.network == pytest.approx(10 * 1000 / 1e6)
    assert got.stages.client == pytest.approx(10 * (0.004 + 0.001) + 0.005)
    # 25 samples are two batches of 10 and one of 5 (requests of 4 and 1: one wave).
    rest = max(5 * 0.005 + 0.005, 5 * 0.001 + 4 * 0.0005 + 0.002 + 0.005)
    assert got.paper_epoch_seconds == pytest.approx(2 * max(0.055, 0.017 + 0.010) + rest)
    # Streamed: forward passes queue (10 ms); two requests at a time share 15 ms.
    assert got.stages.server == pytest.approx(10 * 0.001)
    # Frames of 2 samples: 2 + 2 + 1.
    assert got.stages.fill == pytest.approx(0.002 + 0.010 + 0.010 / 5)
    # The client needs five times as long as the others: it alone counts, but for what they are in its way.
    assert got.epoch_seconds == pytest.approx(got.stages.fill + 0.055 + 0.055 + (5 * 0.005 + 0.005), rel=1e-4)
    assert got.wire_bytes == 10_000 and got.epoch_wire_bytes == 25_000


def test_split_zero_sends_what_is_stored_and_decodes_here() -> None:
    profile = crafted(
        [1000, 100],
        [0.001, 0.0],
        server_tier=free_tier(decode_seconds=0.003),
        client_tier=free_tier(decode_seconds=0.007),
        link=SLOW,
    )
    job = Job(bs=10, samples=10, request_size=10)
    stored, tensor = estimate(profile, job, 0), estimate(profile, job, 0, "tensor")
    assert (
        stored.wire_bytes == 10_000
        and stored.stages.server == 0
        and stored.stages.fill == pytest.approx(0.002 + 0.01)
    )
    assert stored.stages.client == pytest.approx(10 * 0.007)  # on a GPU beside the layers
    on_cpu = replace(profile, client_tier=free_tier("cpu", decode_seconds=0.007))
    assert estimate(on_cpu, job, 0).stages.client == pytest.approx(10 * (0.007 + 0.001))
    assert tensor.wire_bytes == 60_000 and tensor.stages.server == pytest.approx(10 * 0.003)
    assert tensor.stages.client == pytest.approx(10 * 0.001)
    assert estimate(profile, job, 0, "uint8").wire_bytes == 15_000


def test_samples_at_hand_cost_neither_network_nor_server() -> None:
    profile = crafted(
        [1000, 100],
        [0.001, 0.0],
        server=free_server(read_seconds=0.003),
        server_tier=free_tier(overhead_seconds=0.002),
        client_tier=free_tier(decode_seconds=0.007),
        link=SLOW,
    )
    job = Job(bs=10, samples=20, request_size=2)
    without, half = estimate(profile, job, 0), estimate(profile, job, 0, mix=Mix(hits=0.5))
    assert half.stages.network == pytest.approx(without.stages.network / 2)
    assert half.epoch_wire_bytes == without.epoch_wire_bytes // 2
    assert half.stages.client == without.stages.client and half.memory == without.memory
    assert without.stages.server == pytest.approx(10 * 0.005)
    assert half.stages.server == pytest.approx(10 * 0.005 / 2)
    # Of the requests of two samples three quarters are made: the chance that either is not here.
    far = replace(profile, link=replace(SLOW, request_seconds=5.0))
    seconds = [estimate(far, job, 0, mix=Mix(hits=part)).epoch_seconds for part in (0.0, 0.5)]
    assert seconds[1] == pytest.approx(0.75 * seconds[0], rel=0.01)
    whole = estimate(profile, job, 0, mix=Mix(hits=1.0))
    assert (whole.stages.network, whole.stages.server, whole.epoch_wire_bytes) == (0, 0, 0)
    assert whole.epoch_seconds == pytest.approx(20 * 0.007)


@given(profiles(), jobs, st.floats(0, 1), st.floats(0, 1))
def test_more_at_hand_is_never_slower(profile: Profile, job: Job, one: float, other: float) -> None:
    less, more = (estimate(profile, job, 0, mix=Mix(hits=part)) for part in sorted((one, other)))
    assert more.epoch_seconds <= less.epoch_seconds * (1 + 1e-9)
    assert more.paper_epoch_seconds <= less.paper_epoch_seconds * (1 + 1e-9)


def test_a_cpu_server_shares_its_processors() -> None:
    parts = {"server": free_server(concurrency=4), "link": replace(SLOW, request_seconds=0.0)}
    job = Job(bs=8, samples=8, request_size=2)
    on_gpu = crafted([10, 10], [0.001, 0.0], server_tier=free_tier("cuda", decode_seconds=0.002), **parts)
    on_cpu = crafted([10, 10], [0.001, 0.0], server_tier=free_tier("cpu", decode_seconds=0.002), **parts)
    assert estimate(on_gpu, job, 1).stages.server == pytest.approx(8 * 0.002)  # decoding, on one core
    assert estimate(on_cpu, job, 1).stages.server == pytest.approx(8 * 0.003)
    cores = replace(on_gpu, server_tier=replace(on_gpu.server_tier, processors=4))
    assert estimate(cores, job, 1).stages.server == pytest.approx(8 * 0.001)
    shared = replace(on_cpu, server=replace(on_cpu.server, share=0.5))
    assert estimate(shared, job, 1).stages.server == pytest.approx(2 * 8 * 0.003)


def test_what_runs_together() -> None:
    tier = replace(free_tier("cpu"), processors=4, threads=2)
    assert tier.together(1.0, 0.0) == 1.0
    assert tier.together(1.0, 2.0) == 1.0  # two threads forward, two cores for the rest
    assert tier.together(1.0, 4.0) == pytest.approx(1.5)
    assert replace(tier, device="cuda").together(1.0, 8.0) == pytest.approx(2.0)


def test_waiting_and_loading_are_paid_for_each_request() -> None:
    waiting = crafted([10, 10], [0.001, 0.0], server=free_server(waiting_seconds=0.1, model_load_seconds=0.2))
    job = Job(bs=4, samples=4, request_size=2)
    got = estimate(waiting, job, 1).stages
    assert got.server_waves == pytest.approx(4 * 0.001 + 2 * 0.3)
    assert got.server == pytest.approx(4 * 0.001 + 2 * 0.2), "who waits takes nobody's time"
    assert got.fill == pytest.approx(0.1 + 0.2 + got.server)


def test_no_more_requests_are_on_their_way_than_may_be() -> None:
    """A batch of two requests, each 0.5 s on its way: four requests under way bring two batches in 0.51 s."""
    profile = crafted([10, 10], [0.001, 0.0], link=replace(SLOW, bits_per_second=1e15, request_seconds=0.5))
    job = Job(bs=4, samples=12, request_size=2, in_flight=4)
    batch = 4 * 0.001
    assert estimate(profile, job, 1).stages.server == pytest.approx(batch)
    one_by_one = 2 * 0.5 + batch
    assert estimate(profile, job, 1).epoch_seconds == pytest.approx(0.5 + batch + 2 * one_by_one / 4)
    all_three, more = (estimate(profile, replace(job, in_flight=n), 1).epoch_seconds for n in (6, 60))
    assert all_three == more == pytest.approx(0.5 + batch + 2 * one_by_one / 6), "there are no more"
    fewer = replace(job, in_flight=1)
    assert estimate(profile, fewer, 1).epoch_seconds == pytest.approx(0.5 + batch + 2 * one_by_one)


def test_stored_samples_need_no_model() -> None:
    loading = crafted([10, 10], [0.001, 0.0], server=free_server(model_load_seconds=0.2))
    job = Job(bs=4, samples=4, request_size=2)
    at_zero = estimate(loading, job, 0).stages
    assert (at_zero.server, at_zero.server_waves) == (0, 0)
    assert at_zero.fill == pytest.approx(at_zero.network)


def test_requests_to_several_servers_each_take_their_own_time() -> None:
    """All seconds are such that one server could do alone what they do together; a request is on one of them."""
    tier = replace(free_tier("cpu", decode_seconds=0.005), processors=16)
    two = crafted([10, 10], [0.0005, 0.0], server=free_server(concurrency=8, servers=2), server_tier=tier)
    job = Job(bs=8, samples=8, request_size=1, in_flight=8)
    assert estimate(two, job, 1).stages.server == pytest.approx(8 * 0.011 / 8)
    assert estimate(two, job, 1).stages.server_waves == pytest.approx(8 * 0.0005 + 0.010)


def test_several_devices_run_forward_passes_at_the_same_time() -> None:
    tier = replace(free_tier("cuda"), devices=2)
    both = crafted([10, 10], [0.001, 0.0], server=free_server(concurrency=4), server_tier=tier)
    assert estimate(both, Job(bs=8, samples=8, request_size=2), 1).stages.server == pytest.approx(8 * 0.0005)


def test_layers_up_to_the_last_split_run_here_without_training() -> None:
    profile = crafted([10, 10, 10], [0.001] * 3, freeze=1, last_split=2, step_seconds=0.005)
    job = Job(bs=10, samples=10)
    assert estimate(profile, job, 1).stages.client == pytest.approx(0.06)
    assert estimate(profile, job, 2).stages.client == pytest.approx(0.05)


def test_memory_by_hand() -> None:
    profile = crafted(
        [1000, 500, 100], [0.0] * 3
    )  # working twice, saved once the output; 100 B of weights each
    job = Job(bs=100, samples=400, micro_batch=8, prefetch_bytes=0)
    got = memory(profile, job, 1)
    assert got.parameters == 100 + 300  # one frozen layer; weights, gradients and momentum of the trained one
    assert got.batches == 2 * 100 * 1000
    # Features; then the trained layer's gradients and what it kept are more than a micro-batch of the frozen one.
    assert got.compute == 100 * 500 + max(8 * 1000, 100 * (100 + 100))
    assert got.peak == got.parameters + got.compute
    small = replace(profile, layers=tuple(replace(x, working_bytes=5000) for x in profile.layers))
    assert memory(small, job, 1).compute == 100 * 500 + 100 * (5000 - 500)
    on_cpu = replace(profile, client_tier=free_tier("cpu"))
    library = 48 << 20  # and the client's own objects
    assert memory(on_cpu, job, 1).peak == got.parameters + got.compute + got.batches + library
    # Features that arrive at the last split are trained with where they are.
    assert memory(on_cpu, job, 2).compute == 100 * (100 + 100) + library
    assert memory(profile, job, 2).compute == 100 * 500 + 100 * (100 + 100)


def test_weights_that_stay_count_at_later_splits() -> None:
    profile, job = crafted([1000, 500, 100], [0.0] * 3), Job(bs=100, samples=400, prefetch_bytes=0)
    assert [memory(profile, job, split).parameters for split in range(3)] == [500, 400, 300]
    for start, held in ((0, [500, 500, 500]), (1, [500, 400, 400]), (2, [500, 400, 300])):
        kept = replace(job, weights_from=start)
        assert [memory(profile, kept, split).parameters for split in range(3)] == held


def test_memory_of_a_step_through_several_layers() -> None:
    profile = replace(crafted([1000, 500, 100], [0.0] * 3), freeze=0, last_split=0)
    sized = [{"working_bytes": 2000, "saved_bytes": 300}, {"saved_bytes": 400}, {"saved_bytes": 50}]
    layers = tuple(
        replace(x, parameter_bytes=7, workspace_bytes=11, **more)
        for x, more in zip(profile.layers, sized, strict=True)
    )
    got = memory(replace(profile, layers=layers), Job(bs=10, samples=10, prefetch_bytes=0), 0)
    # The second layer's backward pass: two layers' saved, its result's and its input's gradients, no gradient of
    # the first one's weights yet.
    assert got.compute == 10 * 6000 + 10 * (300 + 400 + 500 + 1000) - 7 + 11


def test_prefetch_depth_follows_the_byte_budget() -> None:
    profile = crafted([1000, 500], [0.0] * 2)
    depths = [
        prefetch_depth(profile, Job(bs=100, samples=1000, prefetch_bytes=b), 1) for b in (0, 450_000, 10**9)
    ]
    assert depths == [1, 3, 9]


def test_on_a_cpu_prefetch_takes_only_what_the_memory_leaves() -> None:
    profile = replace(crafted([1000, 500], [0.0] * 2), client_tier=free_tier("cpu"))
    job = Job(bs=100, samples=1000, prefetch_bytes=10**9)
    free = memory(profile, job, 1)
    assert free.prefetch_depth == 9
    tight = memory(profile, replace(job, memory_bytes=free.peak - 1), 1)
    assert tight.prefetch_depth == 8 and tight.peak == free.peak - 100_000
    assert memory(profile, replace(job, memory_bytes=1), 1).prefetch_depth == 1


def test_largest_batch_is_the_last_that_fits() -> None:
    profile, job = crafted([1000, 500], [0.0] * 2), Job(bs=1000, samples=5000, memory_bytes=500_000)
    best = largest_batch(profile, job, 1)
    lean = replace(job, prefetch_bytes=0)
    assert 0 < best < 1000
    assert memory(profile, replace(lean, bs=best), 1).peak <= 500_000
    assert memory(profile, replace(lean, bs=best + 1), 1).peak > 500_000
    assert largest_batch(profile, replace(job, memory_bytes=10), 1) == 0


@given(profiles(), jobs, st.floats(1.0, 1e3))
def test_more_bandwidth_is_never_slower(profile: Profile, job: Job, factor: float) -> None:
    link = replace(profile.link, bits_per_second=profile.link.bits_per_second * factor)
    faster = replace(profile, link=link)
    for split in range(profile.last_split + 1):
        before, after = estimate(profile, job, split), estimate(faster, job, split)
        assert after.epoch_seconds <= before.epoch_seconds * (1 + 1e-9)
        assert after.paper_epoch_seconds <= before.paper_epoch_seconds * (1 + 1e-9)
        assert before.epoch_range[0] <= before.epoch_seconds * (1 + 1e-9)
        assert before.epoch_seconds <= before.epoch_range[1] * (1 + 1e-9)


@pytest.mark.parametrize(("server", "network", "client"), [(1, 1, 1), (1, 1, 0), (3, 1, 1), (2, 3, 1)])
def test_stages_that_are_alike_hold_each_other_up(server: int, network: int, client: int) -> None:
    """Ten thousand batches, so that neither the first nor the last one counts."""
    profile = crafted(
        [1000, 1000],
        [server * 0.001, 0.0],
        link=replace(SLOW, bits_per_second=8e6 / max(network, 1e-9), request_seconds=0.0),
        step_seconds=client * 0.001,
    )
    job = Job(bs=8, samples=80_000, request_size=8)
    most = max(server, network, client)
    factor = sum((stage / most) ** OVERLAP_NORM for stage in (server, network, client)) ** (1 / OVERLAP_NORM)
    assert 1 <= factor <= 3 ** (1 / OVERLAP_NORM) < 1.21
    assert estimate(profile, job, 1).epoch_seconds == pytest.approx(80 * most * factor, rel=1e-3)


@given(profiles(), jobs, st.floats(0.0, 10.0))
def test_a_longer_way_is_never_faster(profile: Profile, job: Job, seconds: float) -> None:
    link = replace(profile.link, request_seconds=profile.link.request_seconds + seconds)
    farther = replace(profile, link=link)
    for split in range(profile.last_split + 1):
        before, after = estimate(profile, job, split), estimate(farther, job, split)
        assert after.epoch_seconds >= before.epoch_seconds * (1 - 1e-9)
        assert after.paper_epoch_seconds >= before.paper_epoch_seconds * (1 - 1e-9)


@given(profiles(), jobs, st.floats(0.05, 1.0))
def test_a_crowded_server_is_never_faster(profile: Profile, job: Job, left: float) -> None:
    crowded = replace(profile, server=replace(profile.server, share=profile.server.share * left))
    for split in range(profile.last_split + 1):
        before, after = estimate(profile, job, split), estimate(crowded, job, split)
        assert after.epoch_seconds >= before.epoch_seconds * (1 - 1e-9)
        assert after.paper_epoch_seconds >= before.paper_epoch_seconds * (1 - 1e-9)


@given(profiles(), jobs, st.integers(0, 10**9))
def test_what_does_not_fit_is_never_chosen(profile: Profile, job: Job, budget: int) -> None:
    job = replace(job, memory_bytes=budget)
    fitting = [memory(profile, job, s).peak <= budget for s in range(profile.last_split + 1)]
    for strategy in ("auto", "hapi", "nsg"):
        if any(fitting[1:] if strategy == "nsg" else fitting):
            chosen = plan(strategy, profile, job).chosen
            assert chosen.fits and chosen.estimate.memory.peak <= budget
        else:
            with pytest.raises(DeviceMemoryError, match="no split fits"):
                plan(strategy, profile, job)


def scaled(profile: Profile, k: float) -> Profile:
    """Every time ``k`` times as long."""

    def tier(which: str) -> dict[str, float]:
        old = getattr(profile, which)
        return {
            n: v * k for n, v in vars(old).items() if n not in ("device", "processors", "threads", "devices")
        }

    return replace(
        profile,
        layers=tuple(
            replace(x, server_seconds=x.server_seconds * k, client_seconds=x.client_seconds * k)
            for x in profile.layers
        ),
        server=replace(
            profile.server,
            read_seconds=profile.server.read_seconds * k,
            waiting_seconds=profile.server.waiting_seconds * k,
            model_load_seconds=profile.server.model_load_seconds * k,
        ),
        server_tier=replace(profile.server_tier, **tier("server_tier")),
        client_tier=replace(profile.client_tier, **tier("client_tier")),
        link=replace(
            profile.link,
            bits_per_second=profile.link.bits_per_second / k,
            request_seconds=profile.link.request_seconds * k,
        ),
        step_seconds=profile.step_seconds * k,
        update_seconds=profile.update_seconds * k,
    )


@given(profiles(), jobs, st.floats(0.1, 100))
def test_scaling_all_times_scales_the_estimate(profile: Profile, job: Job, k: float) -> None:
    slower = scaled(profile, k)
    for split in range(profile.last_split + 1):
        before, after = estimate(profile, job, split), estimate(slower, job, split)
        assert after.epoch_seconds == pytest.approx(before.epoch_seconds * k, rel=1e-6)
        assert after.paper_epoch_seconds == pytest.approx(before.paper_epoch_seconds * k, rel=1e-6)


@given(st.lists(seconds, min_size=3, max_size=9), seconds, st.integers(2, 50))
def test_equal_speeds_and_a_free_network_give_the_balance_point(
    times: list[float], step: float, batches: int
) -> None:
    profile = crafted(
        [1] * len(times),
        times,
        step_seconds=step,
        link=LinkProfile(bits_per_second=1e17, variation=0.0, request_seconds=0.0),
    )
    job = Job(bs=16, samples=16 * batches)
    frozen = times[: profile.freeze]
    slowest = [max(sum(frozen[:s]), sum(frozen[s:]) + step) for s in range(len(frozen) + 1)]
    for strategy in ("auto", "hapi"):
        assert slowest[plan(strategy, profile, job).split] == pytest.approx(min(slowest), rel=1e-6)


@given(profiles(), jobs)
def test_every_strategy_stays_in_its_range(profile: Profile, job: Job) -> None:
    estimates = {s: estimate(profile, job, s).epoch_seconds for s in range(profile.last_split + 1)}
    for strategy in PLANNERS:
        split = plan(strategy, profile, job).split
        assert split in estimates
        assert estimates[plan("auto", profile, job).split] <= estimates[split] * (1 + 1e-6)


def test_tiers_on_one_machine_share_its_cores() -> None:
    """Two processors, one core: what two machines do at the same time adds up."""
    costs = {"processors": 2, "decode_seconds": 0.002}
    profile = crafted(
        [10, 10],
        [0.004, 0.0],
        server=free_server(concurrency=4),
        server_tier=free_tier("cpu", **costs),
        client_tier=free_tier("cpu", **costs),
        link=replace(SLOW, bits_per_second=1e12, request_seconds=0.0),
        step_seconds=0.004,
    )
    job = Job(bs=10, samples=1000, request_size=10)
    apart, shared = estimate(profile, job, 1), estimate(replace(profile, one_machine=True), job, 1)
    assert apart.epoch_seconds < 0.7 * shared.epoch_seconds
    assert shared.epoch_seconds == pytest.approx(1000 * (0.004 + 0.004 + 0.002), rel=0.03)


def test_a_recorded_run_on_one_machine_takes_as_long_as_estimated() -> None:
    """Its server was embedded; as if on two machines the estimate was 2.11 s for epochs of 3.66 s."""
    report = json.loads((Path(__file__).parents[1] / "support/run.json").read_text())
    document = {**report["plan"]["profile"], "version": PROFILE_VERSION}
    document["layers"] = [{"workspace_bytes": 0, **layer} for layer in document["layers"]]
    for tier in ("server_tier", "client_tier"):
        document[tier] = {"devices": 1, **document[tier]}
    document["server"] = {"servers": 1, **document["server"]}
    profile = replace(Profile.from_json(document), one_machine=True)
    found = estimate(profile, Job(**report["plan"]["job"]), report["split"]).epoch_seconds
    measured = [epoch["seconds"] for epoch in report["epochs"][1:]]
    assert found == pytest.approx(sum(measured) / len(measured), rel=0.2)
