"""The trained layers as they were after the best epoch, kept for the model file of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hapi.train.objective.names import METRICS, BestName
from hapi.train.objective.validation import DETAILS


def score(entry: Mapping[str, Any], metric: BestName = "auto") -> float:
    """Return the figure by which the epoch of ``entry`` is judged; a higher one is better.

    ``auto`` is the validation accuracy, where there is one, otherwise the loss. A value that is missing or no number is
    the worst. Without validation samples it is the training loss.

    Args:
        entry: the epoch's element of the report.
        metric: name of a metric, or ``loss``.
    """
    if "validation_loss" not in entry:
        return _sound(entry["loss"], higher=False)
    name: BestName = metric
    if name == "auto":
        name = "loss" if entry.get("validation_accuracy") is None else "accuracy"
    return _sound(entry.get(f"validation_{name}"), higher=name != "loss" and METRICS[name].higher)


def rank(entry: Mapping[str, Any], metric: BestName = "auto") -> tuple[float, float]:
    """Return :func:`score`, and to decide between equals one for the loss.

    Args:
        entry: the epoch's element of the report.
        metric: name of a metric, or ``loss``.
    """
    return score(entry, metric), score(entry, "loss")


def _sound(value: float | None, *, higher: bool) -> float:
    if value is None or math.isnan(value):
        return -math.inf
    return value if higher else -value


class BestEpoch:
    """Keeps a copy of the trained layers after the best epoch, by :func:`rank`; of equals after the earliest.

    The copy is on the CPU.

    Args:
        metric: name of the metric that decides.
    """

    def __init__(self, metric: BestName = "auto") -> None:
        self._metric: BestName = metric
        self.entry: Mapping[str, Any] | None = None
        """The epoch's element of the report; None before the first epoch ended."""
        self.trained: dict[str, torch.Tensor] = {}
        """State of the trained layers."""

    def offer(self, entry: Mapping[str, Any], trained: nn.Module) -> None:
        """An epoch ended with the figures of ``entry``: keep its state if it is the best so far."""
        if self.entry is None or rank(entry, self._metric) > rank(self.entry, self._metric):
            self.entry = {name: value for name, value in entry.items() if name != DETAILS}
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
