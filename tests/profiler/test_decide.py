"""Strategies on crafted profiles, where each has a reason of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.profiler_tools import crafted, free_tier

from hapi.errors import UsageError
from hapi.profiler.profile import Job, LinkProfile
from hapi.profiler.strategies import PLANNERS, STRATEGIES, choices, choose_split, plan

# Stored 1 kB, tensor 6 kB; 1 MB/s. Layer 3 has the smallest output, layer 4 is the freeze, 5 may be pushed too.
PROFILE = crafted(
    [8000, 3000, 100, 100, 50, 10],
    [0.0001, 0.0001, 0.004, 0.001, 0.0, 0.0],
    freeze=4,
    last_split=5,
    step_seconds=0.001,
    link=LinkProfile(bits_per_second=8e6, variation=0.1, request_seconds=0.0),
)
JOB = Job(bs=100, samples=1000, request_size=10)


def test_every_strategy_has_its_own_reason() -> None:
    chosen = {name: plan(name, PROFILE, JOB).split for name in PLANNERS}
    assert chosen["none"] == 0 and chosen["freeze"] == 4 and chosen["min"] == 3
    # Per sample: server 4.2 ms, network 0.1 ms, client 2 ms at split 3; at split 0 1 ms and 6.2 ms.
    assert chosen["auto"] == 3
    # Sums: 9.3 ms at split 2, 6.3 ms at 3 and at 4; the earlier of two that are equal.
    assert chosen["nsg"] == 3
    assert chosen["hapi"] == 3
    # 3000 B x 100 cross in 0.3 s; 8000 is larger than the input.
    assert chosen["bandwidth"] == 2


def test_choices_are_what_each_would_plan() -> None:
    assert choices(PROFILE, JOB) == {name: plan(name, PROFILE, JOB).split for name in PLANNERS}
    nothing = choices(PROFILE, replace(JOB, memory_bytes=1))
    assert [name for name, split in nothing.items() if split is None] == ["auto", "hapi", "nsg"]
    assert nothing["freeze"] == 4


def test_streaming_chooses_a_split_that_the_papers_form_cannot_see() -> None:
    # Split 1: server 4, network 4, client 5 ms: streamed 5, but 8 for whole answers. Split 2: 7, 0 and 1 ms.
    profile = crafted(
        [4000, 10, 10],
        [0.004, 0.003, 0.0],
        [0.004, 0.004, 0.0],
        step_seconds=0.001,
        link=LinkProfile(bits_per_second=8e6, variation=0.0, request_seconds=0.0),
    )
    job = Job(bs=100, samples=10_000)
    without_none = replace(profile, samples=replace(profile.samples, stored_bytes=100_000))
    assert plan("auto", without_none, job).split == 1
    assert plan("hapi", without_none, job).split == 2


def test_ties_go_to_the_earlier_split() -> None:
    flat = crafted([10, 10, 10, 10], [0.0] * 4, step_seconds=0.01)
    flat = replace(flat, samples=replace(flat.samples, stored_bytes=10))
    assert plan("auto", flat, JOB).split == 0
    assert plan("auto", flat, JOB).candidates[1].rejected == "as fast, but asks more of the server"
    assert plan("nsg", flat, JOB).split == 1


def test_only_auto_goes_past_the_freeze() -> None:
    profile = crafted([5000, 5000, 50, 10], [0.0] * 4, freeze=2, last_split=3)
    dear = replace(profile, samples=replace(profile.samples, stored_bytes=9000))
    assert plan("auto", dear, JOB).split == 3
    for name in ("hapi", "nsg"):
        found = plan(name, dear, JOB)
        assert found.split <= 2 and found.candidates[3].rejected == "after the freeze"


def test_every_candidate_but_the_chosen_says_why_not() -> None:
    for name in PLANNERS:
        found = plan(name, PROFILE, JOB)
        assert found.chosen.rejected == ""
        assert all(c.rejected for c in found.candidates if c.estimate.split != found.split)
        assert [c.estimate.split for c in found.candidates] == [0, 1, 2, 3, 4, 5]
    assert plan("bandwidth", PROFILE, JOB).candidates[1].rejected == "not smaller than the input"
    assert plan("nsg", PROFILE, JOB).candidates[0].rejected == "never considered"


def test_the_bandwidth_rule_moves_towards_the_freeze() -> None:
    splits = []
    for bits in (8e9, 8e6, 8e4, 8e2):
        link = replace(PROFILE.link, bits_per_second=bits)
        splits.append(plan("bandwidth", replace(PROFILE, link=link), JOB).split)
    assert splits == [2, 2, 4, 4]


def test_a_static_split_is_taken_and_marked_when_it_does_not_fit() -> None:
    tight = replace(JOB, memory_bytes=1000)
    found = plan("none", replace(PROFILE, client_tier=free_tier("cpu")), tight)
    assert found.split == 0 and not found.chosen.fits


def test_an_unknown_strategy_names_the_known() -> None:
    with pytest.raises(UsageError, match="known are auto, hapi, none, freeze, min, nsg, bandwidth"):
        plan("best", PROFILE, JOB)
    # What needs a profile is no choice where only sizes are known.
    assert list(STRATEGIES) == ["none", "freeze", "min"]
    with pytest.raises(UsageError, match="unknown split strategy 'auto'"):
        choose_split("auto", [1, 1], 1)
