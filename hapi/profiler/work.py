"""Each layer's work for one sample, found without computing it: the graph is run on the meta device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hapi.errors import ModelError
from hapi.models.graph.analysis import replay
from hapi.models.graph.layers import LayeredModel
from hapi.models.graph.meta_rules import meta_result
from hapi.models.graph.rounding import Rounding
from hapi.models.graph.views import shadow

_TRAINED_BATCH = 2
"""Batch size of trained layers; not 1, which a BatchNorm in training refuses."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """One layer's work for one sample."""

    flops: float
    traffic_bytes: int
    """Activations read and written by its operations."""
    working_bytes: int
    """Most bytes of activations alive at once while it runs without gradients: its input, what is between, results.

    On a CPU with the copies that convolutions make of their input and output, in the layout that oneDNN computes in.
    """
    saved_bytes: int
    """Bytes that training keeps for the backward pass of its tensors; 0 in layers that are not trained."""
    workspace_bytes: int
    """Bytes whatever the batch: a CPU's copy of a convolution's weights in oneDNN's layout, the largest one.
    """


def layer_work(model: LayeredModel, last_split: int, device: str = "cpu") -> list[LayerWork]:
    """Return the work of each layer, in order.

    Args:
        model: its layers.
        last_split: the layers after it are trained.
        device: ``cpu`` or ``cuda``.

    Raises:
        ModelError: a layer needs data to run.
    """
    if model.rounding is not None:
        exact = layer_work(model.rounding.base, last_split, device)
        return [
            _rounded(work, layer.index, layer.output_bytes, model.rounding)
            for work, layer in zip(exact, model.layers, strict=True)
        ]
    counter = _Counter(copies=device == "cpu")
    try:
        replay(model.module, model.traced, model.input_shape, counter.around)
        kept = _kept_bytes(model, last_split)
    except RuntimeError as error:
        raise ModelError(f"the model cannot be sized without data: {str(error).splitlines()[0]}") from None
    found = []
    for layer, nodes in zip(model.layers, model.layer_nodes(), strict=True):
        costs = [counter.costs[n] for n in nodes]
        found.append(
            LayerWork(
                flops=float(sum(cost.flops for cost in costs)),
                traffic_bytes=sum(cost.traffic for cost in costs),
                working_bytes=max([layer.output_bytes, *(cost.alive for cost in costs)]),
                saved_bytes=kept.get(layer.index, 0),
                workspace_bytes=max((cost.workspace for cost in costs), default=0),
            )
        )
    return found


def _rounded(work: LayerWork, index: int, output_bytes: int, rounding: Rounding) -> LayerWork:
    """The work of a layer that computes in ``rounding``'s type, from that in float32."""
    if index > rounding.last:
        return work
    size = rounding.arithmetic.itemsize
    # A result is there twice while it is rounded.
    both = output_bytes * (rounding.features.itemsize + size) // rounding.features.itemsize
    return replace(
        work,
        traffic_bytes=work.traffic_bytes * size // 4,
        working_bytes=max(work.working_bytes * size // 4, both),
        workspace_bytes=work.workspace_bytes * size // 4,
    )


def _kept_bytes(model: LayeredModel, last_split: int) -> dict[int, int]:
    """Per sample, by the layer that makes it: what the backward pass of the layers after ``last_split`` needs."""
    twin = model.over(shadow(model.module, {}, _without_content))
    twin.traced.constants.update({name: t.to("meta") for name, t in twin.traced.constants.items()})
    keeper = _Keeper()
    shape, dtype = twin.output_shapes()[last_split], twin.output_dtypes()[last_split]
    x = torch.empty((_TRAINED_BATCH, *shape), dtype=dtype, device="meta")
    with torch.enable_grad():
        for layer in twin.layers[last_split:]:
            segment = twin.segment(layer.index - 1, layer.index, own_input=layer.index - 1 > last_split)
            with keeper.during(layer.index):
                x = segment(x)
    return {layer: nbytes // _TRAINED_BATCH for layer, nbytes in keeper.kept.items()}


def _without_content(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@dataclass
class _Cost:
    """Cost of one node."""

    flops: int = 0
    traffic: int = 0
    alive: int = 0
    workspace: int = 0


class _Visitor(TorchDispatchMode, ABC):
    """Sees every operation that makes a new tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = meta_result(func, args, kwargs)
        result = func(*args, **kwargs) if known is None else known
        if not func.is_view:
            self.made(func, args, kwargs, result)
        return result

    @abstractmethod
    def made(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of one operation and its new tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see hapi.models.graph.analysis


class _Counter(_Visitor):
    """Operations, bytes that they read and write, and what is alive meanwhile, for each node."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self._copies = copies
        self.costs: dict[fx.Node, _Cost] = defaultdict(_Cost)
        self._node: fx.Node | None = None
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @contextmanager
    def around(self, node: fx.Node) -> Iterator[None]:
        """Count operations in the block for ``node``."""
        self._node = node
        with self:
            yield

    def made(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one operation: what it computes, reads and writes, and what is alive around it."""
        leaving = _tensors(result)
        cost = _Cost() if self._node is None else self.costs[self._node]
        if self._node is not None and self._node.op != "placeholder":
            count: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
            cost.flops += count(*args, **kwargs, out_val=result) if count is not None else 0
            entering = (t for t in _tensors((args, kwargs)) if t.untyped_storage()._cdata in self._alive)
            cost.traffic += sum(_nbytes(t) for t in (*entering, *leaving))  # weights do not count
        for tensor in leaving:
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        alive = sum(nbytes for _, nbytes in self._alive.values())
        if self._copies and func is torch.ops.aten.convolution.default:
            alive += _nbytes(args[0]) + _nbytes(result)
            cost.workspace = max(cost.workspace, _nbytes(args[1]))
        cost.alive = max(cost.alive, alive)


class _Keeper(_Visitor):
    """Memory that autograd keeps for the backward pass, each piece for the layer that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, int] = defaultdict(int)
        self._layer = 0
        self._makers: dict[int, int] = {}

    @contextmanager
    def during(self, layer: int) -> Iterator[None]:
        """Count operations in the block for ``layer``."""
        self._layer = layer
        with self, torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t):
            yield

    def made(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._makers.update({t.untyped_storage()._cdata: self._layer for t in _tensors(result)})

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        maker = self._makers.pop(storage._cdata, None)  # None: a weight, the first input, or counted before
        if maker is not None:
            self.kept[maker] += storage.nbytes()
        return tensor


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def fill(model: LayeredModel, start: int, stop: int, device: torch.device) -> None:
    """Give layers ``start + 1`` to ``stop`` meaningless weights, for timing."""
    for name in model.tensor_names(start, stop):
        old = model.tensors.get(name)
        if not old.is_meta:
            continue
        small = 0.01 if old.is_floating_point() else 0
        new = torch.full(old.shape, small, dtype=old.dtype, device=device)
        model.assign(name, nn.Parameter(new) if isinstance(old, nn.Parameter) else new)
    model.to(device)
