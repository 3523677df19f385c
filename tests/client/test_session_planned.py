"""Sessions whose split is chosen while they run: the same features and losses, whatever changes and whatever fails."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.harness import losses
from support.local_job import COUNT, Interrupting, Silent, open_session, trainer_of

from hapi.allocator import give_back_freed_memory
from hapi.client.planning.controller import SplitController
from hapi.client.session import Session
from hapi.errors import BadRequestError, DeviceMemoryError, HostMemoryError, UsageError
from hapi.profiler.cost import estimate
from hapi.profiler.profile import Profile
from hapi.profiler.stages.alternation import Alternation
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.train.trainer import Trainer
from hapi.wire.report import RequestReport
from hapi.wire.transport.http import Handler

FREEZE, LAST = 12, 13


def train(service: Service | Handler, watcher: Silent | None = None, **changes: Any) -> dict[str, Any]:
    with open_session(service, **changes) as session:
        return trainer_of(session, watcher or Silent(), **changes).run()


@pytest.fixture(scope="module")
def features(service: Service) -> list[torch.Tensor]:
    """Of the first epoch, with everything that may be pushed down on the server."""
    with open_session(service, split=LAST) as session:
        return [f.clone() for f, _ in session.epoch(0)]


@pytest.fixture(scope="module")
def reference(service: Service) -> list[float]:
    return losses(train(service))


def check_features(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# -- split_of ------------------------------------------------------------------------------------------------------


def test_the_caller_names_the_splits(service: Service, features: list[torch.Tensor]) -> None:
    with open_session(service, split="auto", prefetch_bytes=0) as session:
        splits = [0, 13, 5, 12, 0]
        got = [f.clone() for f, _ in session.epoch(0, split_of=lambda n: splits[n])]
        check_features(got, features)
        assert session.last.splits == {s: splits.count(s) for s in splits}
        part = [f.clone() for f, _ in session.epoch(0, 3, split_of=lambda n: n)]
        check_features(part, features[3:])
        assert session.last.splits == {3: 1, 4: 1}
        assert session.planning is not None and session.planning.plan is None, "nothing was planned"


@pytest.mark.slow_except("<lambda>-UsageError1")
@pytest.mark.parametrize(
    ("split_of", "error"),
    [(lambda n: 14, UsageError), (lambda n: -1, UsageError), (lambda n: 5 // (2 - n), ZeroDivisionError)],
)
def test_splits_that_are_none(
    service: Service, split_of: Callable[[int], int], error: type[Exception]
) -> None:
    with open_session(service, split="auto") as session:
        with pytest.raises(error, match=r"outside 0 to 13|division"):
            list(session.epoch(0, split_of=split_of))
        assert len(list(session.epoch(0))) == 5


def test_a_fixed_split_takes_no_names(service: Service) -> None:
    with open_session(service) as session, pytest.raises(UsageError, match="strategy, such as split='auto'"):
        session.epoch(0, split_of=lambda n: 3)


@pytest.mark.parametrize("flag", ["profile", "save_profile"])
def test_a_fixed_split_takes_no_profile(service: Service, flag: str) -> None:
    with pytest.raises(UsageError, match=f"--{flag.replace('_', '-')} needs a split that is chosen"):
        train(service, split="freeze", **{flag: "file"})


# -- the same training ---------------------------------------------------------------------------------------------


@pytest.mark.long_cases("nsg", "hapi")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "hapi", "nsg", "bandwidth"])
def test_every_strategy_trains_the_same(service: Service, reference: list[float], strategy: str) -> None:
    report = train(service, split=strategy)
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert report["strategy"] == strategy
    assert report["epochs"][0]["splits"] == [[0, 3], [FREEZE, 2]]
    assert report["epochs"][0]["estimated_seconds"] is None  # nobody could know it before
    assert report["epochs"][1]["estimated_seconds"] > 0
    plan = report["plan"]
    assert [c["estimate"]["split"] for c in plan["candidates"]] == list(range(LAST + 1))
    assert plan["changes"][0]["why"] == "profiled" and plan["memory"]["predicted"] > 0
    assert {s["stage"] for s in report["timeline"]["spans"]} == {"server", "network", "client"}


@pytest.mark.slow
def test_an_epochs_estimate_is_of_the_split_that_it_ran_at(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beginning may change the split: a sample cache that is full by then, for one."""
    begin_pass = SplitController.begin_pass

    def begin(self: SplitController, epoch: int, batches: int) -> None:
        begin_pass(self, epoch, batches)
        if epoch == 1:
            self.at = Alternation.only(7)

    monkeypatch.setattr(SplitController, "begin_pass", begin)
    with open_session(service, split="auto", epochs=2, replan="off") as session:
        entry = Trainer(session, callbacks=[Silent()]).run()["epochs"][1]
        planning = session.planning
    assert planning is not None and planning.profile is not None
    assert entry["splits"] == [[7, 5]]
    expected = estimate(planning.profile, replace(planning.job, samples=COUNT), 7).epoch_seconds
    assert entry["estimated_seconds"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_the_oracle_trains_the_same(service: Service) -> None:
    want = train(service, epochs=1, bs=1)
    report = train(service, split="oracle", epochs=1, bs=1)
    assert losses(report) == pytest.approx(losses(want), rel=1e-4)
    assert len(report["plan"]["measured_batch_seconds"]) == LAST + 1


@pytest.mark.slow
def test_the_profile_knows_all_layers(service: Service) -> None:
    with open_session(service, split="auto") as session:
        for _ in session.epoch(0):
            pass
        planning = session.planning
        assert planning is not None and planning.profile is not None
        profile = planning.profile
        assert all(x.server_seconds > 0 for x in profile.layers[:FREEZE])
        assert all(x.client_seconds > 0 for x in profile.layers[:LAST])
        assert profile.step_seconds > 0 and profile.server.cos_batch == 4
        assert profile.samples.stored_bytes == 3 * 32 * 32 * 4 and not profile.samples.encoded
        assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.slow
@pytest.mark.parametrize("drop_last", [pytest.param(False, marks=pytest.mark.long), True])
def test_validation_counts_for_no_plan(service: Service, drop_last: bool) -> None:
    with open_session(service, split="auto", validation=0.3, drop_last=drop_last) as session:
        list(session.epoch(0))
        before = session.meter.snapshot()
        assert sum(len(y) for _, y in session.validation()) == round(COUNT * 0.3)
        assert session.meter.snapshot() == before


def test_a_plan_is_for_the_samples_that_are_trained(service: Service) -> None:
    for changes, samples in (
        ({}, COUNT),
        ({"drop_last": True}, 40),
        ({"drop_last": True, "trainers": 2}, 20),
    ):
        with open_session(service, split="auto", **changes) as session:
            assert session.planning is not None and session.planning.job.samples == samples
            assert sum(map(len, session.batch_ids(0))) == samples


@pytest.mark.slow
def test_validation_on_another_data_set(service: Service) -> None:
    report = train(service, split="auto", validation="blobs", epochs=2)
    assert all(e["validation_accuracy"] >= 0 for e in report["epochs"])


@pytest.mark.slow
def test_an_epoch_that_is_never_begun_profiles_nothing(service: Service) -> None:
    with open_session(service, split="auto") as session:
        session.epoch(0)
        planning = session.planning
        assert planning is not None and not planning.profiling
        next(session.epoch(0))
        assert planning.profiling
        assert len(list(session.epoch(0))) == 5
        assert len(list(session.epoch(1))) == 5
        assert planning.plan is not None


@pytest.mark.long_cases("changes1")
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"bs": 46}, {"bs": 45, "drop_last": True}, {"freeze": 0}, {"prefetch_bytes": 0}]
)
def test_odd_jobs(service: Service, changes: dict[str, Any]) -> None:
    """Epochs of one batch, nothing frozen, nothing prefetched."""
    epochs = 1 if "freeze" in changes else 3
    want = train(service, **{**changes, "split": "freeze"}, epochs=epochs)
    report = train(service, **changes, split="auto", epochs=epochs)
    assert losses(report) == pytest.approx(losses(want), rel=1e-4)
    assert "candidates" in report["plan"]


