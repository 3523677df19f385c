"""Rounding of layers' results, put between the layers of a segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

if TYPE_CHECKING:
    from hapi.models.graph.layers import LayeredModel

Casts = dict[fx.Node, tuple[torch.dtype, ...]]
"""Types that a node's result goes through, one after the other."""


@dataclass(frozen=True, eq=False)
class Rounding:
    """Types of the layers of a model made by :func:`hapi.models.graph.precision.in_precision`."""

    base: LayeredModel
    """The same layers in float32."""
    features: torch.dtype
    """Type of what layers 1 to ``last`` give."""
    arithmetic: torch.dtype
    """Type that they compute in: ``features``, or float32."""
    last: int
    names: frozenset[str]
    """Weights that are rounded."""

    def casts(self, start: int, stop: int, ends: Sequence[fx.Node]) -> Casts:
        """Return the casts of a segment of layers ``start + 1`` to ``stop``.

        Args:
            start: number of layers before the first one.
            stop: the last layer.
            ends: the input's node, and the last node of each layer; [L + 1].
        """
        types = self.base.output_dtypes()
        found: Casts = {}
        for index in range(start, stop + 1):
            if not types[index].is_floating_point:
                continue
            rounded = (self.features,) if index <= self.last and (index or self.last) else ()
            entered = () if index == stop else (self.arithmetic if index < self.last else types[index],)
            found[ends[index]] = (*rounded, *entered)
        return found
