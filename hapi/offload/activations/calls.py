"""Calls of layers: the tensors that go in and out, and a call that is computed a second time in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer whose activations are computed a second time; tensors given by name are saved as inputs too."""
    names, count = list(kwargs), len(args)

    def positional(*values: Any) -> Any:
        return original(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return checkpoint(positional, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, in its lists and dicts too."""
    found: list[torch.Tensor] = []
    waiting: list[Any] = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
    return found
