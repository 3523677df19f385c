"""Losses by the kind of labels, as plain PyTorch computes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from hapi.train.objective.names import LossName


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss:
    """A loss over a batch of outputs and targets.

    Outputs are float [n, k]; targets int64 [n] for ``cross-entropy``, otherwise float32 [n, k].
    """

    name: LossName = "cross-entropy"
    smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    weights: torch.Tensor | None = None
    """Float32 [k] on the outputs' device: weight of each class, with ``bce`` of its positive samples."""
    delta: float = 1.0
    """Error from which ``huber`` is linear."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean that training minimises, a scalar; a weighted cross-entropy divides by the weights' sum."""
        if self.name == "cross-entropy":
            return functional.cross_entropy(
                outputs, targets, weight=self.weights, label_smoothing=self.smoothing
            )
        if self.name == "bce":
            smooth = targets * (1 - self.smoothing) + 0.5 * self.smoothing if self.smoothing else targets
            return functional.binary_cross_entropy_with_logits(outputs, smooth, pos_weight=self.weights)
        return self._plain(outputs, targets, "mean")

    def mean_weight(self, targets: torch.Tensor) -> torch.Tensor | None:
        """Return the mean weight of a batch's samples, a scalar, if the mean is divided by the weights' sum."""
        if self.name != "cross-entropy" or self.weights is None:
            return None
        return self.weights[targets].mean()

    def total(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum over samples, a scalar, with neither smoothing nor weights: for validation."""
        columns = 1 if self.name == "cross-entropy" else outputs.shape[1]
        return self._plain(outputs, targets, "sum") / columns

    def each(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, [n], with neither smoothing nor weights."""
        found = self._plain(outputs, targets, "none")
        return found if found.dim() == 1 else found.mean(1)

    def _plain(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        functions: dict[str, Any] = {
            "cross-entropy": functional.cross_entropy,
            "bce": functional.binary_cross_entropy_with_logits,
            "mse": functional.mse_loss,
            "l1": functional.l1_loss,
            "huber": partial(functional.huber_loss, delta=self.delta),
        }
        found: torch.Tensor = functions[self.name](outputs, targets, reduction=reduction)
        return found
