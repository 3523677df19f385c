"""Holders of a tensor's memory: whether somebody else would see it change."""

from __future__ import annotations

from functools import cache

import torch


def is_alone(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient, in the hook that gets it, shares its memory with no tensor that a pass still uses."""
    return uses_of(gradient) <= usual_uses()[0]


def is_shared(parameter: torch.Tensor, known_views: int) -> bool:
    """Return whether somebody holds a parameter's memory, in the hook that gets its gradient.

    A graph that will be used again does, and whoever has a view, ``.data`` or an array: they would see values of a step
    that is not taken.

    Args:
        parameter: that has its gradient.
        known_views: of it that are this package's own.
    """
    memory, tensors = usual_uses()
    return uses_of(parameter) > memory + known_views or parameter._use_count() > tensors  # type: ignore[attr-defined]


@cache
def usual_uses() -> tuple[int, int]:
    """Measure the uses of a gradient's memory that shares it with none, and of its parameter, in a hook."""
    found: list[tuple[int, int]] = []
    leaf = torch.zeros(2, device="cpu", requires_grad=True)
    leaf.register_post_accumulate_grad_hook(
        lambda leaf: found.append((uses_of(leaf.grad), leaf._use_count()))
    )
    with torch.enable_grad():
        (leaf * torch.ones(2, device="cpu")).sum().backward()
    return found[0]


def uses_of(tensor: torch.Tensor | None) -> int:
    """Count the tensors, and others, that hold a tensor's memory."""
    return 0 if tensor is None else torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
