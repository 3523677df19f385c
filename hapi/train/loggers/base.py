"""The common part of the loggers: which figures go out and when, and failures that end no training."""

from __future__ import annotations

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hapi.train.callbacks import StepDone, TrainingCallback, TrainingStart
from hapi.wire.documents import parse_document

log = logging.getLogger("hapi.client")


class MetricLogger(TrainingCallback, ABC):
    """Base of the loggers: loss and learning rate of every ``every``-th step, and all figures of each epoch.

    A failure, such as a full disk or a server that does not answer, is logged once. The logger then pauses, opens
    anew and goes on. Figures of the pauses are missing; training never is.
    """

    FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0
    """Seconds between two tries after a failure."""
    title = ""
    """Name as ``--log`` takes it."""

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        """Log into ``folder``, which need not exist yet, about every ``every``-th step."""
        self.folder, self._every = Path(folder), every
        self.start: TrainingStart | None = None
        """The training; None before it started."""
        self._step = 0
        self._opened = self._failed = False
        self._pause, self._again_at = self.FIRST_PAUSE, 0.0

    # -- for each kind of logger -----------------------------------------------------------------------------

    @abstractmethod
    def open(self, start: TrainingStart, step: int) -> None:
        """Open for a training, ``step`` steps of which are done; entries of later steps are of a lost past."""

    @abstractmethod
    def log_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step: epoch, batch, loss, rates."""

    @abstractmethod
    def log_epoch(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of an epoch that ended after ``step`` steps."""

    def close(self, how: str) -> None:
        """Close; ``how`` is the training's end, as in the report."""

    # -- callbacks -------------------------------------------------------------------------------------------

    def training_started(self, start: TrainingStart) -> None:
        """Open."""
        self.start, self._step = start, start.step
        self._safely(lambda: None)

    def step_done(self, step: StepDone) -> None:
        """Log the step if it is its turn."""
        self._step = step.step
        if step.step % self._every == 0:
            rates = {f"lr_{n}" if n else "lr": rate for n, rate in enumerate(step.rates)}
            figures = finite({"epoch": step.epoch, "batch": step.batch, "loss": float(step.loss), **rates})
            self._safely(lambda: self.log_step(step.step, figures))

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        """Log the epoch."""
        figures = finite(entry)
        self._safely(lambda: self.log_epoch(self._step, figures))

    def training_ended(self, report: Mapping[str, Any]) -> None:
        """Close."""
        if self._opened:
            self._safely(lambda: self.close(report["ended"]["how"]))
            self._opened = False

    def _safely(self, action: Callable[[], None]) -> None:
        """Do it, opened; a failure of whatever kind the library has is told once."""
        if self.start is None or time.monotonic() < self._again_at:
            return
        try:
            if not self._opened:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.open(self.start, self._step)
                self._opened = True
            action()
        except Exception as error:
            if not self._failed:
                said = " ".join(str(error).split()) or type(error).__name__
                log.warning("--log %s: %s; training goes on, and it is tried again", self.title, said[:300])
            self._failed, self._opened = True, False
            self._again_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, self.LONGEST_PAUSE)


def finite(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that are finite numbers."""
    return {
        name: value
        for name, value in entry.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def hyper_parameters(start: TrainingStart) -> dict[str, str | int | float | bool]:
    """Return model, data and the settings that have a value, as the loggers' libraries take them."""
    found = {name: start.facts[name] for name in ("model", "weights", "freeze_name") if name in start.facts}
    found["dataset"] = start.facts.get("dataset", {}).get("name", "")
    settings = {k: v for k, v in start.facts.get("settings", {}).items() if v not in (None, [], "")}
    return {
        name: value if isinstance(value, str | int | float | bool) else json.dumps(value)
        for name, value in {**settings, **found}.items()
    }


class RemoteRun:
    """The run of a logger that keeps its entries elsewhere: its id, and the last steps that were sent.

    A resumed training repeats steps bit for bit, so those that were sent before are not sent again.
    """

    def __init__(self, path: Path) -> None:
        """Read ``path``, the file in the run folder that remembers it, if it exists."""
        self._path = path
        self.run_id = ""
        """Id at the service; empty for a new run."""
        self.sent = {"step": 0, "epoch": 0}
        """Last step whose figures were sent, and the last one after which an epoch's were."""
        try:
            document = parse_document(path.read_bytes())
            self.run_id = str(document["run"])
            self.sent = {kind: int(document[kind]) for kind in self.sent}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%s); a new run is begun", path, error)

    def due(self, kind: str, step: int) -> bool:
        """Return whether the ``kind``'s ("step" or "epoch") figures at ``step`` are still to be sent."""
        return step > self.sent[kind]

    def note(self, kind: str, step: int) -> None:
        """Remember that they were sent; OSError when that fails."""
        self.sent[kind] = step
        self.save()

    def save(self) -> None:
        """Write the file; OSError when that fails."""
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text(json.dumps({"run": self.run_id, **self.sent}))
        partial.replace(self._path)
