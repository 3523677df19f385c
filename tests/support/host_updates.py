"""A loop's optimiser computed on the CPU, with all states in memory: what an offloaded step on a GPU must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class UpdatedOnHost:
    """The user's optimiser over fp32 copies of the parameters in the host's memory; the copies are written back.

    A processor and a GPU round a step of AdamW differently in the last bits, so that a GPU's own AdamW is close to an
    offloaded one, and this one is equal to it.
    """

    def __init__(self, groups: list[dict[str, Any]], make: Callable[[Any], torch.optim.Optimizer]) -> None:
        """Copy the parameters of ``groups``, and make the optimiser of the copies."""
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        copied = []
        for group in groups:
            own = [nn.Parameter(one.detach().to("cpu", torch.float32, copy=True)) for one in group["params"]]
            self._pairs += zip(group["params"], own, strict=True)
            copied.append({**group, "params": own})
        self.masters = [own for _, own in self._pairs]
        self._host = make(copied)
        self.param_groups = self._host.param_groups

    def zero_grad(self) -> None:
        for parameter, _ in self._pairs:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, own in self._pairs:
            own.grad = None if parameter.grad is None else parameter.grad.cpu().float()
        self._host.step()
        for parameter, own in self._pairs:
            parameter.copy_(own)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._host.state_dict()
        return found
