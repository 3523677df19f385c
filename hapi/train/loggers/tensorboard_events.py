"""Figures of a training as TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hapi.train.callbacks import TrainingStart
from hapi.train.loggers.base import MetricLogger, hyper_parameters


class TensorBoardLogger(MetricLogger):
    """Writes events into ``tensorboard/`` of a folder: ``tensorboard --logdir runs`` shows them.

    Scalars are ``step/loss``, ``step/lr``, ``epoch/accuracy`` and so on, over the number of the step. A resumed
    training purges the steps that it repeats.
    """

    title = "tensorboard"

    def open(self, start: TrainingStart, step: int) -> None:
        """Begin a file of events; the first has the settings as hyper-parameters."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer: Any = SummaryWriter(
            str(self.folder / "tensorboard"), purge_step=step + 1 if step else None, flush_secs=10
        )
        if not step:
            writer: Any = self._writer.file_writer
            for summary in hparams(hyper_parameters(start), {"epoch/loss": 0.0}):
                writer.add_summary(summary)
        self._writer.flush()

    def log_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Add scalars."""
        for name, value in figures.items():
            if name not in ("epoch", "batch"):
                self._writer.add_scalar(f"step/{name}", value, step)

    def log_epoch(self, step: int, figures: Mapping[str, float]) -> None:
        """Add scalars, and write all that there are."""
        for name, value in figures.items():
            self._writer.add_scalar(f"epoch/{name}", value, step)
        self._writer.flush()

    def close(self, how: str) -> None:
        """Write all, and end the file."""
        self._writer.close()
