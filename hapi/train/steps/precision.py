"""Arithmetic of the trained layers: float32, or torch's autocast to 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hapi.wire import references

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Runs the trained layers, and scales the loss of fp16 so that small gradients survive."""

    def __init__(self, name: references.Precision, device: torch.device) -> None:
        """Begin with torch's own first scale for fp16."""
        self._device, self._dtype = device, _DTYPES.get(name)
        self._scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._skipped = 0

    def outputs(self, module: nn.Module, features: torch.Tensor) -> torch.Tensor:
        """Return ``module(features)``, float32 also where its layers compute in 16 bits."""
        if self._dtype is None:
            outputs: torch.Tensor = module(features)
            return outputs
        with torch.autocast(self._device.type, self._dtype):
            outputs = module(features)
        return outputs.float()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of ``loss``, scaled ones for fp16."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make scaled gradients true ones, for what looks at them before :meth:`step`."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step, unless scaled gradients overflowed: then the step is left out, and the scale is lowered."""
        if self._scaler is None:
            optimizer.step()
            return
        self._scaler.step(optimizer)
        before = self._scaler.get_scale()
        self._scaler.update()
        self._skipped += self._scaler.get_scale() < before

    def figures(self) -> dict[str, float]:
        """Return the steps that were left out, for fp16."""
        return {} if self._scaler is None else {"skipped_steps": self._skipped}

    def clear(self) -> None:
        """Begin a new epoch."""
        self._skipped = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, for a checkpoint."""
        return {"skipped": self._skipped, "scaler": self._scaler.state_dict() if self._scaler else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; an error of torch for anything else."""
        self._skipped = int(state["skipped"])
        if self._scaler is not None:
            self._scaler.load_state_dict(dict(state["scaler"]))
