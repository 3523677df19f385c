"""Gradients of several training batches that make one optimiser step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


class Accumulation:
    """Weighs each batch's loss so that the sum of the gradients is that of one large batch.

    Groups begin anew with each epoch; the last one of an epoch may have fewer batches.
    """

    def __init__(self, sizes: Sequence[int], batches: int) -> None:
        """Begin with no gradients.

        Args:
            sizes: samples of each batch of an epoch.
            batches: batches of a group.
        """
        self._sizes, self._batches = sizes, batches
        self.steps_per_epoch = max(1, -(-len(sizes) // batches))
        """Optimiser steps of an epoch."""
        self.is_open = False
        """True while gradients wait for those of more batches."""
        self._weight: torch.Tensor | None = None
        """Mean weight of the group's samples so far, by which their gradients were not yet divided."""

    def begins(self, batch: int) -> bool:
        """Return whether ``batch`` is the first of its group."""
        return batch % self._batches == 0

    def ends(self, batch: int) -> bool:
        """Return whether ``batch`` is the last of its group."""
        return (batch + 1) % self._batches == 0 or batch + 1 == len(self._sizes)

    def step(self, epoch: int, batch: int) -> int:
        """Return the number of the optimiser step, from 0, that takes this batch's gradients."""
        return epoch * self.steps_per_epoch + batch // self._batches

    def weighed(self, loss: torch.Tensor, batch: int, mean_weight: torch.Tensor | None) -> torch.Tensor:
        """Return the part of ``loss`` in the mean over the group.

        Args:
            loss: mean over the batch.
            batch: number in the epoch, from 0.
            mean_weight: mean of the weights that the mean was divided by (class weights), a scalar; None if the samples
                count alike.
        """
        first = batch - batch % self._batches
        group = self._sizes[first : first + self._batches]
        if len(group) == 1:
            return loss
        share = self._sizes[batch] / sum(group)
        if mean_weight is None:
            return loss * share
        weight = mean_weight.detach() * share
        self._weight = weight if self._weight is None else self._weight + weight
        return loss * weight

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Complete the mean over a group whose samples have weights."""
        self.is_open = False
        weight, self._weight = self._weight, None
        if weight is not None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a group that is under way, for a checkpoint."""
        return {"open": self.is_open, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take over what :meth:`state_dict` gave, with its tensors on ``device``; any error for anything else."""
        self.is_open, weight = bool(state["open"]), state["weight"]
        self._weight = None if weight is None else weight.to(device)
