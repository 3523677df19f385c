"""Layers, what is done with their activations, and the most memory that a pass takes then. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    forward_with_own: int = 0
    """In its forward pass together with what it has saved by then, its input included."""
    backward_with_own: int = 0
    """In its backward pass together with what it still has saved, its input included."""
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
    stored_before: int = 0
    """Bytes of its input that the layer before it stores, where that one's room is."""
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


def most_saved(plans: Sequence[LayerPlan], buffer_bytes: int) -> int:
    """Compute the bytes of saved activations, those on their way included, that are on the device at most.

    Buffers count beside the bytes that are kept until then; those that are kept later wait until others have left.
    """
    limit = kept = swapped = 0
    for plan in plans:
        own = plan.host_bytes + plan.disk_bytes
        kept, swapped = kept + plan.kept_bytes, swapped + own
        limit = max(limit, kept + (min(buffer_bytes, swapped) if own else 0))
    return limit


def highest_use(layers: Sequence[Layer], plans: Sequence[LayerPlan], buffer_bytes: int) -> int:
    """Compute the most bytes that a pass takes on the device beside parameters, their gradients and the pass's input.

    Args:
        layers: in the order of the forward pass.
        plans: of each layer.
        buffer_bytes: most bytes on their way to or from the tiers below.

    Returns:
        The highest of the moments: each layer's forward pass, what follows it, and its backward pass, each with what
        the layers before it keep. Before the loss all that leaves has left.
    """
    limit = most_saved(plans, buffer_bytes)
    highest = kept = swapped = last_swapped = 0
    own = 0
    for number, (layer, plan) in enumerate(zip(layers, plans, strict=True), 1):
        before = kept, swapped
        others = plan.kept_bytes - (layer.kept_of(plan.kept_bytes) if layer.tensors else 0)
        elsewhere = min(layer.stored_before, others) if own else 0
        own = plan.host_bytes + plan.disk_bytes
        kept, swapped = kept + plan.kept_bytes - elsewhere, swapped + own + elsewhere
        last_swapped = kept if own else last_swapped
        leaves = [min(limit, held + min(buffer_bytes, away)) for held, away in (before, (kept, swapped))]
        is_near = before[0] - last_swapped <= buffer_bytes  # bytes come back while this layer is used
        comes = leaves if is_near else [before[0], kept]
        after = layer.working.after + layer.working.ahead + (leaves[1] if number < len(layers) else kept)
        highest = max(highest, after, _forward(layer, plan, *leaves), _backward(layer, plan, *comes))
    return highest


def _forward(layer: Layer, plan: LayerPlan, before: int, now: int) -> int:
    """Most bytes in a layer's forward pass.

    Args:
        layer: its costs.
        plan: its treatment.
        before: bytes on the device of what the layers before it saved.
        now: its own that are saved included.
    """
    ahead = layer.working.ahead
    if plan.action is Action.RECOMPUTE:
        return now + _own_forward(layer) - layer.input_bytes + ahead
    return min(before + _own_forward(layer), now + layer.working.forward) + ahead


def _backward(layer: Layer, plan: LayerPlan, before: int, now: int) -> int:
    """Most bytes in a layer's backward pass; see :func:`_forward`."""
    working = layer.working
    own = max(working.backward_with_own, working.backward, layer.all_bytes)
    if plan.action is Action.RECOMPUTE:
        return now + max(_own_forward(layer) + working.output, own) - layer.input_bytes + working.waiting
    return min(before + own, now + working.backward) + working.waiting


def _own_forward(layer: Layer) -> int:
    working = layer.working
    return max(working.forward_with_own, working.forward + layer.input_bytes, layer.all_bytes)
