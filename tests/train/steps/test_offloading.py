"""States of the optimiser on disk: bitwise the same training, also resumed, killed and checked."""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_job import Interrupting, open_session, settings_of, trainer_of
from support.profiler_tools import heavy

from hapi.cache.disk_rates import DiskRates
from hapi.cli.main import main
from hapi.client.planning import split_source
from hapi.client.planning.split_source import offload_of
from hapi.errors import DivergedError, UsageError
from hapi.offload.failures import OffloadError
from hapi.offload.optimizer import OffloadedOptimizer
from hapi.offload.states.disk import DiskStates
from hapi.offload.training import offload_training
from hapi.profiler.cost import memory
from hapi.profiler.fit import Sizes
from hapi.profiler.offload_costs import OffloadChoice, OffloadCosts, OffloadTerms
from hapi.train.report_facts import offload_text
from hapi.wire.transport.http import Handler

ALL: dict[str, Any] = {
    "optimizer": "adamw", "clip_norm": 1.0, "accumulate": 2, "ema": 0.9, "head_lr": 0.02, "schedule": "one-cycle",
    "warmup": 2, "weight_decay": 0.01, "decay_norm_bias": False,
}  # fmt: skip


def trained(
    remembered: Handler, at: int | None = None, **changes: Any
) -> tuple[dict[str, torch.Tensor], list[Any], dict[str, Any]]:
    """Layers after a run, its losses, and what the report says of the place of the states."""
    with open_session(remembered, **changes) as session:
        trainer = trainer_of(session, None if at is None else Interrupting(at), **changes)
        if at is not None:
            with pytest.raises(KeyboardInterrupt):
                trainer.run()
            return {}, [], {}
        report = trainer.run()
        layers = {"trained": trainer.trained, "evaluated": trainer._step.evaluated}
        state = {f"{k}.{n}": t.clone() for k, m in layers.items() for n, t in m.state_dict().items()}
    return state, [entry["loss"] for entry in report["epochs"]], report["offload"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow_except("{'optimizer': 'sgd', 'momentum': 0.9}")
@pytest.mark.parametrize(
    "changes", [ALL, {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adam"}], ids=str
)
def test_disk_is_bitwise_memory(remembered: Handler, tmp_path: Path, changes: dict[str, Any]) -> None:
    expected, losses, off = trained(remembered, **changes)
    assert off["where"] == "off" and "not needed" in off["why"]
    state, found, facts = trained(remembered, offload="disk", offload_dir=(str(tmp_path),), **changes)
    assert (found, same(state, expected)) == (losses, True)
    assert facts["where"] == "disk" and facts["cost"]["bytes_written"] >= facts["bytes_a_step"] // 2
    assert facts["folders"] == [str(tmp_path)] and facts["state_bytes"] * 2 < facts["disk_bytes"]
    assert facts["step_seconds"] >= facts["cost"]["waited_seconds"] > 0
    text = offload_text({"offload": facts})
    assert f"{facts['cost']['taken_steps']} steps read and wrote" in text and str(tmp_path) in text
    assert offload_text({"offload": off}) == ""
    assert list(tmp_path.iterdir()) == []  # removed at the end


@pytest.mark.slow
def test_steps_hold_what_was_computed_ahead(remembered: Handler, tmp_path: Path) -> None:
    """The rate of a schedule is set before backward: what an update computed ahead is what the step wants."""
    changes = {"optimizer": "adamw", "schedule": "one-cycle", "clip_norm": 1e6}
    cost = trained(remembered, offload="disk", offload_dir=(str(tmp_path),), **changes)[2]["cost"]
    assert cost["speculated_pieces"] > 5 and cost["redone_steps"] <= 1


@pytest.fixture(scope="module")
def uninterrupted(remembered: Handler) -> tuple[dict[str, torch.Tensor], list[Any], dict[str, Any]]:
    """The run of :data:`ALL` in memory."""
    return trained(remembered, offload="off", **ALL)


@pytest.mark.slow_except("off-disk")
@pytest.mark.parametrize(
    ("first", "then"), [("disk", "off"), ("off", "disk"), ("disk", "disk"), ("host", "disk")]
)
def test_a_checkpoint_goes_on_elsewhere(
    remembered: Handler, uninterrupted: Any, tmp_path: Path, first: str, then: str
) -> None:
    job: dict[str, Any] = {**ALL, "output": str(tmp_path / "run")}
    expected, losses, _ = uninterrupted
    trained(remembered, 8 if first == "disk" else 7, offload=first, **job)
    state, found, facts = trained(remembered, offload=then, resume=True, **job)
    assert (found, same(state, expected)) == (losses, True)
    if then == "disk":
        assert facts["cost"]["taken_steps"] < facts["cost"]["steps"], (
            "what it moved is of this process's steps"
        )
    assert not (tmp_path / "run" / "hapi-offload").exists()


@pytest.mark.slow
def test_features_that_are_kept_change_nothing(remembered: Handler, tmp_path: Path) -> None:
    """Later epochs read their features from a disk, while the states go to one too."""
    job: dict[str, Any] = {**ALL, "epochs": 4}
    expected, losses, _ = trained(remembered, **job)
    kept: dict[str, Any] = {**job, "cache": "on", "cache_dir": str(tmp_path / "features")}
    asked: list[str] = []

    def counted(method: str, path: str, body: bytes) -> Any:
        asked.extend([path] if path.endswith("/extract") else [])
        return remembered(method, path, body)

    state, found, facts = trained(counted, offload="disk", offload_dir=(str(tmp_path / "states"),), **kept)
    assert (found, same(state, expected)) == (losses, True) and facts["cost"]["taken_steps"] > 5
    first = len(asked)
    trained(counted, **{**job, "epochs": 1})
    assert first == len(asked) - first > 0, "the epochs after the first one ask for nothing"


def test_a_second_job_on_one_folder_is_refused(remembered: Handler, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "adamw", "offload": "disk", "offload_dir": (str(tmp_path),)}
    with open_session(remembered, **changes) as session, open_session(remembered, **changes) as other:
        trainer = trainer_of(session, **changes)
        with pytest.raises(UsageError, match="in use by another job"):
            trainer_of(other, **changes)
        trainer.offloading.close()


def killed(remembered: Handler, **changes: Any) -> None:
    """Leave what a killed run leaves."""
    with open_session(remembered, **changes) as session:
        trainer = trainer_of(session, Interrupting(3), **changes)
        with pytest.raises(KeyboardInterrupt):
            trainer._run()
        optimizer = trainer.optimizer
        assert isinstance(optimizer, OffloadedOptimizer)
        optimizer.close(remove=False)


@pytest.mark.slow
def test_what_a_killed_process_left_is_replaced(remembered: Handler, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "adamw", "offload": "disk", "offload_dir": (str(tmp_path),)}
    killed(remembered, **changes)
    assert (tmp_path / "hapi-offload" / "states").exists()
    expected, losses, _ = trained(remembered, optimizer="adamw")
    state, found, _ = trained(remembered, **changes)
    assert (found, same(state, expected)) == (losses, True)


@pytest.mark.slow
def test_what_a_killed_process_left_goes_also_without_offloading(remembered: Handler, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "adamw", "output": str(tmp_path / "run")}
    killed(remembered, offload="disk", **changes)
    assert (tmp_path / "run" / "hapi-offload" / "states").exists()
    trained(remembered, offload="off", resume=True, **changes)
    assert not (tmp_path / "run" / "hapi-offload").exists()


def test_states_that_a_loop_goes_on_from_are_left_alone(remembered: Handler, tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    _, loop = offload_training(model, torch.optim.AdamW(model.parameters()), "1KB", tmp_path)
    assert isinstance(loop, OffloadedOptimizer)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        loop.step()
        loop.zero_grad()
    loop.close(remove=False)
    changes: dict[str, Any] = {"optimizer": "adamw", "offload_dir": (str(tmp_path),)}
    with open_session(remembered, **changes) as session:
        with pytest.raises(UsageError, match="holds the states of another job"):
            trainer_of(session, offload="disk", **changes)
        trainer_of(session, **changes)
    again = torch.nn.Linear(64, 64)
    _, found = offload_training(again, torch.optim.AdamW(again.parameters()), "1KB", tmp_path)
    assert isinstance(found, OffloadedOptimizer) and found.steps == 2
    found.close()


@pytest.mark.slow
def test_a_disk_that_fails_says_what_is_left(
    remembered: Handler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is what a training goes on from, so the message does not name the folder, and it is emptied."""
    states = tmp_path / "states"
    changes: dict[str, Any] = {"optimizer": "adamw", "offload": "disk", "offload_dir": (str(states),)}
    changes |= {"output": str(tmp_path / "run")}
    write, written = DiskStates.write, []

    def failing(self: DiskStates, *args: Any) -> None:
        written.append(args)
        if len(written) > 6:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "states")
        write(self, *args)

    with open_session(remembered, **changes) as session, monkeypatch.context() as patch:
        trainer = trainer_of(session, **changes)
        patch.setattr(DiskStates, "write", failing)
        with pytest.raises(OffloadError, match=r"Input/output error .*goes on from its checkpoint") as raised:
            trainer.run()
        assert trainer.report()["ended"]["how"] == "failed" and str(states) in str(raised.value)
    assert list(states.iterdir()) == []
    expected, losses, _ = trained(remembered, optimizer="adamw")
    state, found, _ = trained(remembered, resume=True, **changes)
    assert (found, same(state, expected)) == (losses, True)


def test_asked_for_where_all_fits_activations_have_the_whole_memory(
    remembered: Handler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job: dict[str, Any] = {"optimizer": "adamw", "offload": "disk", "offload_dir": (str(tmp_path),)}
    settings = settings_of(**job)
    with open_session(remembered, **job) as session:
        session.offload = offload_of(
            settings, session.job_context, session.budget, 2.0, OffloadTerms(wanted="disk", states=2)
        )
        assert session.offload.where == "disk" and not session.offload.is_needed
        trainer = trainer_of(session, **job)
        trainer.offloading.close()
    assert "does not hold" not in caplog.text


def test_states_that_are_not_finite_are_found_piece_by_piece(remembered: Handler, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "adamw", "offload": "disk", "offload_dir": (str(tmp_path),)}
    with open_session(remembered, **changes) as session:
        trainer = trainer_of(session, Interrupting(2), **changes)
        with pytest.raises(KeyboardInterrupt):
            trainer._run()
        trainer._finite.check_state(0, 2)
        state = trainer.optimizer.state_dict()
        state["state"][1]["exp_avg_sq"].view(-1)[-1] = float("inf")
        trainer.optimizer.load_state_dict(state)
        trainer._finite._sound = False
        with pytest.raises(DivergedError, match="exp_avg_sq of parameter 1 is not finite"):
            trainer._finite.check_state(0, 2)
        trainer.offloading.close()


def test_auto_offloads_what_does_not_fit_and_says_what_it_costs(
    remembered: Handler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job: dict[str, Any] = {"optimizer": "adamw", "freeze": 12, "offload_dir": (str(tmp_path),)}
    with open_session(remembered, **job) as session:
        session.offload = OffloadChoice(
            where="disk",
            is_needed=True,
            freed=1,
            costs=OffloadCosts(parameters=1, states=2),
            fitting_freeze=13,
        )
        with caplog.at_level(logging.INFO, "hapi.client"):
            trainer = trainer_of(session, **job)
        assert trainer.offloading.where == "disk"
        trainer.offloading.close()
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("offload:")]
    assert "does not fit" in line and "read and" in line and str(tmp_path) in line
    assert line.endswith("--freeze 13 would fit without")


def test_auto_offloads_for_a_faster_split_of_a_given_profile_as_the_plan_does(
    remembered: Handler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [
        replace(x, server_seconds=float(i > 0), client_seconds=0.01) for i, x in enumerate(heavy().layers)
    ]
    profile = replace(heavy(), layers=tuple(layers))
    profile.save(str(tmp_path / "profile.json"))
    sizes = Sizes(
        model="crafted", freeze=2, last_split=2, layers=profile.layers, samples=profile.samples,
        client=profile.client_tier, optimizer_bytes_per_parameter_byte=2.0,
    )  # fmt: skip
    monkeypatch.setattr(split_source, "_sizes", lambda *_: sizes)
    with open_session(remembered) as session:
        job = split_source._job(session.settings, session.job_context, session.budget)
        room = memory(profile, job, 2).peak
        settings = replace(session.settings, profile=str(tmp_path / "profile.json"))
        context = replace(session.job_context, strategy="auto")
        monkeypatch.setattr(session.budget, "bytes", room)
        terms = OffloadTerms(wanted="auto", states=2, rates=lambda: (8e9, 8e9))
        chosen = offload_of(settings, context, session.budget, 2.0, terms)
        session.offload = replace(chosen, freed=1)
        trainer = trainer_of(session, optimizer="adamw", offload_dir=(str(tmp_path),))
        trainer.offloading.close()
    assert chosen.faster is not None and trainer.offloading.why == str(chosen.faster)
    flags = (f"--memory={room}B", f"--bs={job.bs}", f"--samples={job.samples}", f"--epochs={job.epochs}")
    more = ("--disk-read=8GB/s", "--disk-write=8GB/s", "--json")
    assert main(("plan", "--profile", str(tmp_path / "profile.json"), *flags, *more)) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["offload"]["where"], planned["split"]) == ("disk", chosen.faster.split)


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_a_profile_the_first_steps_price_it(
    accumulate: int,
    remembered: Handler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("hapi.train.steps.offloading.measure_disk", lambda folder: DiskRates(1e2, 1e2))
    job = {"optimizer": "adamw", "offload": "disk", "offload_dir": (str(tmp_path),), "accumulate": accumulate}
    _, _, facts = trained(remembered, **job, epochs=4)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("offload: ")]
    assert len(lines) == 2 and "free where forward and backward take as long" in lines[0]
    assert lines[1].startswith("offload: as the first steps show, ") and " which adds " in lines[1]
    assert "no batch of 46 samples would hide that" in lines[1] and facts["where"] == "disk"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"offload": "disk", "optimizer": "rmsprop"}, "needs --optimizer adamw, adam or sgd"),
        ({"offload": "off", "offload_dir": ("x",)}, "--offload-dir needs --offload disk or auto"),
        ({"offload": "disk", "offload_dir": ("x", "./x/")}, "--offload-dir: each drive has one folder"),
    ],
)
def test_refused(remembered: Handler, changes: dict[str, Any], said: str) -> None:
    with open_session(remembered, **changes) as session, pytest.raises(UsageError, match=said):
        trainer_of(session, **changes)
