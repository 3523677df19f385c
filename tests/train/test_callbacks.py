"""Callbacks of a training: what they are told and when, several at a time, and their failures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_job import Interrupting, open_session, settings_of
from support.thin_resnet import THIN_RESNET

from hapi.errors import DivergedError
from hapi.train.callbacks import StepDone, TrainingCallback, TrainingStart
from hapi.train.trainer import Trainer
from hapi.wire.transport.http import Handler

JOB = {"freeze": 13, "epochs": 2}


class Told(TrainingCallback):
    """Remembers all."""

    def __init__(self, name: str = "", into: list[Any] | None = None) -> None:
        self.name, self.told = name, [] if into is None else into
        self.steps: list[StepDone] = []
        self.losses: list[float] = []

    def training_started(self, start: TrainingStart) -> None:
        self.start = start
        self.told.append((self.name, "start", start.step, len(start.epochs)))

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        self.told.append((self.name, "epoch", epoch, batches, done))

    def step_done(self, step: StepDone) -> None:
        self.steps.append(step)
        self.losses.append(step.figures()["loss"])
        self.told.append((self.name, "step", step.epoch, step.batch, step.step))

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        self.told.append((self.name, "epoch done", entry["epoch"]))

    def training_ended(self, report: Mapping[str, Any]) -> None:
        self.told.append((self.name, "end", report["ended"]["how"]))


def train(handler: Handler, *callbacks: TrainingCallback, **changes: Any) -> dict[str, Any]:
    settings = {**JOB, **changes}
    with open_session(handler, **settings) as session:
        return Trainer(session, settings_of(**settings), callbacks).run()


def test_what_a_callback_is_told(remembered: Handler) -> None:
    callback = Told()
    report = train(remembered, callback, lr=0.25)
    assert callback.told == [
        ("", "start", 0, 0),
        *(
            told
            for epoch in (0, 1)
            for told in (
                ("", "epoch", epoch, 5, 0),
                *(("", "step", epoch, batch, 5 * epoch + batch + 1) for batch in range(5)),
                ("", "epoch done", epoch),
            )
        ),
        ("", "end", "finished"),
    ]
    assert callback.start.facts["model"] == THIN_RESNET and callback.start.facts["settings"]["lr"] == 0.25
    assert [step.samples for step in callback.steps[:5]] == [10, 10, 10, 10, 6]
    assert {tuple(step.rates) for step in callback.steps} == {(0.25,)}
    first = callback.steps[:5]
    mean = sum(float(step.loss) * step.samples for step in first) / 46
    assert report["epochs"][0]["loss"] == pytest.approx(mean, rel=1e-6)
    assert callback.losses[4] == report["epochs"][0]["loss"] and isinstance(first[0].loss, torch.Tensor)
    assert not first[0].loss.requires_grad


def test_several_in_their_order_and_after_a_resume(remembered: Handler, tmp_path: Path) -> None:
    told: list[Any] = []
    path = str(tmp_path / "c.pt")
    with pytest.raises(KeyboardInterrupt):
        train(remembered, Told("a", told), Interrupting(7), Told("b", told), checkpoint=path)
    assert told[:4] == [
        ("a", "start", 0, 0),
        ("b", "start", 0, 0),
        ("a", "epoch", 0, 5, 0),
        ("b", "epoch", 0, 5, 0),
    ]
    assert told[-3:] == [("a", "step", 1, 1, 7), ("a", "end", "interrupted"), ("b", "end", "interrupted")]
    told.clear()
    train(remembered, Told("a", told), checkpoint=path, resume=True)
    assert told[:3] == [("a", "start", 7, 1), ("a", "epoch", 1, 5, 2), ("a", "step", 1, 2, 8)]


class Failing(Told):
    """Raises where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def fail(self, where: str) -> None:
        if where == self.where:
            raise ZeroDivisionError(where)

    def step_done(self, step: StepDone) -> None:
        super().step_done(step)
        self.fail(f"step {step.step}")

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        super().epoch_done(entry)
        self.fail("epoch done")

    def training_ended(self, report: Mapping[str, Any]) -> None:
        super().training_ended(report)
        self.fail("end")


@pytest.mark.parametrize(
    ("where", "position", "how"),
    [("step 3", (0, 3), "failed"), ("epoch done", (1, 0), "failed"), ("end", (2, 0), "finished")],
)
def test_an_error_ends_the_training_with_a_checkpoint(
    remembered: Handler, tmp_path: Path, where: str, position: tuple[int, int], how: str
) -> None:
    callback, after, path = Failing(where), Told(), tmp_path / "c.pt"
    with pytest.raises(ZeroDivisionError) as raised:
        train(remembered, callback, after, checkpoint=str(path))
    assert raised.traceback[-1].name == "fail", "its own traceback"
    saved = torch.load(path, weights_only=True)["progress"]
    assert (saved["epoch"], saved["batch"]) == position
    assert after.told[-1] == ("", "end", how), "the others are told the end"


def test_an_error_at_the_end_hides_no_other(remembered: Handler, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DivergedError):
        train(remembered, Failing("end"), lr=1e6, weight_decay=1e3, epochs=50)
    assert "Failing.training_ended: ZeroDivisionError('end')" in caplog.text
