"""Choice of the modules of a model that are planned as one layer each."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import parametrize

from hapi.offload.loop.fixed import BoundToModel

_PLANNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Layers that a plan has."""
_LISTS = (nn.Sequential, nn.ModuleList)
SERVED = ("steps", "report", "close")
"""Attributes of an offloaded optimiser that loops use; another one gets them where all fits."""


class Closing(Protocol):
    """A plan of activations, as far as it is ended."""

    def close(self) -> None:
        """Give the layers back as they were."""


_Owned = tuple["weakref.ref[torch.optim.Optimizer]", "weakref.ref[Closing]"]
_OWNED: weakref.WeakKeyDictionary[nn.Module, _Owned] = weakref.WeakKeyDictionary()
"""Optimiser and plan of each model whose states fit the memory."""


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a model: the children of its ``nn.Sequential`` and ``nn.ModuleList`` blocks, otherwise its
    direct children.

    A child is looked into where it only holds others (a list, a ``ModuleDict``), and where it holds a list of modules
    that have children themselves: the blocks of a transformer inside of its encoder. A block is one layer, whatever
    is in it. A module that stands in several places is one layer, under its first name. A model without children is
    one layer itself.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    _collect(model, "", found)
    return list(found.values()) or [("model", model)]


def take(layers: Sequence[tuple[str, nn.Module]]) -> bool:
    """Take layers for one plan, unless others have them all; return whether they were taken.

    Two optimizers may be given one model: what its layers save is seen by the inner plan alone.
    """
    if all(module in _PLANNED for _, module in layers):
        return False
    _PLANNED.update(module for _, module in layers)
    return True


def release(layers: Iterable[nn.Module]) -> None:
    """Leave layers to other plans."""
    _PLANNED.difference_update(layers)


def owned(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Closing) -> None:
    """Note whose a plan is that no offloaded optimiser closes."""
    _OWNED[model] = weakref.ref(optimizer), weakref.ref(plan)


def end_plan_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Close the plan of a training of ``model`` that is over.

    It is over when its optimiser is given again, as where a cell of a notebook runs a second time, or is gone.
    """
    if model not in _OWNED:
        return
    owner, plan = _OWNED[model][0](), _OWNED[model][1]()
    if plan is not None and (owner is None or owner is optimizer):
        plan.close()
    for name in SERVED if owner is optimizer else ():
        vars(optimizer).pop(name, None)


def why_not_recomputed(layer: nn.Module) -> str | None:
    """Say why a layer cannot be recomputed in the mode that it is in; None where it can."""
    for inner in layer.modules():
        if inner.training and getattr(inner, "track_running_stats", False):
            return f"{type(inner).__name__} in training: its statistics would move twice"
        if inner is not layer and any(not _is_repeatable(hook) for hook in _hooks_of(inner)):
            return f"{type(inner).__name__} in it has a forward hook, which would be called twice"
    if _of_all_modules():
        return "a hook of all modules would be called twice"
    is_cached = bool(parametrize._cache_enabled)
    return "parametrizations are cached, and would not be by then" if is_cached else None


def _hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _of_all_modules() -> bool:
    """Whether there are hooks for all modules."""
    known = nn.modules.module
    return bool(known._global_forward_hooks or known._global_forward_pre_hooks)


def _is_repeatable(hook: Any) -> bool:
    """Whether a hook does the same in a second pass: this package's own, and those of torch's that set weights."""
    owner = getattr(hook, "__self__", hook)
    return isinstance(owner, BoundToModel) or type(owner).__module__.startswith("torch.nn.utils.")


def _collect(module: nn.Module, prefix: str, found: dict[int, tuple[str, nn.Module]]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if next(child.children(), None) is not None and (_only_holds(child) or _has_blocks(child)):
            _collect(child, f"{path}.", found)
        else:
            found.setdefault(id(child), (path, child))


def _only_holds(module: nn.Module) -> bool:
    return isinstance(module, (*_LISTS, nn.ModuleDict))


def _has_blocks(module: nn.Module) -> bool:
    """Say whether a list somewhere in ``module`` holds modules that have children themselves."""
    return any(
        isinstance(inner, _LISTS) and any(next(child.children(), None) is not None for child in inner)
        for inner in module.modules()
    )
