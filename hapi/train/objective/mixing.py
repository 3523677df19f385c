"""Mixup in feature space: features of a batch and their targets, mixed in pairs (manifold mixup)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_STREAM = 0x6D69787570
"""Keeps these random numbers apart from others of the same seed."""


@dataclass(frozen=True, eq=False)
class Targets:
    """Targets of a batch: ``share`` of each sample's own, and the rest of its partner's."""

    own: torch.Tensor
    """Int64 [n] or float32 [n, k]."""
    other: torch.Tensor | None = None
    """The partners' targets, of the same form; None when nothing is mixed."""
    share: float = 1.0
    """Weight of ``own``, from 0 to 1."""

    @property
    def larger(self) -> torch.Tensor:
        """The targets with the larger weight."""
        return self.own if self.other is None or self.share >= 0.5 else self.other


def mix(
    features: torch.Tensor, targets: torch.Tensor, alpha: float, seed: int, epoch: int, batch: int
) -> tuple[torch.Tensor, Targets]:
    """Mix each sample's features with those of another sample of the batch.

    The share is drawn from Beta(alpha, alpha), once for the batch; share and pairs depend on seed, epoch and batch
    alone, and so neither on a resume nor on the split.

    Args:
        features: float [n, ...].
        targets: int64 [n] (kept in pairs) or float32 [n, k] (mixed as the features are).
        alpha: above 0; small values mix little.
        seed: of the job.
        epoch: number from 0.
        batch: number in the epoch.

    Returns:
        Mixed features, and targets for the loss.
    """
    rng = np.random.default_rng([_STREAM, seed, epoch, batch])
    share = float(rng.beta(alpha, alpha))
    partner = torch.from_numpy(rng.permutation(len(features))).to(features.device)
    mixed = features * share + features[partner] * (1 - share)
    if targets.is_floating_point():
        return mixed, Targets(targets * share + targets[partner] * (1 - share))
    return mixed, Targets(targets, targets[partner], share)
