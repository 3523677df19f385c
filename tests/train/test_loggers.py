"""Loggers of a training: what they wrote is read back, also after a resume; their failures end nothing."""

from __future__ import annotations

import csv
import json
import logging
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.local_job import Interrupting, open_session, settings_of
from support.thin_resnet import THIN_RESNET

from hapi.errors import UsageError
from hapi.train.callbacks import TrainingCallback, TrainingStart
from hapi.train.loggers.base import MetricLogger, RemoteRun
from hapi.train.loggers.choose import LoggerName, check_loggers, make_loggers
from hapi.train.trainer import Trainer
from hapi.wire.transport.http import Handler

JOB: dict[str, Any] = {"freeze": 13, "epochs": 3, "lr": 0.01}
START = TrainingStart(
    facts={"model": "m", "settings": {"lr": 0.1, "none": None, "blocks": ["a"]}}, step=0, epochs=[]
)


def train(handler: Handler, *callbacks: TrainingCallback, **changes: Any) -> dict[str, Any]:
    settings = {**JOB, **changes}
    with open_session(handler, **settings) as session:
        return Trainer(session, settings_of(**settings), callbacks).run()


def killed_and_resumed(handler: Handler, folder: Path, make: Callable[[], MetricLogger]) -> dict[str, Any]:
    """A training of 15 steps that dies after step 9 without an end, its last checkpoint that of step 5."""
    first, checkpoint = make(), str(folder / "c.pt")
    with (
        mock.patch.object(first, "training_ended"),
        mock.patch("hapi.train.checkpoints.keeping.Keeper.last"),
        pytest.raises(KeyboardInterrupt),
    ):
        train(handler, first, Interrupting(9), checkpoint=checkpoint)
    return train(handler, make(), checkpoint=checkpoint, resume=True)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- CSV ---------------------------------------------------------------------------------------------------------


def test_csv(remembered: Handler, tmp_path: Path) -> None:
    (logger,) = make_loggers(["csv"], tmp_path / "run", every=2)
    report = train(remembered, logger)
    steps, epochs = rows(tmp_path / "run" / "steps.csv"), rows(tmp_path / "run" / "epochs.csv")
    assert [row["step"] for row in steps] == ["2", "4", "6", "8", "10", "12", "14"]
    assert list(steps[0]) == ["step", "epoch", "batch", "loss", "lr"]
    assert (steps[2]["epoch"], steps[2]["batch"], steps[2]["lr"]) == ("1", "0", "0.01")
    assert [float(row["loss"]) for row in epochs] == [epoch["loss"] for epoch in report["epochs"]]
    assert float(epochs[1]["accuracy"]) == report["epochs"][1]["accuracy"] and epochs[1]["samples"] == "46"


def test_csv_after_a_resume(remembered: Handler, tmp_path: Path) -> None:
    undisturbed = make_loggers(["csv"], tmp_path / "undisturbed", every=1)
    train(remembered, *undisturbed)
    report = killed_and_resumed(remembered, tmp_path, lambda: make_loggers(["csv"], tmp_path, every=1)[0])
    steps = rows(tmp_path / "steps.csv")
    assert [int(row["step"]) for row in steps] == list(range(1, 16))
    assert steps == rows(tmp_path / "undisturbed" / "steps.csv")
    assert [float(row["loss"]) for row in rows(tmp_path / "epochs.csv")] == [
        e["loss"] for e in report["epochs"]
    ]


