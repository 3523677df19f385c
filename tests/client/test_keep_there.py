"""Keeping beside the store: a run chooses it where it is best, leaves its own cache alone, and tells of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.local_job import Silent, open_session, pack_blobs
from support.planning_tools import FREEZE, JOB, truth

from hapi.client.planning.cache_facts import READ_RATE, SERVER_BYTES, WRITE_RATE, CacheFacts
from hapi.client.planning.counts import Snapshot, SplitCounts, TrafficCounts
from hapi.client.planning.reuse_choice import ReuseChooser
from hapi.errors import UsageError
from hapi.profiler.fit import profile_of
from hapi.profiler.reuse.facts import KeptShare, Prices, Storage
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.train.trainer import Trainer
from hapi.wire.cache_room import CacheRoom

SAMPLES, LAST = 96, 6
RUN: dict[str, Any] = {
    "bs": 32, "request_size": 32, "epochs": 3, "freeze": LAST, "model": "resnet18", "weights": "random:0"
}  # fmt: skip
CUT = 3


def facts_of(asked: Snapshot | None, **changes: Any) -> CacheFacts:
    show = None if asked is None else lambda: asked
    return CacheFacts(**{"ids": np.arange(120), "trainers": 1, "budget": 0, "asked": show, **changes})


def answered(keepable: int, kept: int, split: int = CUT) -> Snapshot:
    return {split: SplitCounts(traffic=TrafficCounts(samples=keepable, keepable=keepable, kept=kept))}


@pytest.mark.parametrize(
    ("asked", "kept", "share", "room"),
    [
        pytest.param(60, 0, 0.5, SERVER_BYTES, id="half was asked for, and is there now"),
        pytest.param(120, 0, 1.0, SERVER_BYTES, id="all of it"),
        pytest.param(12, 12, 1.0, SERVER_BYTES, id="others had it kept"),
        pytest.param(240, 120, 1.0, SERVER_BYTES, id="it was there the second time"),
        pytest.param(125, 0, 1.0, SERVER_BYTES, id="a few retries tell nothing"),
        pytest.param(240, 30, 0.25, 0, id="a full disk"),
        pytest.param(360, 0, 0.0, 0, id="nothing is ever there"),
    ],
)
def test_what_answers_tell_of_the_servers_cache(asked: int, kept: int, share: float, room: int) -> None:
    found = facts_of(answered(asked, kept))()
    assert found.server == Storage(bytes=room, read=READ_RATE, write=WRITE_RATE)
    assert found.server_share(CUT) == pytest.approx(share) and found.client is None


def test_a_server_tells_its_room_and_the_rates_of_its_disk() -> None:
    told = CacheRoom(bytes=7 * 10**9, read=3_000_000, write=2_000_000)
    found = facts_of(answered(60, 0), server_room=lambda: told)().server
    assert found == Storage(bytes=7 * 10**9, read=3e6, write=2e6)
    unmeasured = facts_of(answered(60, 0), server_room=lambda: CacheRoom(bytes=5))().server
    assert unmeasured == Storage(bytes=5, read=READ_RATE, write=WRITE_RATE)
    full = facts_of(answered(240, 30), server_room=lambda: told)().server
    assert full is not None and full.bytes == 0, "its answers count for more"


def test_trainers_fill_together_and_views_are_more_samples() -> None:
    assert facts_of(answered(60, 0), trainers=2)().server_share(CUT) == 1
    assert facts_of(answered(60, 0), views=2)().server_share(CUT) == 0.25
    assert facts_of(None)().server is None
    assert facts_of({0: answered(60, 0)[CUT]})().server_kept == ()


def test_a_run_without_room_has_the_server_keep_and_one_with_room_does_not() -> None:
    profile, splits = truth(1e9, there=0.05, here=0.05), range(FREEZE + 1)
    own = Storage(bytes=10**12, read=1e9, write=1e9)
    for client, mode in ((None, "keep there"), (own, "keep here"), (replace(own, write=100.0), "keep there")):
        facts = replace(facts_of({})(), client=client, samples=JOB.samples)
        chooser = ReuseChooser(lambda facts=facts: facts)
        chooser.choose(profile, replace(JOB, epochs=30), splits)
        assert chooser.plan is not None and chooser.plan.mode == mode


@pytest.mark.parametrize("prices", [Prices(egress=1e3), Prices(server=1e3), Prices(trainer=1e3)])
def test_money_is_the_objective_where_it_is_asked_for(prices: Prices) -> None:
    profile, own = truth(1e9, there=0.05, here=0.06), Storage(bytes=10**12, read=1e9, write=1e9)
    facts = replace(facts_of({})(), client=own, samples=JOB.samples)
    chooser = ReuseChooser(lambda: facts, objective="money", prices=prices)
    chooser.choose(profile, replace(JOB, epochs=30), range(FREEZE + 1))
    assert chooser.plan is not None
    money = {one.mode: one.cost.money for one in chooser.plan.candidates if one.cost is not None}
    assert len(money) == 3 and money[chooser.plan.mode] == min(money.values()) > 0
    document = chooser.to_json()
    assert document is not None and document["prices"] == asdict(prices)


def test_the_reported_facts_are_those_of_the_choice() -> None:
    kept, profile = [0.0], truth(1e9, there=0.05, here=0.05)

    def facts() -> Any:
        shares = (KeptShare(cut=FREEZE, share=kept[0]),)
        return replace(facts_of({})(), server_kept=shares, samples=JOB.samples)

    chooser = ReuseChooser(facts)
    for share in (0.0, 1.0):
        kept[0] = share
        chooser.choose(profile, replace(JOB, epochs=30), range(FREEZE + 1))
    document = chooser.to_json()
    assert document is not None and document["mode"] == "keep there"
    assert document["facts"]["server_kept"] == ({"cut": FREEZE, "share": 0.0, "split": None},)


# -- with a real server ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("there") / "store"
    pack_blobs(store, count=SAMPLES)
    return store


@contextmanager
def keeping_service(store: Path, folder: Path | None) -> Iterator[Service]:
    settings = ServerSettings(
        store=str(store), cos_batch=16, threads=1, cache_dir=None if folder is None else str(folder),
        share_memory=64 << 20,
    )  # fmt: skip
    service = Service(settings, open_store(str(store)))
    try:
        yield service
    finally:
        service.close()


@pytest.fixture(scope="module")
def profile(store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Layers that take a second each, over a link that takes nothing: recomputing is out of the question."""
    with (
        keeping_service(store, None) as service,
        open_session(service, **{**RUN, "split": "auto"}) as session,
    ):
        assert session.planning is not None
        found = profile_of(session.planning.sizes, {}, (1e10, 0.0))
    layers = tuple(replace(layer, server_seconds=1.0, client_seconds=1.0) for layer in found.layers)
    path = tmp_path_factory.mktemp("profile") / "slow.json"
    replace(found, layers=layers).save(str(path))
    return str(path)


