"""Optimisers by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hapi.train.settings import TrainingSettings


def make_optimizer(settings: TrainingSettings, module: nn.Module) -> torch.optim.Optimizer:
    """The optimiser that the settings name, over ``module``'s parameters."""
    parameters, s = [p for p in module.parameters() if p.requires_grad], settings
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay),
        "adam": lambda: torch.optim.Adam(parameters, lr=s.lr, weight_decay=s.weight_decay),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=s.lr, weight_decay=s.weight_decay),
        "rmsprop": lambda: torch.optim.RMSprop(
            parameters, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay
        ),
    }
    return makers[s.optimizer]()
