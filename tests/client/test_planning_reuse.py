"""What a run keeps: chosen with its profile, remade as caches fill, and steady."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.planning_tools import FREEZE, JOB, World, best_of, planning_in, run_epoch, truth

from hapi.client.planning import reuse_choice
from hapi.client.planning.cache_facts import CacheFacts, KeptAt
from hapi.client.planning.reuse_choice import ReuseChooser
from hapi.profiler.reuse.choose import choose_reuse
from hapi.profiler.reuse.facts import CodecCost, CutCodecs, KeptShare, Prices, ReuseFacts, Storage
from hapi.profiler.reuse.job_cost import JobPricer

DISK = Storage(bytes=10**12, read=1e9, write=1e9)


def chooser(*shares: tuple[int, float], storage: Storage | None = DISK, refused: str = "") -> ReuseChooser:
    kept = tuple(KeptShare(cut=cut, share=share) for cut, share in shares)
    return ReuseChooser(lambda: ReuseFacts(client=storage, client_kept=kept, refused=refused))


def growing(part: list[float], *, refused: str = "not these", cut: int = 0) -> Callable[[], ReuseFacts]:
    return lambda: ReuseFacts(client=DISK, client_kept=(KeptShare(cut=cut, share=part[0]),), refused=refused)


def test_a_job_of_many_epochs_keeps_features_and_says_why() -> None:
    planning = planning_in(World(truth()), reuse=chooser(), profile=truth())
    reuse = planning.reuse
    assert reuse is not None and reuse.mode == "keep here" and reuse.cut == FREEZE
    assert planning.split == reuse.split <= reuse.cut
    assert "instead of" in reuse.reason
    document = planning.to_json()["reuse"]
    assert document["mode"] == "keep here" and document["facts"]["client"]["write"] == 1e9
    assert ReuseFacts.from_json(document["facts"]) == ReuseFacts(client=DISK)
    rejected = {one["mode"]: one["rejected"] for one in document["candidates"]}
    assert rejected["keep here"] == "" and rejected["keep there"] == "the server keeps no features"


@pytest.mark.parametrize(
    ("reuse", "epochs", "reason"),
    [
        (chooser(), 1, "one epoch only"),
        (chooser(storage=None), 30, "no cache"),
        (chooser(storage=Storage(bytes=0, read=1e9, write=1e9)), 30, "no room"),
        (chooser(storage=Storage(bytes=10**12, read=1.0, write=1e9)), 30, "read no faster"),
        (
            chooser(storage=Storage(bytes=10**12, read=1e9, write=1e-6)),
            30,
            "no room, or its disk is too slow",
        ),
    ],
)
def test_what_is_not_worth_keeping(reuse: ReuseChooser, epochs: int, reason: str) -> None:
    world = World(truth())
    planning = planning_in(world, reuse=reuse, profile=world.true, job=replace(JOB, epochs=epochs))
    assert planning.reuse is not None and planning.reuse.mode == "recompute"
    assert reason in planning.reuse.reason
    assert planning.split == best_of(world)


def test_a_sample_cache_that_fills_brings_the_split_to_zero() -> None:
    """At 10 Mbit/s stored samples are slower than features; they are not once they need not cross."""
    world, part = World(truth(10e6, here=0.0005)), [0.0]
    job = replace(JOB, epochs=4)
    slow = ReuseChooser(
        lambda: ReuseFacts(
            client=replace(DISK, bytes=0), client_kept=(KeptShare(cut=0, share=part[0]),), refused="trained"
        )
    )
    planning = planning_in(world, reuse=slow, job=job)
    run_epoch(planning, world)
    deep = planning.split
    assert deep > 0
    assert run_epoch(planning, world, 1) == [deep] * 10
    before = planning.estimated_seconds(2, JOB.samples)
    part[0] = 0.95
    assert run_epoch(planning, world, 2) == [0] * 10
    assert planning.changes[-1].before == deep and planning.changes[-1].epoch == 2
    assert "instead of" in planning.changes[-1].why
    after = planning.estimated_seconds(2, JOB.samples)
    assert before is not None and after is not None and after < before
    assert planning.reuse is not None and planning.reuse.mode == "keep samples"


def test_what_later_epochs_gain_counts() -> None:
    """None of the samples is here yet; the first epoch at split 0 is dearer, and pays for those that follow."""
    world = World(truth(10e6, here=0.0005))
    for epochs, split in ((60, 0), (1, best_of(world))):
        job = replace(JOB, epochs=epochs)
        planning = planning_in(world, reuse=chooser(refused="trained"), profile=world.true, job=job)
        assert planning.split == split


def test_small_gains_do_not_change_the_choice() -> None:
    profile, part = truth(), [0.0]
    reuse = ReuseChooser(growing(part, refused="", cut=FREEZE))
    splits = range(FREEZE + 1)
    assert reuse.choose(profile, JOB, splits)
    first, changes = reuse.plan, 0
    for step in range(20):
        part[0] = step / 20
        bits = profile.link.bits_per_second * (1.03 if step % 2 else 0.97)
        drifted = replace(profile, link=replace(profile.link, bits_per_second=bits))
        changes += reuse.choose(drifted, JOB, splits)
    assert first is not None and reuse.plan is not None
    assert (reuse.plan.mode, reuse.plan.cut) == (first.mode, first.cut) and changes <= 2


def test_rates_that_hardly_move_ask_for_no_new_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass that reads the disk measures it anew; a choice takes tenths of a second."""
    profile, read, share, made = truth(), [1e9], [1.0], list[object]()
    choose = reuse_choice.choose_reuse
    monkeypatch.setattr(
        reuse_choice, "choose_reuse", lambda *given, **more: (made.append(given), choose(*given, **more))[1]
    )

    def facts() -> ReuseFacts:
        kept = (KeptShare(cut=FREEZE, share=share[0]),)
        codec = CodecCost(name="planes", ratio=1.2, encode=1e9, decode=read[0])
        codecs = (CutCodecs(cut=FREEZE, codecs=(codec,)),)
        return ReuseFacts(client=replace(DISK, read=read[0]), client_kept=kept, codecs=codecs)

    reuse, splits = ReuseChooser(facts), range(FREEZE + 1)
    assert reuse.choose(profile, JOB, splits)
    for step in range(9):
        read[0] = 1e9 * (0.99 if step % 2 else 1.01) ** (step + 1)
        assert not reuse.choose(profile, JOB, splits) and len(made) == 1
    for changed in (0.85e9, 0.85e9 * 0.95, 0.85e9 * 0.89):  # slow changes add up
        read[0] = changed
        reuse.choose(profile, JOB, splits)
    assert len(made) == 3
    share[0] = 0.99
    reuse.choose(profile, JOB, splits)
    reuse.choose(replace(profile, notes=("anew",)), JOB, splits)
    reuse.choose(replace(profile, notes=("anew",)), JOB, splits[:-1])
    assert len(made) == 6


