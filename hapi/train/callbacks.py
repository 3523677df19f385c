"""Following a training from outside: the progress bar, loggers, and whatever a user hangs in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hapi.client.loading.epoch_stats import PassReport

log = logging.getLogger("hapi.client")


@dataclass(frozen=True, kw_only=True)
class TrainingStart:
    """Facts of a training that begins or goes on."""

    facts: Mapping[str, Any]
    """The job as in the report: ``model``, ``dataset``, ``settings`` and so on, JSON-able."""
    step: int
    """Steps that were done before a resume; 0 for a new training."""
    epochs: Sequence[Mapping[str, Any]]
    """The report's elements of the epochs before a resume."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """Facts of a step that was just done."""

    epoch: int
    """Number from 0."""
    batch: int
    """Number in the epoch, from 0."""
    step: int
    """Number in the whole training, from 1; a resumed training counts on."""
    samples: int
    """Samples of the batch."""
    loss: torch.Tensor
    """Mean over the batch, a scalar on the device: ``float(loss)`` waits for the device."""
    rates: Sequence[float]
    """Learning rates of the optimiser's groups of parameters."""
    figures: Callable[[], Mapping[str, Any]]
    """Function that returns the epoch's means so far (``loss``, ``accuracy``); it waits for the device."""
    report: PassReport
    """Counters of the epoch's pass: samples, bytes, seconds of waiting."""


class TrainingCallback:
    """Base of what follows a training; every method does nothing here, so override those that matter::

        class Patience(TrainingCallback):
            def epoch_done(self, entry):
                print(entry["epoch"], entry["loss"])

        hapi.Trainer(session, settings, callbacks=[Patience()]).run()

    Methods are called in the trainer's thread, in the order of the list, and training waits for them. An exception in
    one ends the training with a checkpoint of the last whole step, and reaches the caller of :meth:`hapi.Trainer.run`.
    """

    def training_started(self, start: TrainingStart) -> None:
        """Follow the start: once, after a resume has restored the state, before the first epoch."""

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        """Follow the start of ``epoch``, which has ``batches`` steps; ``done`` of them were done before a resume."""

    def step_done(self, step: StepDone) -> None:
        """Follow a step."""

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        """Follow an epoch's end, with its element of the report, after validation and checkpoint."""

    def training_ended(self, report: Mapping[str, Any]) -> None:
        """Follow the end, however it came: ``report["ended"]["how"]`` is ``finished``, ``failed`` and so on."""


class Callbacks:
    """Several callbacks as one: each is called in turn."""

    def __init__(self, callbacks: Sequence[TrainingCallback]) -> None:
        self._callbacks = tuple(callbacks)
        self._started = False

    def training_started(self, start: TrainingStart) -> None:
        """Tell all; from now on :meth:`training_ended` reaches them."""
        self._started = True
        for callback in self._callbacks:
            callback.training_started(start)

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        """Tell all."""
        for callback in self._callbacks:
            callback.epoch_started(epoch, batches, done)

    def step_done(self, step: StepDone) -> None:
        """Tell all."""
        for callback in self._callbacks:
            callback.step_done(step)

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        """Tell all."""
        for callback in self._callbacks:
            callback.epoch_done(entry)

    def training_ended(self, report: Mapping[str, Any], error: BaseException | None = None) -> None:
        """Tell all, whatever becomes of the others; nothing for a training that never started.

        Args:
            report: the training's report.
            error: the error that ended the training; with one, a callback's own is only logged. Without, the first
                of theirs is raised when all were told.
        """
        raised: Exception | None = None
        for callback in self._callbacks if self._started else ():
            try:
                callback.training_ended(report)
            except Exception as failed:
                if error is not None or raised is not None:
                    log.warning("%s.training_ended: %r", type(callback).__name__, failed)
                raised = raised or failed
        if raised is not None and error is None:
            raise raised
