"""The trained layers as they were after the best epoch, kept for the model file of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class BestEpoch:
    """Keeps a copy of the trained layers after the epoch with the highest validation accuracy.

    Between equal accuracies the lower validation loss counts, then the earlier epoch. Without validation samples it is
    the epoch with the lowest training loss. The copy is on the CPU.
    """

    def __init__(self) -> None:
        self.entry: Mapping[str, Any] | None = None
        """The epoch's element of the report; None before the first epoch ended."""
        self.trained: dict[str, torch.Tensor] = {}
        """State of the trained layers."""

    def offer(self, entry: Mapping[str, Any], trained: nn.Module) -> None:
        """An epoch ended with the figures of ``entry``: keep its state if it is the best so far."""
        if self.entry is None or _rank(entry) > _rank(self.entry):
            self.entry = dict(entry)
            self.trained = {n: t.detach().to("cpu", copy=True) for n, t in trained.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """State of it for a checkpoint."""
        return {"entry": self.entry, "trained": self.trained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; ValueError for anything else."""
        entry, trained = state["entry"], dict(state["trained"])
        if not all(isinstance(tensor, torch.Tensor) for tensor in trained.values()):
            raise ValueError("its best epoch has no tensors")
        self.entry, self.trained = None if entry is None else dict(entry), trained


def _rank(entry: Mapping[str, Any]) -> tuple[float, float]:
    if "validation_accuracy" in entry:
        return entry["validation_accuracy"], -entry["validation_loss"]
    return 0.0, -entry["loss"]
