"""The objective of a training: the loss of its steps, and the sums of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hapi.client.joint.ranks import Ranks, part_size
from hapi.train.objective.criterion import Criterion
from hapi.train.objective.mixing import Targets


@dataclass(frozen=True, eq=False)
class BatchResult:
    """Results of a training batch, of all ranks."""

    loss: torch.Tensor
    """Mean over the batch, a scalar without gradient."""
    right: torch.Tensor
    """Predictions that are right, a scalar of whole numbers."""
    samples: int
    factor: torch.Tensor | None
    """Multiplies the loss of this rank's part before backward, whose gradients are then averaged over the ranks; None
    where the part is the whole batch.
    """
    mean_weight: torch.Tensor | None
    """Mean of the weights that the loss is divided by; None when it is divided by the number of samples."""


class Objective:
    """Computes the loss of a batch, and sums loss and right answers over the batches of a pass.

    The sums stay on the device, so that no step waits for it because of them.
    """

    def __init__(self, criterion: Criterion, device: torch.device) -> None:
        self.criterion = criterion
        """Loss, targets and metrics."""
        self.samples = 0
        """Samples that were noted."""
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)

    def batch_of(
        self, features: torch.Tensor, labels: torch.Tensor, epoch: int, batch: int
    ) -> tuple[torch.Tensor, Targets]:
        """Return features and targets of a training batch; see :meth:`Criterion.batch_of`.

        Args:
            features: [B, ...] at the freeze.
            labels: int64 [B], or float32 [B, k].
            epoch: number from 0.
            batch: number in the epoch, from 0.
        """
        return self.criterion.batch_of(features, labels, epoch, batch)

    def loss(self, outputs: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return the loss (a scalar with its gradient), the mean over the batch.

        Args:
            outputs: of the network, [B, k].
            targets: from :meth:`batch_of`.
        """
        return self.criterion.value(outputs, targets)

    def result(
        self, outputs: torch.Tensor, targets: Targets, loss: torch.Tensor, samples: int, ranks: Ranks
    ) -> BatchResult:
        """Return the result of a whole batch from that of this rank's part.

        Args:
            outputs: of the network, [B, k].
            targets: from :meth:`batch_of`.
            loss: from :meth:`loss`.
            samples: of the whole batch.
            ranks: that have its parts.
        """
        weight, right = self.criterion.loss.mean_weight(targets.own), self.criterion.right(outputs, targets)
        loss = loss.detach()
        if ranks.size == 1:
            return BatchResult(loss, right, samples, None, weight)
        count = part_size(samples, ranks.rank, ranks.size)
        own = loss.new_tensor(count, dtype=torch.float64) * (1.0 if weight is None else weight.double())
        parts = torch.stack([own, own * loss.double(), (right * bool(count)).double()])
        if not count:  # a sample of another rank, whose loss may be anything
            parts = torch.zeros_like(parts)
        total, loss_sum, all_right = ranks.summed(parts)
        return BatchResult(
            loss=(loss_sum / total).to(loss.dtype),
            right=all_right.round().long(),
            samples=samples,
            factor=(own * ranks.size / total).to(loss.dtype),
            mean_weight=None if weight is None else (total / samples).to(weight.dtype),
        )

    def note(self, result: BatchResult) -> None:
        """Add a batch, of all ranks, to the sums."""
        self._loss_sum += result.loss.double() * result.samples
        self._correct += result.right
        self.samples += result.samples

    def figures(self) -> dict[str, float | None]:
        """Return the means over the noted samples by name, for the report; a regression has no accuracy."""
        correct = int(self._correct.item())
        return {
            "loss": self._loss_sum.item() / self.samples,
            "accuracy": self.criterion.accuracy(correct, self.samples),
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
