"""Layers that run out of memory."""

from __future__ import annotations

import torch
from torch import nn


class Hungry(nn.Module):
    """Doubles its input; runs out of memory above ``capacity`` samples."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        if len(x) > self.capacity:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x * 2
