"""What each layer has to do for one sample, found without computing it: the graph is run on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hapi.errors import ModelError
from hapi.models.layers import LayeredModel


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One layer's work for one sample."""

    flops: float
    traffic_bytes: int
    """Activations read and written by its operations."""
    working_bytes: int
    """Its input, and the inputs and outputs of the operation that has most of them."""
    saved_bytes: int
    """Results of all its operations: what training keeps for the backward pass, rather more than less."""


def layer_work(model: LayeredModel) -> list[LayerWork]:
    """The work of each layer, in order; :class:`ModelError` for one that needs data to run."""
    twin = model.over(copy.deepcopy(model.module).to("meta"))
    twin.traced.constants.update({name: t.to("meta") for name, t in twin.traced.constants.items()})
    known = {id(t) for t in (*twin.module.parameters(), *twin.module.buffers())}
    known |= {id(t) for t in twin.traced.constants.values()}
    found = []
    shapes, dtypes = twin.output_shapes(), twin.output_dtypes()
    for layer in twin.layers:
        segment = twin.segment(layer.index - 1, layer.index, frozen=True)
        x = torch.empty((1, *shapes[layer.index - 1]), dtype=dtypes[layer.index - 1], device="meta")
        counter = _Counter(known)
        try:
            with torch.no_grad(), counter:
                segment(x)
        except RuntimeError as error:
            raise ModelError(
                f"layer {layer.index} ({layer.name}) cannot be sized without data: {str(error).splitlines()[0]}"
            ) from None
        entering = x.numel() * x.itemsize
        found.append(
            LayerWork(
                flops=float(counter.flops),
                traffic_bytes=counter.traffic,
                working_bytes=entering + max(counter.largest, layer.output_bytes),
                saved_bytes=max(counter.results, layer.output_bytes),
            )
        )
    return found


class _Counter(TorchDispatchMode):
    """Counts what passes the dispatcher, one operation at a time."""

    def __init__(self, weights: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = frozenset(weights)
        self.flops = 0
        self.traffic = 0
        self.largest = 0
        self.results = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        count: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=result)
        entering = sum(_nbytes(t) for t in _tensors((args, kwargs)) if id(t) not in self._weights)
        leaving = sum(_nbytes(t) for t in _tensors(result))
        self.traffic += entering + leaving
        self.largest = max(self.largest, entering + leaving)
        self.results += leaving
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def fill(model: LayeredModel, start: int, stop: int, device: torch.device) -> None:
    """Give layers ``start + 1`` to ``stop`` weights of no meaning, to be timed with."""
    for name in model.tensor_names(start, stop):
        old = model.tensors.get(name)
        if not old.is_meta:
            continue
        small = 0.01 if old.is_floating_point() else 0
        new = torch.full(old.shape, small, dtype=old.dtype, device=device)
        model.assign(name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
    model.to(device)