def train(service: Service, **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with open_session(service, **{**RUN, **changes}) as session:
        report = Trainer(session, callbacks=[Silent()]).run()
        return report, {name: value.clone() for name, value in session.trained.state_dict().items()}


def of_epochs(report: dict[str, Any], name: str) -> list[Any]:
    return [entry[name] for entry in report["epochs"]]


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(1 << 20, id="too small a cache here", marks=pytest.mark.slow),
        pytest.param(None, id="no cache here", marks=pytest.mark.long),
    ],
)
def test_a_run_follows_the_choice_and_reports_it(
    store: Path, profile: str, tmp_path: Path, own: int | None
) -> None:
    planned = {"split": "auto", "profile": profile, "replan": "off", "server_price": 2.0, "egress": 1.0}
    here = {"cache": "auto", "cache_dir": str(tmp_path / "here"), "cache_size": own} if own else {}
    with keeping_service(store, None) as service:
        reference = train(service, split=LAST)
    with keeping_service(store, tmp_path / "there") as service:
        assert service.document("/v1/datasets/blobs")["keeps_features"]
        room = CacheRoom.from_json(service.version()["cache"])
        report, weights = train(service, **planned, **here)
        assert service.sharing.counts.all()["computed"] == SAMPLES
    assert of_epochs(report, "loss") == of_epochs(reference[0], "loss")
    assert all(torch.equal(weights[name], value) for name, value in reference[1].items())
    reuse = report["plan"]["reuse"]
    there = reuse["facts"]["server"]
    assert (there["bytes"], there["read"], there["write"]) == (room.bytes, room.read, room.write)
    assert reuse["mode"] == "keep there" and reuse["prices"] == {"egress": 1.0, "server": 2.0, "trainer": 0.0}
    assert of_epochs(report, "server_kept_samples") == [0, SAMPLES, SAMPLES]
    assert of_epochs(report, "keeping") == ["keep there"] * 3
    assert of_epochs(report, "features_kept") == [0] * 3 == of_epochs(report, "feature_hits")
    for entry in report["epochs"]:
        spent = entry["bytes_received"] / 1e9 + 2 * entry["server_seconds"] / 3600
        assert entry["money"] == pytest.approx(spent, abs=2e-6)
    if own:
        assert report["cache"]["why"].startswith("the server keeps them; 3 epochs in")


def test_where_nothing_can_be_chosen_money_is_no_objective(store: Path) -> None:
    with keeping_service(store, None) as service:
        with pytest.raises(UsageError, match="--objective money needs a split"):
            open_session(service, **{**RUN, "split": LAST, "objective": "money", "egress": 1.0})
        with open_session(
            service, **{**RUN, "split": "auto", "objective": "money", "egress": 1.0}
        ) as session:
            assert session.planning is not None and session.planning.chooser is not None


def test_the_mode_is_what_is_done(store: Path, tmp_path: Path) -> None:
    own = {"cache": "auto", "cache_dir": str(tmp_path)}
    with keeping_service(store, None) as service:
        for changes, mode in (
            ({"cache": "off"}, "recompute"),
            ({**own, "epochs": 1}, "recompute"),
            ({**own, "freeze": 0, "split": 0}, "recompute"),
            (own, "keep here"),
        ):
            with open_session(service, **{**RUN, "split": LAST, **changes}) as session:
                assert session.keeping.mode == mode
                session.keeping.distrust()
                assert session.keeping.mode == "recompute"
