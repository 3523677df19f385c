"""Figures of a training in Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from hapi.train.callbacks import TrainingStart
from hapi.train.loggers.base import MetricLogger, RemoteRun, hyper_parameters


class WandbLogger(MetricLogger):
    """Sends figures to a run of Weights & Biases, which is called as the folder.

    ``WANDB_PROJECT`` (``hapi`` without it), ``WANDB_MODE=offline`` and the other variables of the library count. The
    folder's ``wandb.json`` remembers the run, so that a resumed training goes on in it.
    """

    title = "wandb"

    def open(self, start: TrainingStart, step: int) -> None:
        """Begin or resume the run."""
        import wandb

        self._run = RemoteRun(self.folder / "wandb.json")
        if not step:
            self._run.run_id, self._run.sent = "", {"step": 0, "epoch": 0}
        self._run.run_id = self._run.run_id or secrets.token_hex(4)
        self._wandb: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hapi"),
            id=self._run.run_id,
            name=self.folder.resolve().name,
            dir=str(self.folder),
            config=hyper_parameters(start),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        for kind in ("step", "epoch"):
            self._wandb.define_metric(f"{kind}/*", step_metric="steps")
        self._run.save()

    def log_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Send a row."""
        self._send("step", step, figures)

    def log_epoch(self, step: int, figures: Mapping[str, float]) -> None:
        """Send a row."""
        self._send("epoch", step, figures)

    def _send(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        if self._run.due(kind, step):
            self._wandb.log({"steps": step, **{f"{kind}/{name}": v for name, v in figures.items()}})
            self._run.note(kind, step)

    def close(self, how: str) -> None:
        """Send what is left, and end the run."""
        self._wandb.finish(exit_code=0 if how in ("finished", "stopped early") else 1)