def test_csv_keeps_no_torn_row_and_takes_new_columns(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("step,loss\n1,0.5\n2,0.25\n3,0.125\n4,0.0")
    (logger,) = make_loggers(["csv"], tmp_path)
    logger.open(TrainingStart(facts={}, step=2, epochs=[{"epoch": 0, "loss": 1.5, "splits": []}]), 2)
    logger.log_step(3, {"loss": 3.0, "lr_1": 0.5})
    logger.log_step(4, {"loss": 4.0, "lr_1": 0.25})
    logger.log_epoch(4, {"epoch": 1, "loss": 1.0, "validation_loss": 2.0})
    assert (tmp_path / "steps.csv").read_text() == "step,loss,lr_1\n1,0.5,\n2,0.25,\n3,3.0,0.5\n4,4.0,0.25\n"
    assert (tmp_path / "epochs.csv").read_text() == "epoch,loss,validation_loss\n0,1.5,\n1,1.0,2.0\n"


# -- TensorBoard -------------------------------------------------------------------------------------------------


def events(folder: Path) -> Any:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = loader.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    return accumulator.Reload()


@pytest.mark.slow
def test_tensorboard_after_a_resume(remembered: Handler, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    report = killed_and_resumed(
        remembered, tmp_path, lambda: make_loggers(["tensorboard"], tmp_path, every=1)[0]
    )
    found = events(tmp_path)
    assert [event.step for event in found.Scalars("step/loss")] == list(range(1, 16))
    assert {round(event.value, 6) for event in found.Scalars("step/lr")} == {0.01}
    epochs = found.Scalars("epoch/loss")
    assert [event.step for event in epochs] == [5, 10, 15]
    assert [event.value for event in epochs] == pytest.approx([e["loss"] for e in report["epochs"]])
    assert THIN_RESNET.encode() in found.summary_metadata["_hparams_/session_start_info"].plugin_data.content


# -- services, offline -------------------------------------------------------------------------------------------


def test_mlflow_after_a_resume(remembered: Handler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    report = killed_and_resumed(remembered, tmp_path, lambda: make_loggers(["mlflow"], tmp_path, every=1)[0])
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("hapi").experiment_id])
    history = client.get_metric_history(run.info.run_id, "step/loss")
    assert [metric.step for metric in history] == list(range(1, 16))
    epochs = client.get_metric_history(run.info.run_id, "epoch/loss")
    assert [metric.step for metric in epochs] == [5, 10, 15]
    assert [metric.value for metric in epochs] == [epoch["loss"] for epoch in report["epochs"]]
    assert run.data.params["model"] == THIN_RESNET and run.data.params["lr"] == "0.01"
    assert run.info.status == "FINISHED"


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Records of a file of wandb: a header of 7 bytes, then LevelDB's log, blocks of 32 KiB with pieces of records."""
    record = b""
    for start in range(0, len(content), 32768):
        block, at = content[start : start + 32768], 7 if start == 0 else 0
        while at + 7 <= len(block):
            length, kind = struct.unpack_from("<HB", block, at + 4)
            record += block[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # the whole, or its last piece
                yield record
                record = b""


def test_wandb_offline_after_a_resume(
    remembered: Handler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    killed_and_resumed(remembered, tmp_path, lambda: make_loggers(["wandb"], tmp_path, every=1)[0])
    steps: list[float] = []
    ids = set()
    for file in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            ids |= {record.run.run_id} - {""}
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            steps += [row["steps"]] if "step/loss" in row else []
    assert steps == list(range(1, 16)) and len(ids) == 1


def test_a_resumed_run_sends_nothing_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RemoteRun(tmp_path / "x.json")
    run.run_id = "abc"
    run.note("step", 7)
    run.note("epoch", 5)
    again = RemoteRun(tmp_path / "x.json")
    assert (
        again.run_id == "abc" and not again.due("step", 7) and again.due("step", 8) and again.due("epoch", 6)
    )
    (tmp_path / "x.json").write_text("{")
    assert RemoteRun(tmp_path / "x.json").run_id == "" and "is damaged" in caplog.text


# -- failures ----------------------------------------------------------------------------------------------------


class Unsteady(MetricLogger):
    """Fails between steps 3 and 8."""

    title = "unsteady"
    FIRST_PAUSE = LONGEST_PAUSE = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, every=1)
        self.opened: list[int] = []
        self.logged: list[int] = []

    def open(self, start: TrainingStart, step: int) -> None:
        self.opened.append(step)

    def log_step(self, step: int, figures: Mapping[str, float]) -> None:
        if 3 <= step < 8:
            raise RuntimeError("the server\nis away")
        self.logged.append(step)

    def log_epoch(self, step: int, figures: Mapping[str, float]) -> None:
        pass


def test_a_failure_is_told_once_and_training_goes_on(
    remembered: Handler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = Unsteady(tmp_path)
    report = train(remembered, logger)
    assert report["ended"]["how"] == "finished"
    assert logger.logged == [1, 2, *range(8, 16)] and logger.opened[-1] == 8
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["--log unsteady: the server is away; training goes on, and it is tried again"]


def test_a_folder_that_cannot_be_written(
    remembered: Handler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    names: list[LoggerName] = ["csv"]
    report = train(remembered, *make_loggers(names, tmp_path / "file" / "run"), epochs=1)
    assert report["ended"]["how"] == "finished" and caplog.text.count("--log csv: ") == 1


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where a folder of its name lies in the working directory, as wandb makes one."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.meta_path", sys.meta_path[-1:])
    for name in ("tensorboard", "wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(
            UsageError, match=rf"--log {name}: needs {name}, .* pip install 'hapi-split\[{name}\]'"
        ):
            check_loggers([name])  # type: ignore[list-item]
    check_loggers(["csv"])
