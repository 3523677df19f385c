"""Gradients no longer than a bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


class Clipping:
    """Scales gradients whose norm exceeds a bound, and sums the norms of an epoch on the device."""

    def __init__(self, limit: float, device: torch.device) -> None:
        """``limit``: largest norm over all gradients."""
        self._limit = limit
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        """Finite norms: their sum, the largest, those above the limit, their number."""

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """Scale the gradients of ``parameters`` together. One that is not finite counts in no figure."""
        norm = nn.utils.clip_grad_norm_(parameters, self._limit).double()
        finite = norm.isfinite()
        known = torch.where(finite, norm, 0.0)
        self._sums += torch.stack([known, torch.zeros_like(norm), known > self._limit, finite]).double()
        self._sums[1] = torch.maximum(self._sums[1], known)

    def figures(self) -> dict[str, float]:
        """Return mean and largest norm before clipping, and the share of clipped steps; nothing before a step."""
        total, largest, clipped, steps = self._sums.tolist()
        if not steps:
            return {}
        return {
            "gradient_norm": total / steps,
            "largest_gradient_norm": largest,
            "clipped_steps": clipped / steps,
        }

    def clear(self) -> None:
        """Begin a new epoch."""
        self._sums.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the running epoch, for a checkpoint."""
        return {"sums": self._sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; an error of torch for anything else."""
        self._sums.copy_(torch.tensor(state["sums"], dtype=torch.float64))
