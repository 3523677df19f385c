"""The training loop: optimisers, seeds of the steps, what the report says, checkpoints at every place."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import losses
from support.local_job import (
    COUNT,
    Interrupting,
    Silent,
    open_session,
    over_slow_store,
    trainer_of,
)
from support.thin_resnet import THIN_FEATURES
from torch import nn

from hapi.errors import ConflictError, DeviceMemoryError, HapiError, UsageError
from hapi.models.graph.layers import layered
from hapi.train.checkpoints import checkpoint
from hapi.train.interrupts import Interrupts
from hapi.train.report import write_report
from hapi.train.settings import TrainingSettings
from hapi.train.steps.gradient_step import step_seed
from hapi.train.steps.optimizer import make_optimizer
from hapi.train.steps.smallest_batch import refuses_one
from hapi.wire.transport.http import Handler


def train(remembered: Handler, watcher: Silent | None = None, **changes: Any) -> dict[str, Any]:
    with open_session(remembered, **changes) as session:
        return trainer_of(session, watcher, **changes).run()


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture(scope="module")
def undisturbed(remembered: Handler) -> dict[str, Any]:
    return train(remembered, validation=0.2)


# -- steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        ({"optimizer": "sgd", "momentum": 0.7}, torch.optim.SGD, {"momentum": 0.7}),
        ({"optimizer": "adam"}, torch.optim.Adam, {}),
        ({"optimizer": "adamw"}, torch.optim.AdamW, {}),
        ({"optimizer": "rmsprop", "momentum": 0.3}, torch.optim.RMSprop, {"momentum": 0.3}),
    ],
)
def test_optimisers(settings: dict[str, Any], kind: type, expected: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    made = make_optimizer(TrainingSettings(lr=0.5, weight_decay=0.01, **settings), module)
    assert type(made) is kind
    (group,) = made.param_groups
    assert {"lr": 0.5, "weight_decay": 0.01, **expected}.items() <= group.items()
    assert [p.shape for p in group["params"]] == [(1, 2), (1,)]


def test_step_seeds_differ_and_fit_torch() -> None:
    seeds = {step_seed(s, e, b) for s in (0, 1, 2**31 - 1) for e in range(20) for b in range(50)}
    assert len(seeds) == 3000
    assert all(0 <= s < 2**63 for s in seeds)


def test_the_report(remembered: Handler, undisturbed: dict[str, Any]) -> None:
    report = json.loads(json.dumps(undisturbed))
    held_out = round(COUNT * 0.2)
    assert [e["epoch"] for e in report["epochs"]] == [0, 1]
    for entry in report["epochs"]:
        assert entry["samples"] == COUNT - held_out
        assert entry["split"] == report["split"] == 12
        assert entry["bytes_received"] > entry["samples"] * THIN_FEATURES * 4
        assert 0 <= entry["validation_accuracy"] <= 1 and entry["validation_loss"] > 0
        assert 0 < entry["stall_seconds"] <= entry["seconds"]
    assert report["epochs"][1]["loss"] != report["epochs"][0]["loss"]
    assert (report["freeze"], report["freeze_name"], report["layers"]) == (12, "layer4.1", 14)
    assert report["settings"]["bs"] == 10 and report["retries"] == 0


def test_a_number_that_is_none_leaves_a_report_that_is_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(str(path), {"epochs": [{"validation_loss": math.nan, "loss": math.inf}]})
    document = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document == {"epochs": [{"validation_loss": None, "loss": None}]}


def test_reports_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(HapiError, match=r"--report .*/no/report.json: cannot be written: No such file"):
        write_report(str(tmp_path / "no" / "report.json"), {})


def test_one_sample_is_too_few_for_batch_norm_which_is_said_before_the_first_step(
    remembered: Handler,
) -> None:
    watcher, settings = Silent(), {"bs": COUNT - 1, "freeze": "layer4.0", "epochs": 1}
    with pytest.raises(UsageError, match=r"batch 1 of each epoch has 1 sample,.*--drop-last"):
        train(remembered, watcher, **settings)
    assert not watcher.steps
    assert train(remembered, **settings, drop_last=True)["epochs"][0]["samples"] == COUNT - 1


def test_batch_norm_over_pixels_takes_one_sample() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for side, refused in ((2, False), (1, True)):
        layers, sample = (
            layered(module, (3, side, side)).segment(0, 2),
            torch.empty(1, 3, side, side, device="meta"),
        )
        assert refuses_one(layers, sample) == refused
        assert not refuses_one(layers.eval(), sample)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())


# -- interrupts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_wait_for_the_end_of_a_block(number: int) -> None:
    before = signal.getsignal(number)
    done = []
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.deferred():
            os.kill(os.getpid(), number)
            done.append("the whole block")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            done.append("not this")
        with pytest.raises(KeyboardInterrupt), interrupts.deferred():
            done.append("nor another step, if that was swallowed, as by an object's finalizer")
    assert done == ["the whole block"]
    assert signal.getsignal(number) is before


def test_a_signal_that_a_finalizer_swallowed_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: told.append(found.exc_type))
    before = sys.unraisablehook

    class Finalized:
        def __init__(self, work: Callable[[], object]) -> None:
            self._work = work

        def __del__(self) -> None:
            self._work()

    with Interrupts() as interrupts:
        Finalized(lambda: os.kill(os.getpid(), signal.SIGINT))
        Finalized(lambda: 1 / 0)
        with pytest.raises(KeyboardInterrupt), interrupts.deferred():
            pass
    assert told == [ZeroDivisionError] and sys.unraisablehook is before


def test_a_second_signal_does_not_wait() -> None:
    done = []
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        done.append(2)
    assert done == [1]


def test_ignored_signals_stay_ignored() -> None:
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, previous)


# -- stopped and resumed -----------------------------------------------------------------------------------------


CTRL_C, PIPE = KeyboardInterrupt(), BrokenPipeError()


@pytest.mark.slow
@pytest.mark.parametrize(("at", "what"), [*((at, CTRL_C) for at in (1, 3, 4, 5, 8)), (3, PIPE), (8, PIPE)])
def test_interrupted_after_any_step(
    remembered: Handler, undisturbed: dict[str, Any], tmp_path: Path, at: int, what: BaseException
) -> None:
    path = str(tmp_path / "training.pt")
    with pytest.raises(type(what)):
        train(remembered, Interrupting(at, what), validation=0.2, checkpoint=path)
    watcher = Silent()
    report = train(remembered, watcher, validation=0.2, checkpoint=path, resume=True)
    assert watcher.steps == 8 - at  # no step twice, none left out
    assert losses(report) == pytest.approx(losses(undisturbed), rel=1e-5)
    for entry, reference in zip(report["epochs"], undisturbed["epochs"], strict=True):
        assert entry["samples"] == reference["samples"]
        assert entry["validation_loss"] == pytest.approx(reference["validation_loss"], rel=1e-5)
    finished = [e for e in report["epochs"] if e["epoch"] == (at - 1) // 4]
    assert finished[0]["bytes_received"] >= undisturbed["epochs"][0]["bytes_received"] * 0.9
    assert names_in(tmp_path) == ["training.pt"]


@pytest.mark.slow
def test_one_of_several_trainers_goes_on_in_the_middle_of_its_chunk_windows(
    remembered: Handler, tmp_path: Path
) -> None:
    """46 samples of two trainers with batches of 6 are 3 whole rounds and 5 samples each at the end."""
    order = {"shuffle": "chunks:4:3", "trainers": 2, "trainer": 1, "bs": 6}
    whole = train(remembered, **order)
    path = str(tmp_path / "training.pt")
    with pytest.raises(KeyboardInterrupt):
        train(remembered, Interrupting(6, KeyboardInterrupt()), checkpoint=path, **order)
    watcher = Silent()
    report = train(remembered, watcher, checkpoint=path, resume=True, **order)
    assert watcher.steps == 2 and [e["samples"] for e in report["epochs"]] == [23, 23]
    assert losses(report) == pytest.approx(losses(whole), rel=1e-5)
    assert (report["shuffle"], report["trainers"], report["trainer"]) == ("chunks:4:3", 2, 1)
    with pytest.raises(ConflictError, match="its trainer is 1, this one's 0"):
        train(remembered, checkpoint=path, resume=True, **{**order, "trainer": 0})


def test_interrupted_in_validation(
    remembered: Handler, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes effect at once, and the resumed run validates without training the epoch again."""
    path = str(tmp_path / "training.pt")
    with open_session(remembered, validation=0.2) as session:

        def interrupted() -> Iterator[Any]:
            os.kill(os.getpid(), signal.SIGINT)
            yield from ()

        monkeypatch.setattr(session, "validation", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer_of(session, Silent(), checkpoint=path).run()
    watcher = Silent()
    report = train(remembered, watcher, validation=0.2, checkpoint=path, resume=True)
    assert watcher.steps == 4
    assert losses(report) == pytest.approx(losses(undisturbed), rel=1e-5)
    first, reference = report["epochs"][0], undisturbed["epochs"][0]
    assert first["validation_loss"] == pytest.approx(reference["validation_loss"], rel=1e-5)
    assert first["bytes_received"] == reference["bytes_received"]


@pytest.mark.slow
def test_a_resumed_report_counts_all_processes(remembered: Handler, tmp_path: Path) -> None:
    """Splits, stages, seconds and retries of an epoch are those of all that trained it, not of the last process."""
    path = str(tmp_path / "training.pt")
    whole = train(remembered)
    for at in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            train(remembered, Interrupting(at, KeyboardInterrupt()), checkpoint=path, resume=True)
    resumed = train(remembered, checkpoint=path, resume=True)
    assert resumed["resumes"] == 2 and whole["resumes"] == 0
    assert resumed["ended"]["how"] == "finished"
    for entry, reference in zip(resumed["epochs"], whole["epochs"], strict=True):
        assert entry["splits"] == reference["splits"] == [[12, 5]]
        assert entry["server_stage_seconds"].keys() == reference["server_stage_seconds"].keys()
        assert entry["cos_batch"] == reference["cos_batch"]
        assert entry["bytes_received"] >= reference["bytes_received"]
    first = torch.load(path, weights_only=True)["totals"]
    assert resumed["seconds"] >= first["seconds"] > 0


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    remembered: Handler, undisturbed: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``--keep 3`` with a checkpoint for each step; the two newest are cut short."""
    path = tmp_path / "training.pt"
    keeping = {"validation": 0.2, "checkpoint": str(path), "checkpoint_every": 1, "keep": 3}
    with pytest.raises(KeyboardInterrupt):
        train(remembered, Interrupting(6, KeyboardInterrupt()), **keeping)
    assert names_in(tmp_path) == ["training.pt", "training.pt.1", "training.pt.2"]
    for name in ("training.pt", "training.pt.1"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1000])
    watcher = Silent()
    report = train(remembered, watcher, **keeping, resume=True)
    assert watcher.steps == 4, "from after step 4, the oldest"
    assert losses(report) == pytest.approx(losses(undisturbed), rel=1e-5)
    (warning,) = [r.getMessage() for r in caplog.records if "older" in r.getMessage()]
    assert "is not a checkpoint of hapi-train" in warning and "training.pt.2: epoch 1, batch 0" in warning
    for file in tmp_path.iterdir():
        torch.load(file, weights_only=True)


def test_the_damaged_one_is_replaced_before_a_whole_one(tmp_path: Path, remembered: Handler) -> None:
    path = tmp_path / "training.pt"
    keeping = {"checkpoint": str(path), "checkpoint_every": 1, "keep": 2}
    with pytest.raises(KeyboardInterrupt):
        train(remembered, Interrupting(3, KeyboardInterrupt()), **keeping)
    path.write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        train(remembered, Interrupting(1, KeyboardInterrupt()), **keeping, resume=True)
    batches = [torch.load(p, weights_only=True)["progress"]["batch"] for p in (path, f"{path}.1")]
    assert batches == [3, 2]


def test_a_torn_step_is_not_saved(
    remembered: Handler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C inside a step leaves the checkpoint of before it."""
    path = tmp_path / "training.pt"
    with open_session(remembered) as session:
        trainer = trainer_of(session, Silent(), checkpoint=str(path), checkpoint_every=2)
        step = trainer.optimizer.step

        def torn() -> None:
            step()
            if trainer.progress.batch == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(trainer.optimizer, "step", torn)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    assert torch.load(path, weights_only=True)["progress"]["batch"] == 2


def test_the_server_fails_for_good(remembered: Handler, tmp_path: Path) -> None:
    """Whatever the error, the steps that were done are kept."""
    path = tmp_path / "training.pt"
    with open_session(remembered, prefetch_bytes=0) as session:
        watcher = Silent()
        trainer = trainer_of(session, watcher, checkpoint=str(path))
        watcher.on_step = lambda steps: session.close() if steps == 2 else None  # type: ignore[method-assign]
        with pytest.raises(HapiError, match="closed"):
            trainer.run()
    assert torch.load(path, weights_only=True)["progress"]["batch"] >= 2
    assert trainer.has_checkpoint


def test_an_error_that_nobody_foresaw_keeps_the_steps_that_were_done(
    remembered: Handler, tmp_path: Path
) -> None:
    path = tmp_path / "training.pt"
    with open_session(remembered, prefetch_bytes=0) as session:
        watcher = Silent()
        watcher.on_step = lambda steps: [][steps] if steps == 3 else None  # type: ignore[method-assign]
        with pytest.raises(IndexError):
            trainer_of(session, watcher, checkpoint=str(path)).run()
    assert torch.load(path, weights_only=True)["progress"]["batch"] == 3


def test_a_step_beyond_the_host_memory_says_so(
    remembered: Handler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "training.pt"
    with open_session(remembered) as session:
        trainer = trainer_of(session, Silent(), checkpoint=str(path))
        done: list[int] = []

        def full(*_: Any) -> None:
            done.append(1)
            if len(done) == 3:
                raise RuntimeError(
                    "[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"
                )

        monkeypatch.setattr(trainer.optimizer, "step", full)
        with pytest.raises(DeviceMemoryError, match=r"do not fit cpu; choose a smaller --bs"):
            trainer.run()


def test_nothing_done_is_not_saved(
    remembered: Handler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_session(remembered) as session:
        trainer = trainer_of(session, Silent(), checkpoint=str(tmp_path / "training.pt"))
        session.close()
        with pytest.raises(HapiError):
            trainer.run()
    assert not list(tmp_path.iterdir())
    assert not trainer.has_checkpoint


@pytest.mark.slow
def test_a_finished_job_has_nothing_to_do(remembered: Handler, tmp_path: Path) -> None:
    path = str(tmp_path / "training.pt")
    first = train(remembered, checkpoint=path)
    watcher = Silent()
    again = train(remembered, watcher, checkpoint=path, resume=True)
    assert watcher.steps == 0 and again["epochs"] == first["epochs"]
    more = train(remembered, watcher, checkpoint=path, resume=True, epochs=3)
    assert watcher.steps == 5 and len(more["epochs"]) == 3


@pytest.fixture(scope="module")
def begun(remembered: Handler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a job that was stopped after its first step. It stays as it is."""
    path = tmp_path_factory.mktemp("begun") / "training.pt"
    with pytest.raises(KeyboardInterrupt):
        train(remembered, Interrupting(1, KeyboardInterrupt()), checkpoint=str(path))
    return path


def test_a_resumed_run_keeps_its_order(remembered: Handler, begun: Path, tmp_path: Path) -> None:
    """Begun from a disk, resumed where the default order is chunk windows: still the order of the checkpoint."""
    path = tmp_path / "training.pt"
    shutil.copy(begun, path)
    report = train(over_slow_store(remembered), checkpoint=str(path), resume=True)
    assert report["shuffle"] == "full" and report["settings"]["shuffle"] == "auto"
    assert losses(report) == losses(train(remembered))
    assert train(over_slow_store(remembered))["shuffle"].startswith("chunks:")
    with pytest.raises(ConflictError, match="its shuffle is 'full', this one's 'chunks:4:2'"):
        train(over_slow_store(remembered), checkpoint=str(begun), resume=True, shuffle="chunks:4:2")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bs": 12}, "its bs is 10, this one's 12"), ({"weight_decay": 0.1}, "its weight_decay is 0.0, this one's 0.1"),
        ({"seed": 5}, "seed is 0"), ({"freeze": 11}, "freeze is 12"), ({"optimizer": "adam"}, "optimizer is 'sgd'"),
        ({"validation": 0.5}, "training samples is 46"), ({"momentum": 0.1}, "momentum is 0.9"),
        ({"shuffle": "chunks:4:2"}, "its shuffle is 'full', this one's 'chunks:4:2'"),
        ({"trainers": 2}, "its trainers is 1"),
    ],
)  # fmt: skip
def test_another_job_is_refused(
    remembered: Handler, begun: Path, changes: dict[str, Any], match: str
) -> None:
    path = str(begun)
    before = Path(path).read_bytes()
    with pytest.raises(ConflictError, match=match):
        train(remembered, checkpoint=path, resume=True, **changes)
    assert Path(path).read_bytes() == before


def test_a_front_that_was_replaced_is_another_job(remembered: Handler, begun: Path) -> None:
    """The names are the same: pushed anew, or another version of a library's default weights."""
    with open_session(remembered) as session:
        session.job_context.prefix_digests = ("0" * 32,) * len(session.job_context.prefix_digests)
        with pytest.raises(ConflictError, match=r"its frozen layers is '[0-9a-f]{32}', this one's '0{32}'"):
            trainer_of(session, Silent(), checkpoint=str(begun), resume=True).run()


def test_two_jobs_on_one_checkpoint(remembered: Handler, tmp_path: Path) -> None:
    path = str(tmp_path / "training.pt")
    with (
        checkpoint.claimed(path, "--checkpoint x"),
        pytest.raises(ConflictError, match=f"--checkpoint {path}: another hapi-train"),
    ):
        train(remembered, checkpoint=path)
    train(remembered, checkpoint=path, epochs=1)
    assert names_in(tmp_path) == ["training.pt"]