def test_a_choice_that_is_not_possible_any_more_is_left() -> None:
    profile, facts = truth(), [ReuseFacts(client=DISK)]
    reuse = ReuseChooser(lambda: facts[0])
    assert reuse.choose(profile, JOB, range(FREEZE + 1))
    facts[0] = ReuseFacts(client=DISK, refused="layer 2 is trained")
    assert reuse.choose(profile, JOB, range(FREEZE + 1))
    assert reuse.plan is not None and reuse.plan.mode != "keep here"
    (features,) = (one for one in reuse.plan.candidates if one.mode == "keep here")
    assert features.cost is None and features.rejected == "layer 2 is trained"


def test_the_forecast_of_an_epoch_is_that_of_the_job() -> None:
    profile = truth()
    reuse = chooser((FREEZE, 1.0))
    planning = planning_in(World(profile), reuse=reuse, profile=profile)
    assert planning.reuse is not None
    facts = ReuseFacts(client=DISK, client_kept=(KeptShare(cut=FREEZE, share=1.0),))
    pricer = JobPricer(profile, JOB, facts, planning.reuse.choice)
    assert planning.estimated_seconds(3, JOB.samples) == pytest.approx(pricer.epoch_seconds(1.0))


def test_money_and_time_may_choose_otherwise() -> None:
    """The fastest split computes on the server; the cheapest leaves it alone where its hours are dear."""
    profile, found = truth(1e9), []
    for prices in (Prices(), Prices(server=1e6)):
        reuse = ReuseChooser(lambda: ReuseFacts(client=DISK), objective="money", prices=prices)
        reuse.choose(profile, JOB, range(FREEZE + 1))
        assert reuse.plan is not None
        found.append(reuse.plan.split)
    assert found[1] == 0 <= found[0]


