"""Hooks of a model whose gradients are consumed as backward makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hapi.offload.parameters import TrainedParameter


def attach(
    model: nn.Module,
    parameters: Sequence[TrainedParameter],
    on_gradient: Callable[[TrainedParameter], None],
    before_use: Callable[[], None],
) -> list[Any]:
    """Follow a model's passes.

    Args:
        model: has the parameters, or some of them.
        parameters: trained ones; those that need no gradient now are not followed.
        on_gradient: called each time a gradient was accumulated.
        before_use: called before a module's forward pass or ``state_dict`` when its parameters take the values of a
            step that is not taken yet.

    Returns:
        Handles; ``remove()`` ends each.
    """
    handles: list[Any] = [
        known.parameter.register_post_accumulate_grad_hook(lambda _, known=known: on_gradient(known))
        for known in parameters
        if known.parameter.requires_grad
    ]
    by_identity = {id(known.parameter): known for known in parameters}
    for module in model.modules():
        own = [by_identity.get(id(parameter)) for parameter in module.parameters(recurse=False)]
        used = [known for known in own if known is not None]
        if used:
            hook = _checking(used, before_use)
            handles += [module.register_forward_pre_hook(hook), module.register_state_dict_pre_hook(hook)]
    return handles


def _checking(used: Sequence[TrainedParameter], before_use: Callable[[], None]) -> Callable[..., None]:
    def hook(module: nn.Module, *args: object) -> None:
        if any(known.is_submitted for known in used):
            before_use()

    return hook
