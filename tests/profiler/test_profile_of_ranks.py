"""A plan for 1, 2 and 4 ranks by a profile that was measured alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.any_profile import profiles
from support.planning_tools import JOB, World, sizes_in, truth
from support.profiler_tools import free_tier

from hapi.client.planning.controller import SplitController
from hapi.errors import ConfigError
from hapi.profiler.cost import estimate
from hapi.profiler.profile import Job, Profile
from hapi.profiler.ranks import as_shared
from hapi.profiler.stages.pipeline import Pipeline
from hapi.profiler.strategies import plan


@given(profiles(), st.integers(1, 8), st.integers(1, 8))
def test_the_link_takes_as_long_for_all_parts_as_for_the_whole(
    profile: Profile, ranks: int, part: int
) -> None:
    whole, own = Job(bs=part * ranks, samples=10 * part * ranks), Job(bs=part, samples=10 * part)
    shared = as_shared(profile, ranks, 1)
    for split in range(profile.last_split + 1):
        alone, each = estimate(profile, whole, split), estimate(shared, own, split)
        assert each.stages.network == pytest.approx(alone.stages.network)
    assert shared.client_tier == profile.client_tier, "each on a machine of its own"


@given(profiles(), st.integers(1, 8), st.integers(1, 8))
def test_what_so_many_ranks_measured_is_theirs(profile: Profile, ranks: int, other: int) -> None:
    measured = replace(profile, ranks=ranks, local_ranks=ranks)
    assert as_shared(measured, ranks, ranks) == measured
    on_more = as_shared(as_shared(profile, ranks, 1), other, 1)
    assert on_more.link.bits_per_second == pytest.approx(profile.link.bits_per_second / other)
    assert Profile.from_json(on_more.to_json()) == on_more


def test_ranks_of_a_machine_share_its_processors() -> None:
    profile = truth(client_tier=free_tier("cpu", processors=8, threads=8))
    shared = as_shared(profile, 4, 4)
    assert (shared.client_tier.processors, shared.client_tier.threads) == (2, 2)
    assert shared.layers[0].client_seconds == pytest.approx(4 * profile.layers[0].client_seconds)
    assert shared.step_seconds == pytest.approx(4 * profile.step_seconds)
    on_gpus = as_shared(replace(profile, client_tier=free_tier("cuda", processors=8)), 4, 4)
    assert on_gpus.step_seconds == profile.step_seconds and on_gpus.client_tier.processors == 2


def test_one_machine_does_the_work_of_all_its_ranks() -> None:
    tiers = {"server_tier": free_tier("cpu", processors=8, threads=1),
             "client_tier": free_tier("cpu", processors=8, threads=1)}  # fmt: skip
    profile = truth(one_machine=True, **tiers)
    whole = Pipeline(profile, Job(bs=64, samples=640), 2, "stored", depth=1)
    own = Pipeline(as_shared(profile, 4, 4), Job(bs=16, samples=160), 2, "stored", depth=1)
    assert own.shared(16) == pytest.approx(whole.shared(64)) and own.shared(16) > 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_given_profile_is_divided_by_the_ranks(ranks: int) -> None:
    """A link that is fast enough for one is the bottleneck of four, which send less by a later split."""
    profile = truth(bits=2e9, client_tier=free_tier("cuda", processors=8), there=0.002, here=0.0001)
    sizes = replace(sizes_in(profile), ranks=ranks, local_ranks=1)
    job = replace(JOB, bs=8, samples=80)
    world = World(profile)
    planning = SplitController("auto", sizes, job, world, profile=profile)  # type: ignore[arg-type]
    assert planning.profile is not None and planning.profile.ranks == ranks
    assert planning.profile.link.bits_per_second == pytest.approx(2e9 / ranks)
    expected = plan("auto", as_shared(profile, ranks, 1), planning.job)
    assert planning.split == expected.split
    resumed = SplitController("auto", replace(sizes, ranks=1), job, world)  # type: ignore[arg-type]
    resumed.restore(planning.state(), 1, 0)
    assert resumed.profile is not None
    assert resumed.profile.link.bits_per_second == pytest.approx(2e9), "one process goes on alone"


def test_a_profile_of_impossible_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="local_ranks must be at least 1 and at most ranks"):
        replace(truth(), ranks=1, local_ranks=2)
