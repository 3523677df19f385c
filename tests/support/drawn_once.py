"""Networks that many tests build: their random weights are drawn once for each process, and then copied."""

from __future__ import annotations

import copy

from torch import nn

from hapi.models.zoo.architectures import Architecture, build_module

NAMES = frozenset({"resnet18", "squeezenet1_1"})
"""Whose modules do not depend on the input's shape."""
KEPT = 8
"""Networks at a time, of at most 47 MB."""
_drawn: dict[tuple[str, int], nn.Module] = {}


def drawn_once(architecture: Architecture, seed: int) -> nn.Module:
    """As :func:`build_module`, for most tests in a fraction of its time."""
    if architecture.name not in NAMES:
        return build_module(architecture, seed)
    key = architecture.name, seed
    if key not in _drawn and len(_drawn) >= KEPT:
        _drawn.clear()
    module = _drawn.get(key) or build_module(architecture, seed)
    _drawn[key] = module
    return copy.deepcopy(module)
