"""Layers: what they save and take, and what is done with it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """Treatment of a layer's activations; the slowest tier that takes any of them names it."""

    KEEP = "keep"
    HOST = "host"
    DISK = "disk"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, kw_only=True)
class Working:
    """Most bytes that one layer's passes take beside the saved activations: temporary ones, gradients between layers,
    and a parameter's gradient while backward makes it.

    Parameters and the gradients that they have are left out.
    """

    forward: int = 0
    """In its forward pass."""
    after: int = 0
    """Between its forward pass and the next layer's, or backward: the loss after the last one."""
    backward: int = 0
    """In its backward pass."""
    output: int = 0
    """Its output, whose gradient is there while the layer is computed a second time."""
    ahead: int = 0
    """Gradients of passes before that are read ahead while it is computed."""
    waiting: int = 0
    """Gradients that wait for their update in its backward pass."""


@dataclass(frozen=True, kw_only=True)
class GradientRoom:
    """Most bytes of parameters' gradients that are in memory for a while, beside the one that backward makes."""

    total: int = 0
    """Bytes of the gradients of all parameters."""
    waiting: int = 0
    """Bytes of those that wait for their update."""
    ahead: int = 0
    """Bytes of those that are read ahead before backward."""

    def waiting_beside(self, largest: int) -> int:
        """Compute the bytes that wait while one of ``largest`` bytes is made."""
        return max(0, min(self.waiting, self.total - largest))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Costs of one layer in one forward pass, in the order of that pass."""

    name: str
    flops: float
    """``FLOP_layer``: operations of its forward pass, which is what computing it a second time takes."""
    saved_bytes: int
    """``A_layer``: bytes that it saves for the backward pass, without its input."""
    input_bytes: int = 0
    """Its part of ``A_interBlock``: it stays saved whether the layer is computed a second time or not."""
    tensors: tuple[int, ...] = ()
    """Bytes of each tensor that it is the first to save, in this order; none where its bytes can be cut anywhere."""
    recomputable: bool = True
    working: Working = Working()

    def kept_of(self, room: int) -> int:
        """Compute the bytes that stay in so much room: tensors stay whole, as long as there is room for the next."""
        if not self.tensors:
            return min(room, self.all_bytes)
        kept = 0
        for nbytes in self.tensors:
            kept += nbytes if kept + nbytes <= room else 0
        return kept

    @property
    def all_bytes(self) -> int:
        """Bytes that it saves when it is not computed a second time."""
        return self.saved_bytes + self.input_bytes

    @property
    def benefit(self) -> float:
        """``OB_layer`` (equation 6): operations that a swapped byte spares."""
        return self.flops / self.saved_bytes if self.saved_bytes else math.inf


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Treatment of one layer: its action, and how many of its saved bytes lie in each tier."""

    name: str
    action: Action
    kept_bytes: int
    host_bytes: int
    disk_bytes: int


def keep_whole(layer: Layer) -> LayerPlan:
    """Return the plan of a layer whose activations all stay on the device."""
    return LayerPlan(
        name=layer.name, action=Action.KEEP, kept_bytes=layer.all_bytes, host_bytes=0, disk_bytes=0
    )
