"""Keys of weights as layers compute with them."""

from __future__ import annotations

from hapi.models.graph.layers import LayeredModel


def rounded_key(model: LayeredModel, name: str, key: str) -> str:
    """Return the key of weight ``name`` as ``model`` computes with it, where ``key`` is that of the float32 weight."""
    rounding = model.rounding
    if rounding is None or name not in rounding.names:
        return key
    return f"{key} as {rounding.features} in {model.tensors.get(name).dtype}"
