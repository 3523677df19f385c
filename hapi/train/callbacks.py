"""Following a training from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hapi.client.loading.epoch_stats import PassReport


class TrainingCallback:
    """Callbacks of a training, which do nothing here; the command line draws a progress bar with them."""

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        """Called before ``epoch`` of ``batches`` steps, ``done`` of which were done before a resume."""

    def step_done(self, report: PassReport) -> None:
        """Called after each step."""

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        """Called after an epoch with its element of the report."""
