"""The loss that a training minimises, and the sums of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Objective:
    """Computes the loss of a batch, and sums loss and right answers over the batches of a pass.

    The sums stay on the device, so that no step waits for it because of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.samples = 0
        """Samples that were noted."""
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss (a scalar with its gradient), the mean over the batch.

        Args:
            outputs: of the network, [B, classes].
            targets: the classes, int64 [B].
        """
        return nn.functional.cross_entropy(outputs, targets)

    def note(self, outputs: torch.Tensor, targets: torch.Tensor, loss: torch.Tensor | None = None) -> None:
        """Add a batch to the sums.

        Args:
            outputs: of the network, [B, classes].
            targets: the classes, int64 [B].
            loss: from :meth:`loss`, if it was computed; None to compute the batch's sum here.
        """
        if loss is None:
            total = nn.functional.cross_entropy(outputs.detach(), targets, reduction="sum").double()
        else:
            total = loss.detach().double() * len(targets)
        self._loss_sum += total
        self._correct += (outputs.detach().argmax(1) == targets).sum()
        self.samples += len(targets)

    def figures(self) -> dict[str, float]:
        """Return the means over the noted samples by name, for the report."""
        return {
            "loss": self._loss_sum.item() / self.samples,
            "accuracy": self._correct.item() / self.samples,
        }

    def clear(self) -> None:
        """Begin a new pass."""
        self.samples = 0
        self._loss_sum.zero_()
        self._correct.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the running pass, for a checkpoint."""
        return {
            "samples": self.samples,
            "loss_sum": self._loss_sum.item(),
            "correct": int(self._correct.item()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; ValueError or KeyError for anything else."""
        samples, loss_sum, correct = state["samples"], state["loss_sum"], state["correct"]
        if not all(type(v) is int and v >= 0 for v in (samples, correct)) or type(loss_sum) not in (
            int,
            float,
        ):
            raise ValueError("its sums are not made of numbers")
        self.samples = samples
        self._loss_sum.fill_(loss_sum)
        self._correct.fill_(correct)