@pytest.mark.slow
def test_reports_that_are_refused_cost_nothing_but_knowledge(
    service: Service, reference: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose reports are none: everything it sent is used, once, and a plan is made of what is known."""

    def refused(document: Any) -> RequestReport:
        raise BadRequestError("seconds that are no number")

    monkeypatch.setattr(RequestReport, "from_json", refused)
    report = train(service, split="auto")
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert [e["samples"] for e in report["epochs"]] == [COUNT] * 2


# -- memory --------------------------------------------------------------------------------------------------------


def starve(session: Session, capacity: Callable[[int], int]) -> list[tuple[int, int]]:
    """The frozen rest after split s runs out of memory above ``capacity(s)`` samples; the (split, samples) it ran."""
    layers = session._passes._layers
    original, ran = layers.suffix, []

    def starved(split: int, stop: int) -> Any:
        fresh = (split, stop) not in layers._suffixes
        rest = original(split, stop)
        if not fresh:
            return rest

        def limited(layers: Any) -> Any:
            def forward(x: torch.Tensor) -> torch.Tensor:
                if len(x) > capacity(split):
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                ran.append((split, len(x)))
                return layers(x)

            return forward

        rest._layers = limited(rest._layers)
        layers.timed(split, stop, session._passes._tried)
        layers._layers[split, stop][0] = limited(layers._layers[split, stop][0])
        return rest

    layers.suffix = starved  # type: ignore[method-assign]
    return ran


def starved_training(
    service: Service, capacity: Callable[[int], int], **changes: Any
) -> tuple[Any, Any, list[Any]]:
    with open_session(service, split="auto", **changes) as session:
        ran = starve(session, capacity)
        report = Trainer(session, callbacks=[Silent()]).run()
    for entry in report["epochs"]:
        assert entry["samples"] == COUNT
        assert sum(n for _, n in entry["splits"]) == 5
    return report, session, ran


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.long), 1 << 30])
def test_a_split_that_runs_out_of_memory_is_left(
    service: Service, reference: list[float], prefetch: int
) -> None:
    """At 0, 1 and 2 not one sample fits: the micro-batch halves, then the split moves; nothing is lost or repeated."""
    report, session, ran = starved_training(
        service, lambda split: 0 if split < 3 else 99, prefetch_bytes=prefetch
    )
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert min(split for split, _ in ran) == 3
    assert report["epochs"][0]["splits"] == [[3, 3], [FREEZE, 2]]
    changes = report["plan"]["changes"]
    assert [(c["from"], c["to"]) for c in changes[:3]] == [(0, 1), (1, 2), (2, 3)]
    assert all(c["why"].startswith("out of memory") and c["batch"] == 2 for c in changes[:3])
    assert session.planning.split >= 3
    assert session._passes._layers._micro_batch.size == session.settings.micro_batch, (
        "what is left runs as fast as it can"
    )


@pytest.mark.slow
def test_a_smaller_micro_batch_is_enough(service: Service, reference: list[float]) -> None:
    report, session, ran = starved_training(service, lambda split: 3)
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert session._passes._layers._micro_batch.size == 2 and max(n for _, n in ran) <= 3
    assert report["epochs"][0]["splits"] == [[0, 3], [FREEZE, 2]]
    assert not any("out of memory" in change["why"] for change in report["plan"]["changes"])


@pytest.mark.slow
def test_memory_that_goes_later_moves_the_plan(service: Service, reference: list[float]) -> None:
    """After the decision, in the middle of an epoch, where batches of the old split are there already."""
    with open_session(service, split="auto", replan="off") as session:
        gone = [False]
        starve(session, lambda split: 0 if gone[0] and split < FREEZE else 99)
        watcher = Silent()
        watcher.on_step = lambda steps: gone.__setitem__(0, steps >= 7)  # type: ignore[method-assign]
        report = Trainer(session, callbacks=[watcher]).run()
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert session.split >= min(FREEZE, report["plan"]["split"])
    assert sum(n for _, n in report["epochs"][1]["splits"]) == 5


@pytest.mark.slow
def test_all_that_is_left_is_to_push_everything_down(service: Service, reference: list[float]) -> None:
    report, session, _ = starved_training(service, lambda split: 0)
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert session.split == LAST
    assert report["epochs"][1]["splits"] == [[LAST, 5]]


@pytest.mark.slow
def test_a_server_with_little_memory_gets_an_earlier_split(service: Service, reference: list[float]) -> None:
    """Auto begins at the freeze, which is the most that a server can be asked for."""
    handle = loopback_handler(service)

    def small(method: str, path: str, body: bytes) -> tuple[int, Any, Any]:
        document = json.loads(body) if body else {}
        if document.get("split", 0) > 5:
            problem = DeviceMemoryError("the front does not fit cpu").to_problem()
            return 507, {}, iter([json.dumps(problem).encode()])
        return handle(method, path, body)

    report = train(small, split="auto")
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert [e["samples"] for e in report["epochs"]] == [COUNT] * 2
    assert {split for e in report["epochs"] for split, _ in e["splits"]} <= set(range(6))
    assert report["plan"]["changes"][0]["why"].startswith(f"a server has no memory for split {FREEZE}")
    with pytest.raises(DeviceMemoryError, match="does not fit cpu"):
        train(small, split="freeze")


@pytest.mark.slow
def test_a_server_that_stays_out_of_memory_gets_an_earlier_split(
    service: Service, reference: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hapi.client.loading.fetching.SHORT_TRIES", 2)
    handle, refusals = loopback_handler(service), iter(int, 1)  # without end

    def short(method: str, path: str, body: bytes) -> tuple[int, Any, Any]:
        document = json.loads(body) if body else {}
        if document.get("split", 0) > 9 and next(refusals, None) is not None:
            return 503, {}, iter([json.dumps(HostMemoryError("out of memory").to_problem()).encode()])
        return handle(method, path, body)

    report = train(short, split="auto")
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert report["plan"]["changes"][0]["why"].startswith(f"a server has no memory for split {FREEZE}")
    refusals = iter(range(3))
    assert losses(train(short, split="freeze")) == pytest.approx(reference, rel=1e-4)


@pytest.mark.slow
def test_an_epoch_that_is_resumed_late_leaves_the_rest_of_profiling_to_the_next(service: Service) -> None:
    with open_session(service, split="auto") as session:
        planning = session.planning
        assert planning is not None
        assert len(list(session.epoch(0, start_batch=4))) == 1 and planning.plan is None
        list(session.epoch(1))
        assert planning.profile is not None
        assert planning.profile.notes[0].endswith(f"{{0: 2, {FREEZE}: 1}}")  # the first at each warms it up


@pytest.mark.slow
def test_a_profile_that_can_no_longer_be_kept_does_not_end_training(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Profile, path: str, job: object) -> None:
        raise UsageError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(Profile, "save", full)
    report = train(service, split="auto", save_profile=str(tmp_path / "p.json"))
    assert len(report["epochs"]) == 2
    assert "p.json: cannot be written: No space left on device; training goes on" in caplog.text


@pytest.mark.slow
def test_when_even_that_does_not_fit_one_line_says_so(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.dtype == torch.float32:
            raise DeviceMemoryError("the features of a training batch do not fit; choose a smaller --bs")
        return tensor

    with open_session(service, split="auto") as session:
        starve(session, lambda split: 0)
        monkeypatch.setattr("hapi.client.delivery.assembly.to_device", full)
        with pytest.raises(DeviceMemoryError, match="smaller --bs"):
            list(session.epoch(0))


def test_a_budget_that_nothing_fits(service: Service) -> None:
    with pytest.raises(DeviceMemoryError) as caught:
        open_session(service, split="auto", memory=1 << 20, freeze=1)
    message = str(caught.value)
    assert "no split fits the client's memory of 1048576 bytes" in message and "--memory" in message
    assert "\n" not in message


@pytest.mark.slow
def test_a_budget_decides_what_is_tried(service: Service) -> None:
    """ResNet18's weights do not fit beside a training batch, its last layers' do."""
    reference = losses(train(service, model="resnet18"))
    gc.collect()
    give_back_freed_memory()  # of tests before: with that, training might take nothing that could be observed
    with open_session(service, model="resnet18", split="auto", memory=70 << 20, prefetch_bytes=0) as session:
        planning, model = session.planning, session.job_context.model
        assert planning is not None
        first = planning.weights_from
        here = set(model.tensor_names(first, len(model)))
        assert first > 0 and all(model.tensors.get(n).is_meta != (n in here) for n in model.tensors.names())
        with pytest.raises(UsageError, match=f"outside {first} to"):
            list(session.epoch(0, split_of=lambda number: 0))
        report = Trainer(session, callbacks=[Silent()]).run()
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    fits = [c["fits"] for c in report["plan"]["candidates"]]
    assert not fits[0] and fits[FREEZE]
    for entry in report["epochs"]:
        assert all(fits[split] for split, _ in entry["splits"])
    assert report["plan"]["memory"]["observed"] > 0
    assert report["peak_memory_bytes"] > report["plan"]["memory"]["observed"]


# -- stopped and resumed, and profiles that are kept ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("at", "profiled"), [(2, True), (6, False)])
def test_resumed_in_and_after_profiling(
    service: Service, reference: list[float], tmp_path: Path, at: int, profiled: bool
) -> None:
    """Before the decision the rest of the epoch is profiled; after it the plan goes on."""
    options = {
        "split": "auto",
        "profile_batches": 1,
        "prefetch_bytes": 0,
        "checkpoint": str(tmp_path / "c.pt"),
    }
    with pytest.raises(KeyboardInterrupt):
        train(service, Interrupting(at), **options)
    watcher = Silent()
    report = train(service, watcher, resume=True, **options)
    assert watcher.steps == 10 - at
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    whys = [c["why"] for c in report["plan"]["changes"]]
    assert ("from the checkpoint" in whys) is not profiled and "profiled" in whys


@pytest.mark.slow
def test_a_profile_is_kept_and_replayed(service: Service, reference: list[float], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    watcher, written = Silent(), []
    watcher.on_step = lambda steps: written.append(path.exists())  # type: ignore[method-assign]
    first = train(service, watcher, split="auto", save_profile=str(path), replan="off")
    assert written == [False] * 5 + [True] * 5, "written when the decision was made"
    assert Profile.load(str(path)).to_json() == first["plan"]["profile"]
    again = train(service, split="auto", profile=str(path), replan="off")
    assert losses(again) == pytest.approx(reference, rel=1e-4)
    split = first["plan"]["split"]
    assert [e["splits"] for e in again["epochs"]] == [[[split, 5]]] * 2
    assert again["plan"]["changes"][0]["why"] == "from the given profile"
    with pytest.raises(UsageError, match=r"--profile .*does not fit '.*ThinResNet'.*freeze 11"):
        open_session(service, split="auto", profile=str(path), freeze=11)


@pytest.mark.slow
def test_two_servers(service: Service, reference: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests go to whichever is free, at one split or at another."""
    from hapi.client import connect
    from hapi.client.transport.server_pool import ServerPool

    def doubled(transports: list[Any], **options: Any) -> ServerPool:
        return ServerPool([*transports, *transports], **options)

    monkeypatch.setattr(connect, "ServerPool", doubled)
    report = train(service, split="auto")
    assert losses(report) == pytest.approx(reference, rel=1e-4)
    assert report["plan"]["job"]["in_flight"] == 8


@pytest.mark.slow
def test_ids_arrive_once_whatever_the_splits(service: Service) -> None:
    with open_session(service, split="auto", bs=7) as session:
        labels = [y for _, y in session.epoch(2, split_of=lambda n: n % 4)]
        assert torch.cat(labels).tolist() == (np.concatenate(session.batch_ids(2)) % 4).tolist()
