"""Changes that a layer's forward pass makes beside its output: a second pass would make them twice."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Sequence
from enum import Enum
from logging import Logger
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.flop_counter import flop_registry

from hapi.offload.activations.compiling import ObservingMode
from hapi.offload.loop.values import bytes_of, flat_view

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_WITHOUT_STATE = (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType, Logger, Enum)
_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch itself keeps in each module."""
_DEPTH = 2
"""Containers in containers that are looked into."""
_LARGEST = 1000
"""Containers of more elements are no state of a layer."""
_Mark = tuple[int, int, int]


class SideEffects:
    """State of a layer, and generators that recomputing does not turn back, before its forward pass.

    What a module itself holds, numbers and lists among it, is put back for a second pass: that may change.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __init__(self, layer: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        """Note all as it is; values too, where the CPU has them: not every change has a version."""
        self._layer, self._inputs, self._buffers = layer, list(inputs), list(layer.buffers())
        self._held = list(_tensors_of(layer))
        self._objects = list({id(one): one for one in _objects_of(layer)}.values())
        self._before = self._digests()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def found(self) -> str | None:
        """Return why a second pass would do otherwise; None without a reason."""
        buffers = list(self._layer.buffers())
        is_same = len(buffers) == len(self._buffers) and all(map(operator.is_, buffers, self._buffers))
        now = self._digests()
        reasons = [
            why for why, before, after in zip(_REASONS, self._before, now, strict=True) if before != after
        ]
        return _REASONS[0] if not is_same else reasons[0] if reasons else None

    def _digests(self) -> list[int]:
        """Digests of all that is noted: copies would take memory while that is measured."""
        marks = [hash(tuple(map(mark_of, tensors))) for tensors in (self._buffers, self._held, self._inputs)]
        return [*marks, _draws(), hash(tuple(map(_digest_of, self._objects)))]


_REASONS = (
    "its forward pass changes buffers, which would change twice",
    "its forward pass changes a parameter or another tensor that it holds, which would change twice",
    "it changes its input in place, which would change twice",
    "it draws from Python's or NumPy's generator, which would draw anew",
    "it changes an object that it holds, or a generator, which would change twice",
)
"""By the digests of :class:`SideEffects`, in their order."""


class LayerOperators(ObservingMode):
    """Counts a layer's operations, and notices random numbers of a generator that it names.

    Recomputing turns torch's own generators back.
    """

    def __init__(self) -> None:
        """Nothing is counted yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.found: str | None = None
        """Why a second pass would do otherwise."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator."""
        named = kwargs or {}
        if any(isinstance(value, torch.Generator) for value in (*args, *named.values())):
            self.found = "it draws from a generator of its own, which would draw anew"
        result = func(*args, **named)
        count = flop_registry.get(getattr(func, "_overloadpacket", func))
        if count is not None:
            self.flops += count(*args, **named, out_val=result)
        return result


def mark_of(tensor: torch.Tensor) -> _Mark:
    """Return what changes when a tensor is changed: version, address, and a digest of a CPU's values."""
    version = 0 if tensor.is_inference() else tensor._version
    if (
        tensor.layout is not torch.strided
        or not tensor.is_cpu
        or type(tensor).__torch_dispatch__ is not _PLAIN
    ):
        return version, 0, 0
    steps = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: (-steps[axis], axis))
    if tensor.is_conj() or tensor.is_neg() or not tensor.permute(order).is_contiguous():
        return version, tensor.data_ptr(), 0
    digest = xxhash.xxh3_64_intdigest(bytes_of(flat_view(tensor.detach())).data)
    return version, tensor.data_ptr(), digest


_PLAIN = torch.Tensor.__torch_dispatch__


def _tensors_of(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of a layer, and tensors that are attributes of its modules."""
    for module in layer.modules():
        yield from (one for one in module._parameters.values() if one is not None)
        yield from (one for one in vars(module).values() if isinstance(one, torch.Tensor))


def _objects_of(layer: nn.Module) -> Iterator[Any]:
    """Yield what the modules of a layer hold, or their code names, and may change unseen."""
    for module in layer.modules():
        for name, value in vars(module).items():
            if name not in _OWN:
                yield from _changing(value, is_restored=True)
        for kind in type(module).__mro__:
            if not kind.__module__.startswith(("torch.", "builtins")):
                yield from _named_in(kind)


def _named_in(kind: type) -> Iterator[Any]:
    """Yield the generators and containers outside of a class that its functions name."""
    for function in vars(kind).values():
        if not isinstance(function, FunctionType):
            continue
        found = [function.__globals__.get(name) for name in function.__code__.co_names]
        found += [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
        yield from (one for one in found if isinstance(one, (*_GENERATORS, list, dict, set)))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not set yet
        return False


def _changing(value: Any, *, is_restored: bool, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield objects that may change, a container only where nothing restores it."""
    if isinstance(value, (list, tuple, set, dict)):
        if not is_restored:
            yield value
        elements = value.values() if isinstance(value, dict) else value
        if depth and len(value) <= _LARGEST:
            for one in list(elements):
                yield from _changing(one, is_restored=False, depth=depth - 1)
    elif isinstance(value, _GENERATORS) or (
        hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_STATE)
    ):
        yield value


def _digest_of(value: Any) -> int:
    """Return a digest of an object's state."""
    return xxhash.xxh3_64_intdigest(repr(_state_of(value)).encode())


def _state_of(value: Any, depth: int = _DEPTH) -> Any:
    """Return what can be compared later; of what it does not know, the identity."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if not depth or isinstance(value, _WITHOUT_STATE):
        return id(value)
    if isinstance(value, dict):
        if len(value) > _LARGEST:
            return len(value)
        return [
            (repr(name) if isinstance(name, str | int) else id(name), _state_of(one, depth - 1))
            for name, one in value.items()
        ]
    if isinstance(value, (list, tuple, set)):
        return len(value) if len(value) > _LARGEST else [_state_of(one, depth - 1) for one in value]
    if hasattr(value, "__dict__"):
        return [(name, _state_of(one, depth - 1)) for name, one in vars(value).items()]
    return id(value)


def _draws() -> int:
    """Return a digest of where Python's and NumPy's generators are."""
    _, keys, *place = np.random.get_state(legacy=True)
    return xxhash.xxh3_64_intdigest(repr((random.getstate(), np.asarray(keys).tobytes(), place)).encode())
