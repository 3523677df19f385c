"""Choice of the modules of a model that are planned as one layer each."""

from __future__ import annotations

from torch import nn

_LISTS = (nn.Sequential, nn.ModuleList)


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


def why_not_recomputed(layer: nn.Module) -> str | None:
    """Say why a layer cannot be recomputed in the mode that it is in; None where it can."""
    for inner in layer.modules():
        if inner.training and getattr(inner, "track_running_stats", False):
            return f"{type(inner).__name__} in training: its statistics would move twice"
    return None


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
