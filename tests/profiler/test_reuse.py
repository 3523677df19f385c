"""Whole jobs that keep something: what they cost, and what is chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.any_profile import jobs, profiles
from support.profiler_tools import crafted, free_tier

from hapi.errors import ConfigError, UsageError
from hapi.profiler.cost import memory
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choice import Choice, Crossing
from hapi.profiler.reuse.choose import LEAST_GAIN, _LowerBounds, choose_reuse
from hapi.profiler.reuse.facts import (
    CodecCost,
    CutCodecs,
    KeptShare,
    Objective,
    Prices,
    ReuseFacts,
    Storage,
)
from hapi.profiler.reuse.job_cost import RECORD_BYTES, JobCost, JobPricer
from hapi.profiler.stages.pipeline import FEWEST_ROWS, Mix, Pipeline, rows_asked

rates = st.floats(1e3, 1e10)
storages = st.builds(
    Storage,
    bytes=st.integers(0, 10**9),
    read=rates,
    write=rates,
    slow_write=st.none() | st.floats(1e3, 1e6),
    fast_bytes=st.integers(0, 10**8),
    memory_bytes=st.integers(0, 10**8),
)
prices = st.builds(Prices, egress=st.floats(0, 10), server=st.floats(0, 10), trainer=st.floats(0, 10))
codecs = st.builds(
    CodecCost,
    name=st.just("zstd"),
    ratio=st.floats(1, 10),
    encode=st.floats(1e6, 1e10),
    decode=st.floats(1e6, 1e10),
)
aims = st.sampled_from(["time", "money"])


@st.composite
def facts(draw: st.DrawFn) -> ReuseFacts:
    kept = st.lists(
        st.builds(KeptShare, cut=st.integers(0, 3), share=st.floats(0, 1)),
        max_size=2,
        unique_by=lambda k: k.cut,
    )
    return ReuseFacts(
        client=draw(st.none() | storages),
        server=draw(st.none() | storages),
        client_kept=tuple(draw(kept)),
        codecs=tuple(CutCodecs(cut=cut, codecs=(draw(codecs),)) for cut in (1, 2) if draw(st.booleans())),
        wire_codecs=tuple(
            CutCodecs(cut=cut, codecs=(draw(codecs),), or_raw=draw(st.booleans()))
            for cut in (1, 3)
            if draw(st.booleans())
        ),
        trainers=draw(st.integers(1, 3)),
        views=draw(st.sampled_from([1, 1, 2, 5])),
        refused=draw(st.sampled_from(["", "", "layer 3 is trained"])),
    )


def every_choice(profile: Profile, given_facts: ReuseFacts, job: Job) -> list[Choice]:
    """All modes, cuts, splits and codecs, without any being left out."""
    splits = [
        s
        for s in range(profile.last_split + 1)
        if job.memory_bytes is None or memory(profile, job, s).peak <= job.memory_bytes
    ] or list(range(profile.last_split + 1))
    found = []
    for split in splits:
        crossings = [Crossing(split=split, wire=wire) for wire in given_facts.wire_at(split)]
        found += [Choice(mode="recompute", cut=0, crossing=crossing) for crossing in crossings]
        if given_facts.client is not None and split == 0:
            found.append(Choice(mode="keep samples", cut=0, crossing=Crossing(split=0)))
        if given_facts.refused:
            continue
        if given_facts.server is not None and split:
            found += [
                Choice(mode="keep there", cut=split, crossing=crossing, codec=codec)
                for codec in given_facts.codecs_at(split)
                for crossing in crossings
            ]
        if given_facts.client is not None:
            found += [
                Choice(mode="keep here", cut=cut, crossing=crossing, codec=codec)
                for cut in range(max(1, split), profile.last_split + 1)
                for codec in given_facts.codecs_at(cut)
                for crossing in crossings
            ]
    return found


@given(profiles(), jobs, facts(), prices, aims, st.integers(1, 40))
def test_no_choice_is_better_than_the_chosen_one(
    profile: Profile, job: Job, known: ReuseFacts, paid: Prices, aim: Objective, epochs: int
) -> None:
    job = replace(job, epochs=epochs)
    found = choose_reuse(profile, job, known, prices=paid, objective=aim)
    costs = [JobPricer(profile, job, known, c).job_cost(paid) for c in every_choice(profile, known, job)]
    best = min(cost.money if aim == "money" else cost.seconds for cost in costs)
    mine = found.money if aim == "money" else found.seconds
    assert mine * (1 - LEAST_GAIN) <= best * (1 + 1e-6)
    refined = found.choice.limit < 1 or found.choice.later is not None or found.alternation is not None
    assert found.cost in costs or refined
    for cost in (*costs, found.cost):
        assert min(cost.seconds, cost.money, cost.received_bytes, cost.server_seconds) >= 0
        assert 0 <= cost.kept <= 1 + 1e-12 and cost.first_epoch_seconds >= 0 <= cost.last_epoch_seconds


@given(profiles(), jobs, facts(), prices, aims, st.integers(1, 40))
def test_choices_that_are_not_priced_are_worse(
    profile: Profile, job: Job, known: ReuseFacts, paid: Prices, aim: Objective, epochs: int
) -> None:
    job = replace(job, epochs=epochs)
    found = choose_reuse(profile, job, known, prices=paid, objective=aim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_LowerBounds, "of", lambda bounds, pricer: 0.0)
        assert choose_reuse(profile, job, known, prices=paid, objective=aim) == found


@given(profiles(), jobs, facts(), st.integers(1, 10**6))
def test_the_budget_is_never_exceeded(profile: Profile, job: Job, known: ReuseFacts, epochs: int) -> None:
    job = replace(job, epochs=epochs)
    for choice in every_choice(profile, known, job):
        pricer = JobPricer(profile, job, known, choice)
        cost = pricer.job_cost(Prices())
        if pricer.storage is None:
            assert cost.kept_bytes == 0 or cost.kept == pricer.kept_before
        else:
            had = int(pricer.kept_before * pricer.samples * pricer.sample_bytes)
            assert cost.kept_bytes <= pricer.views * (max(pricer.storage.bytes, had) + 1)


@given(profiles(), jobs, storages)
def test_one_epoch_keeps_nothing_unless_something_is_kept(profile: Profile, job: Job, disk: Storage) -> None:
    job = replace(job, epochs=1)
    found = choose_reuse(profile, job, ReuseFacts(client=disk, server=disk))
    assert found.mode == "recompute" and "one epoch only" in found.reason


@given(profiles(), jobs, storages, st.integers(2, 30), st.integers(0, 30))
def test_more_epochs_never_make_keeping_less_attractive(
    profile: Profile, job: Job, disk: Storage, epochs: int, more: int
) -> None:
    known = ReuseFacts(client=disk)
    last = profile.last_split
    choice = Choice(mode="keep here", cut=last, crossing=Crossing(split=last))
    assume(profile.last_split > 0)
    pricer = JobPricer(profile, job, known, choice)
    steps = [pricer.epoch_seconds(pricer.room * part / 10) for part in range(11)]
    assume(all(later <= sooner * (1 + 1e-9) for sooner, later in pairwise(steps)))

    def worth(count: int) -> float:
        kept = JobPricer(profile, replace(job, epochs=count), known, choice).job_cost(Prices()).seconds
        plain = replace(choice, mode="recompute", cut=0)
        return kept / JobPricer(profile, replace(job, epochs=count), known, plain).job_cost(Prices()).seconds

    first = worth(epochs)
    assume(first <= 1)
    assert worth(epochs + more) <= first * (1 + 1e-6)


@given(profiles(), jobs, storages, st.integers(1, 30), st.floats(1, 100))
def test_a_disk_that_reads_faster_never_makes_the_job_slower(
    profile: Profile, job: Job, disk: Storage, epochs: int, factor: float
) -> None:
    job = replace(job, epochs=epochs)
    for choice in every_choice(profile, ReuseFacts(client=disk), job):
        slow = JobPricer(profile, job, ReuseFacts(client=disk), choice)
        fast = JobPricer(profile, job, ReuseFacts(client=replace(disk, read=disk.read * factor)), choice)
        for share in (0.0, 0.3, 1.0):
            assert fast.epoch_seconds(share) <= slow.epoch_seconds(share) * (1 + 1e-9)


def simple(
    known: ReuseFacts, epochs: int, mode: str = "keep here", nbytes: int = 10_000, **changes: object
) -> JobCost:
    profile = crafted([nbytes, 1_000], [0.01, 0.0], client_tier=free_tier(), step_seconds=0.001)
    job = Job(bs=20, samples=1000, epochs=epochs, request_size=20)
    choice = Choice(mode=mode, cut=1, crossing=Crossing(split=1), **changes)  # type: ignore[arg-type]
    return JobPricer(profile, job, known, choice).job_cost(Prices())


def test_a_slow_disk_is_filled_over_several_epochs() -> None:
    """Samples of 10 MB in epochs of about 10 s, at whose end the page cache takes what the line has."""
    need = 1000 * (10_000_000 + RECORD_BYTES)
    fast = simple(ReuseFacts(client=Storage(bytes=10**12, read=1e12, write=1e12)), 10, nbytes=10_000_000)
    assert fast.fill_seconds == pytest.approx(fast.first_epoch_seconds) and fast.kept == pytest.approx(1)
    assert fast.last_epoch_seconds == pytest.approx(10 / 3, rel=0.1), "copied at 3 GB/s"
    slow = simple(
        ReuseFacts(client=Storage(bytes=10**12, read=1e12, write=need / 100)), 14, nbytes=10_000_000
    )
    assert slow.fill_seconds is not None and slow.fill_seconds == pytest.approx(100, rel=0.05)
    never = simple(
        ReuseFacts(client=Storage(bytes=10**12, read=1e12, write=need / 10_000)), 10, nbytes=10_000_000
    )
    assert never.fill_seconds is None and 0 < never.kept < 0.1


def test_the_fast_part_of_a_disk_fills_up() -> None:
    need = 1000 * (10_000_000 + RECORD_BYTES)
    disk = Storage(bytes=10**12, read=1e12, write=1e12, slow_write=need / 200, fast_bytes=need // 2)
    cost = simple(ReuseFacts(client=disk), 30, nbytes=10_000_000)
    assert cost.fill_seconds == pytest.approx(100, rel=0.02)
    assert disk.written(10.0, 0.0) == pytest.approx(need // 2 + (10 - need / 2e12) * need / 200)
    assert disk.seconds_to_write(disk.written(7.0, 11.0), 11.0) == pytest.approx(7.0)


def test_encoding_shortens_what_is_filled_and_slows_the_filling() -> None:
    """On a disk that needs 100 s for raw records: 50 s for half the bytes, 100 s for a codec slower than it."""
    need = 1000 * (10_000_000 + RECORD_BYTES)
    known = ReuseFacts(client=Storage(bytes=10**12, read=1e12, write=need / 100))
    for encode, seconds in ((1e15, 50), (1e8, 100)):
        codec = CodecCost(name="zeros", ratio=2.0, encode=encode, decode=1e15)
        cost = simple(known, 40, nbytes=10_000_000, codec=codec)
        # Encoding also holds up the training, by up to half of what it takes.
        assert cost.fill_seconds is not None and 0.95 < cost.fill_seconds / seconds < 1.5, encode
        assert cost.kept_bytes == pytest.approx(need / 2, rel=0.01)


def test_a_part_of_the_cache_is_used_and_rows_are_filled_up() -> None:
    assert rows_asked(64, 0.0) == 0 and rows_asked(64, 1.0) == 64
    assert rows_asked(64, 0.02) == pytest.approx(FEWEST_ROWS * (1 - 0.98**64), rel=0.01)
    rows = [rows_asked(100, part / 50) for part in range(51)]
    assert rows == sorted(rows) and all(r >= 2 * part - 1e-9 for part, r in enumerate(rows))
    half = Storage(bytes=500 * (10_000 + RECORD_BYTES), read=1e9, write=1e9)
    cost = simple(ReuseFacts(client=half), 10)
    assert cost.kept == pytest.approx(0.5) and cost.kept_bytes <= half.bytes
    whole, none = simple(ReuseFacts(client=replace(half, bytes=10**9)), 10), simple(ReuseFacts(), 10)
    assert whole.seconds < cost.seconds < none.seconds


def test_what_is_kept_counts_from_the_first_epoch() -> None:
    known = ReuseFacts(
        client=Storage(bytes=10**12, read=1e9, write=1e9), client_kept=(KeptShare(cut=1, share=1.0),)
    )
    cost = simple(known, 1)
    assert cost.received_bytes == 0 and cost.fill_seconds == 0 and cost.server_seconds == 0


def test_views_take_turns_and_share_the_room() -> None:
    """Eight epochs of four views are four jobs of two epochs; in four each view is used once."""
    disk = Storage(bytes=1000 * (10_000 + RECORD_BYTES), read=1e12, write=1e12)
    four = ReuseFacts(client=replace(disk, bytes=4 * disk.bytes), samples=4000, views=4)
    one, cost = simple(ReuseFacts(client=disk), 2), simple(four, 8)
    assert cost.seconds == pytest.approx(4 * one.seconds)
    assert (cost.kept, cost.kept_bytes, cost.received_bytes) == (
        1,
        4 * one.kept_bytes,
        4 * one.received_bytes,
    )
    assert cost.fill_seconds == pytest.approx(4 * one.first_epoch_seconds)
    assert simple(replace(four, client=disk), 8).kept == pytest.approx(0.25)
    once = simple(four, 4)
    assert once.received_bytes == 4 * simple(ReuseFacts(), 1).received_bytes
    assert simple(four, 3).fill_seconds is None and simple(four, 3).kept == pytest.approx(0.75)
    half = replace(four, client_kept=(KeptShare(cut=1, share=0.5),))
    assert simple(half, 4).received_bytes < 0.9 * once.received_bytes
    stored = replace(four, client=replace(disk, bytes=10**9))
    assert simple(stored, 8, mode="keep samples").kept == 1, "stored samples serve all views"


def test_nothing_is_kept_for_as_many_epochs_as_views() -> None:
    profile = crafted([10_000, 1_000], [0.01, 0.0], client_tier=free_tier())
    disk = Storage(bytes=10**12, read=1e9, write=1e9)
    known = ReuseFacts(client=disk, samples=4000, views=4, samples_refused="no folder")
    for epochs, mode in ((4, "recompute"), (30, "keep here")):
        found = choose_reuse(profile, Job(bs=20, samples=1000, epochs=epochs, request_size=20), known)
        assert found.mode == mode, epochs
        assert ("no more epochs than views" in found.reason) == (epochs == 4)


def test_facts_are_read_back_and_wrong_ones_are_named() -> None:
    known = ReuseFacts(
        client=Storage(bytes=5, read=1.0, write=2.0, slow_write=0.5),
        client_kept=(KeptShare(cut=2, share=0.5),),
        codecs=(CutCodecs(cut=2, codecs=(CodecCost(name="planes", ratio=2.0, encode=1e9, decode=2e9),)),),
        refused="layer 3 is trained",
    )
    document = known.to_json()
    assert ReuseFacts.from_json(document) == known
    with pytest.raises(ConfigError, match=r"reuse.client.read"):
        ReuseFacts.from_json({**document, "client": {**document["client"], "read": "fast"}})
    for wrong in ({"read": 0.0}, {"write": -1.0}, {"bytes": -1}):
        with pytest.raises(UsageError):
            replace(known.client or Storage(bytes=1, read=1.0, write=1.0), **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ratio"):
        CodecCost(name="grows", ratio=0.5, encode=1.0, decode=1.0)


def test_rows_are_filled_up_at_split_0_too() -> None:
    """Features of a fifth are kept: 38 of 48 rows are missing, and nearly all 48 are asked for, at any split."""
    profile = crafted([10_000, 1_000], [0.01, 0.0], client_tier=free_tier())
    mixes = [
        Pipeline(profile, Job(bs=48), split, "stored", Mix(cut=1, hits=0.2), depth=1) for split in (0, 1)
    ]
    assert mixes[0].crossing == mixes[1].crossing == pytest.approx(rows_asked(48, 0.8) / 48)
    samples = Pipeline(profile, Job(bs=48), 0, "stored", Mix(cut=0, hits=0.2), depth=1)
    assert samples.crossing == pytest.approx(0.8)  # of stored samples just what is missing is asked for


def test_what_is_kept_and_read_too_slowly_is_read_in_part() -> None:
    """All is kept; by its limit a choice reads a part of it, computes the others, and keeps nothing more."""
    kept = (KeptShare(cut=1, share=1.0),)
    known = ReuseFacts(client=Storage(bytes=10**12, read=5e5, write=1e9), client_kept=kept)
    profile = crafted([10_000, 1_000], [0.01, 0.0], client_tier=free_tier())
    job = Job(bs=20, samples=1000, epochs=10, request_size=20, alternate=False)
    found = choose_reuse(profile, job, known)
    assert found.mode == "keep here" and 0.2 < found.choice.limit < 0.5
    every = JobPricer(profile, job, known, KEPT)
    assert found.seconds < 0.8 * every.job_cost(Prices()).seconds
    assert found.cost.kept == pytest.approx(found.choice.limit)


KEPT = Choice(mode="keep here", cut=1, crossing=Crossing(split=1))


def test_memory_holds_features_without_their_codec_and_no_stored_samples() -> None:
    """Half of the raw bytes fit, whatever the codec: half of the reads is from the disk, and is decoded."""
    half = Storage(bytes=10**12, read=1e6, write=1e9, memory_bytes=5_000_000, memory_read=1e12)
    known = ReuseFacts(client=half, client_kept=(KeptShare(cut=1, share=1.0), KeptShare(cut=0, share=1.0)))
    codec = CodecCost(name="planes", ratio=2.0, encode=1e9, decode=1e7)
    profile = crafted([10_000, 1_000], [0.01, 0.0], client_tier=free_tier())
    job = Job(bs=20, samples=1000, epochs=10, request_size=20)
    mix = JobPricer(profile, job, known, replace(KEPT, codec=codec)).epoch(1.0).mix
    assert mix.hit_read_seconds == pytest.approx(0.5 * (5_000 + RECORD_BYTES) / 1e6, rel=1e-3)
    assert mix.hit_read_cpu == pytest.approx(0.5 * 10_000 / 1e7, rel=1e-2)
    stored = Choice(mode="keep samples", cut=0, crossing=Crossing(split=0))
    samples = JobPricer(profile, job, known, stored).epoch(1.0).mix
    assert samples.hit_read_seconds == pytest.approx((1_000 + RECORD_BYTES) / 1e6)
