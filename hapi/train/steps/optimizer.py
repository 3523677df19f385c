"""Optimisers by name, and their groups of parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from hapi.errors import UsageError
from hapi.models.graph.layers import LayeredModel
from hapi.train.steps.settings import OptimizerSettings


def head_names(model: LayeredModel) -> frozenset[str]:
    """Return the names of the head's parameters: those of the last layer that has any."""
    names = frozenset(name for name, _ in model.module.named_parameters())
    found = (names.intersection(layer.tensors) for layer in reversed(model.layers))
    return next((head for head in found if head), frozenset())


def parameter_groups(
    settings: OptimizerSettings, module: nn.Module, head: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return torch's groups of the trained parameters of ``module``, each with its ``lr`` and ``weight_decay``.

    All parameters are one group unless the settings tell some apart. In a fixed order: the layers before the head,
    then the head; of both the parameters with weight decay first.

    Args:
        settings: the rates, and which parameters decay.
        module: the trained layers.
        head: names of the head's parameters.

    Raises:
        UsageError: a rate is for parameters that are not trained.
    """
    s = settings
    rates = s.lr if s.backbone_lr is None else s.backbone_lr, s.lr if s.head_lr is None else s.head_lr
    apart = s.backbone_lr is not None or s.head_lr is not None
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            spared = not s.decay_norm_bias and parameter.ndim <= 1
            groups.setdefault((apart and name in head, spared), []).append(parameter)
    if s.backbone_lr is not None and not any(not in_head for in_head, _ in groups):
        raise UsageError(
            "--backbone-lr: only the head is trained; train more layers with an earlier --freeze"
        )
    if s.head_lr is not None and not any(in_head for in_head, _ in groups):
        raise UsageError("--head-lr: the head is not trained; freeze less with --freeze")
    return [
        {"params": found, "lr": rates[in_head], "weight_decay": 0.0 if spared else s.weight_decay}
        for (in_head, spared), found in sorted(groups.items())
    ]


def make_optimizer(
    settings: OptimizerSettings, module: nn.Module, head: Collection[str] = ()
) -> torch.optim.Optimizer:
    """The optimiser that the settings name, over the groups of :func:`parameter_groups`."""
    groups, s = parameter_groups(settings, module, head), settings
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(groups, lr=s.lr, momentum=s.momentum, nesterov=s.nesterov),
        "adam": lambda: torch.optim.Adam(groups, lr=s.lr, betas=s.betas),
        "adamw": lambda: torch.optim.AdamW(groups, lr=s.lr, betas=s.betas),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=s.lr, momentum=s.momentum),
    }
    return makers[s.optimizer]()
