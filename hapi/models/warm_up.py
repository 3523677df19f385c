"""First use of a CPU's libraries, before the memory or the time of later ones is measured."""

from __future__ import annotations

import torch
from torch import nn


def warm_up_libraries() -> None:
    """Let a CPU's libraries take the memory now that they take in any training: imports, threads, generated
    code.
    """
    with torch.random.fork_rng(devices=[]):
        layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
        )
        inputs, labels = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.01, momentum=0.9)
        for layer in layers:
            inputs = layer.forward(
                inputs
            )  # a script may have hooks for the calls of all modules, and for all steps
        nn.functional.cross_entropy(inputs, labels).backward()
        torch.optim.SGD.step.__wrapped__(optimizer)  # type: ignore[attr-defined]
