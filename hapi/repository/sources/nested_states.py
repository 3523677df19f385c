"""The state dict among what a training saved: a network's beside its optimiser's, its epoch and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hapi.repository.sources.inert_objects import Inert

_USUAL = ("state_dict", "model", "model_state_dict", "module")
"""Keys under which trainings keep a network's state dict, the likeliest first."""
_DEPTH = 4
"""States within states that are looked into."""
_NAMED = 4
"""Keys that an error names."""


def state_in(loaded: Any, depth: int = _DEPTH) -> Mapping[str, torch.Tensor] | str:
    """Return the tensors of a network by their names, or why ``loaded`` has none, in words.

    It is ``loaded`` itself, what one of the usual keys has, or the only state dict in it.
    """
    if not isinstance(loaded, dict):
        return f"it is {_kind(loaded)}; save model.state_dict()"
    if _is_state(loaded):
        names = {str(name): tensor for name, tensor in loaded.items()}
        return names if len(names) == len(loaded) else "two of its names are the same as texts"
    for key in _USUAL if depth else ():
        if isinstance(loaded.get(key), dict):
            return state_in(loaded[key], depth - 1)
    others = [key for key, value in loaded.items() if not isinstance(value, torch.Tensor)]
    states = [key for key in others if _is_state(loaded[key])] if len(others) == len(loaded) else []
    if len(states) == 1:
        return state_in(loaded[states[0]])
    if states:
        return f"it has {len(states)}, {_listed(states)}; save the one that is meant"
    if not others:
        return "it is empty"
    return f"{_listed(others[:1])} is {_kind(loaded[others[0]])}; save model.state_dict()"


def left_out(loaded: Any, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the keys under which ``loaded`` has other values of the tensors of ``state``, such as their averages."""
    if not isinstance(loaded, dict) or _is_state(loaded):
        return []
    names, taken = {_bare(name) for name in state}, {id(tensor) for tensor in state.values()}
    found = []
    for key, value in loaded.items():
        other = state_in(value)
        if not isinstance(other, str) and not taken.issuperset(map(id, other.values())):
            found += [repr(key)[:40]] * (not names.isdisjoint(map(_bare, other)))
    return found


def _bare(name: str) -> str:
    return name.removeprefix("module.")


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(v, torch.Tensor) for v in value.values())
    )


def _kind(value: Any) -> str:
    if isinstance(value, Inert):
        return "an object of settings or figures"
    if isinstance(value, torch.Tensor):
        return "a single tensor"
    return "a table" if isinstance(value, dict) else f"of type {type(value).__name__}"


def _listed(keys: Sequence[Any]) -> str:
    names = [repr(key)[:40] for key in keys]
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
