"""An exponential moving average of the trained layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hapi.models.tensors import copied


class MovingAverage:
    """Follows parameters and buffers step by step, as torch's AveragedModel with ``use_buffers`` does.

    The first update copies. Integers (counters, indices) and tensors that begin with values that are not finite (masks)
    are copied at each update: an average of them would be wrong.
    """

    def __init__(self, trained: nn.Module, decay: float) -> None:
        """Begin with a copy of ``trained``; ``decay`` is the weight of the old average, above 0 and below 1."""
        self.module = copied(trained)
        """The layers with averaged parameters and buffers."""
        self._mix = get_ema_multi_avg_fn(decay)
        self._updates = 0
        self._trained = trained
        self._moving = [t.is_floating_point() and bool(t.isfinite().all()) for t in _tensors(self.module)]
        """Which tensors are averaged, and not copied."""
        self._follow()

    def _follow(self) -> None:
        """Pair the average's tensors with those that the layers have now."""
        self._buffers = list(self._trained.buffers())
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._followed: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for a, t, moves in zip(_tensors(self.module), _tensors(self._trained), self._moving, strict=True):
            if moves:
                averages, values = self._followed.setdefault(a.dtype, ([], []))
                averages.append(a)
                values.append(t)
            else:
                self._copied.append((a, t))

    @torch.no_grad()
    def update(self) -> None:
        """Take in the layers as they are after a step."""
        if any(
            now is not before for now, before in zip(self._trained.buffers(), self._buffers, strict=False)
        ):
            self._follow()  # a layer's code has assigned a buffer anew
        for average, value in self._copied:
            average.copy_(value)
        for averages, values in self._followed.values():
            if self._updates:
                self._mix(averages, values, self._updates)
            else:
                torch._foreach_copy_(averages, values)
        self._updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its number of updates, for a checkpoint."""
        return {"updates": self._updates, "module": self.module.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; ValueError, KeyError or RuntimeError for anything else."""
        if type(state["updates"]) is not int or state["updates"] < 0:
            raise ValueError("its moving average has no number of updates")
        self.module.load_state_dict(state["module"])
        self._updates = state["updates"]


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, detached, which share their memory."""
    return [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