def test_facts_tell_what_the_caches_hold() -> None:
    class Cache:
        admits = True

        def share(self, ids: object) -> float:
            return 0.25

    cache = Cache()
    facts = CacheFacts(
        ids=np.arange(40), trainers=2, budget=1000, memory_bytes=10, features=lambda epoch: {KeptAt(3): cache},
        rates=lambda: (5.0, 4.0), views=3,
    )  # fmt: skip
    found = facts()
    assert found.client == Storage(bytes=1000, read=5.0, write=4.0, memory_bytes=10)
    assert (found.samples, found.trainers, found.client_share(3)) == (120, 2, 0.25)
    assert found.samples_refused
    cache.admits = False  # a full disk
    client = facts().client
    assert client is not None and client.bytes == 0


def at_each_layer(codec: CodecCost, *, or_raw: bool = True) -> tuple[CutCodecs, ...]:
    return tuple(CutCodecs(cut=cut, codecs=(codec,), or_raw=or_raw) for cut in range(1, FREEZE + 1))


def test_the_codec_on_the_wire_is_in_the_price() -> None:
    """Features of a quarter of the bytes cross sooner; what takes long to encode makes the job longer."""
    job, seconds = replace(JOB, epochs=1), [choose_reuse(truth(), JOB, ReuseFacts(), splits=[FREEZE]).seconds]
    for rate in (1e12, 1e3):
        codec = CodecCost(name="planes", ratio=4.0, encode=rate, decode=rate)
        facts = ReuseFacts(wire_codecs=at_each_layer(codec, or_raw=False))
        found = choose_reuse(truth(), JOB, facts, splits=[FREEZE])
        assert (found.mode, found.choice.crossing.wire.name) == ("recompute", "planes")
        seconds.append(found.seconds)
        free = ReuseFacts(wire_codecs=at_each_layer(codec))
        chosen = choose_reuse(truth(), job, free, splits=[FREEZE]).choice.crossing.wire.name
        assert chosen == ("planes" if rate == 1e12 else "none")
    assert seconds[1] < seconds[0] < seconds[2]


def test_the_seconds_of_the_encoding_that_is_on_are_known() -> None:
    codec = CodecCost(name="planes", ratio=4.0, encode=1e6, decode=1e12)
    on = [at_each_layer(codec, or_raw=False)]
    reuse = ReuseChooser(ReuseFacts, wire_codecs=lambda: on[-1])
    assert reuse.encoding_seconds(FREEZE) == 0.0, "there is no profile yet"
    reuse.choose(truth(), JOB, [FREEZE])
    assert reuse.encoding_seconds(FREEZE) == truth().sent_bytes(FREEZE) / 1e6
    assert reuse.encoding_seconds(0) == 0.0
    on.append(())
    assert reuse.encoding_seconds(FREEZE) == 0.0


@pytest.mark.parametrize(("room", "codec"), [(2.0, "none"), (0.5, "zeros")])
def test_the_codec_at_rest_is_chosen_by_the_room(room: float, codec: str) -> None:
    shrinks = CodecCost(name="zeros", ratio=4.0, encode=1e9, decode=1e9)
    profile, job = truth(), replace(JOB, epochs=30)
    need = job.samples * profile.sent_bytes(FREEZE)
    disk = Storage(bytes=int(room * need), read=1e12, write=1e12)
    found = choose_reuse(profile, job, ReuseFacts(client=disk, codecs=at_each_layer(shrinks)), always=True)
    assert (found.mode, found.codec) == ("keep here", codec)


def test_features_are_kept_in_any_case_if_so_wanted() -> None:
    profile = truth()
    reuse = ReuseChooser(lambda: ReuseFacts(client=replace(DISK, read=1.0)), always=True)
    reuse.choose(profile, JOB, range(FREEZE + 1))
    assert reuse.plan is not None and (reuse.plan.mode, reuse.plan.cut) == ("keep here", FREEZE)
    assert reuse.plan.reason == "features are kept in any case"
