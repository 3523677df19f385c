"""Calls of layers: the tensors that go in and out, and a call that is computed a second time in backward."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

_SMALL_BUFFER = 1 << 16
"""Buffers of at most so many bytes are copied for the second pass where something else may change them."""
_SAMPLED = 64
"""Values of a tensor that are compared between both passes."""
_UNCHANGING = (
    type(None), bool, int, float, complex, str, bytes, slice, range, type, enum.Enum, nn.Module, torch.Size,
    torch.dtype, torch.device, torch.layout, torch.memory_format, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip
"""Types of arguments, beside tensors, that a layer does not change."""


def recomputed(layer: nn.Module, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer whose activations are computed a second time, with what the first call was given and found.

    Args:
        layer: that is called.
        original: its forward.
        args: of it.
        kwargs: of it.
    """
    leaves, form = tree_flatten((args, kwargs))
    if not all(isinstance(leaf, (torch.Tensor, *_UNCHANGING)) for leaf in leaves):
        return original(*args, **kwargs)  # an object that the layer may change, as a cache
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    given = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None  # autograd keeps tensors, and they may leave the memory
    state = LayerState(layer)
    first = [(args, kwargs)]
    """Arguments of the first call, until it is made."""

    def computed(*tensors: torch.Tensor) -> Any:
        """Compute the layer: first with the caller's own arguments, then with their tensors as autograd kept them."""
        if first:
            own_args, own_kwargs = first.pop()
            return original(*own_args, **own_kwargs)
        found = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            found[place] = tensor
        own_args, own_kwargs = tree_unflatten(found, form)
        with state.restored():
            return original(*own_args, **own_kwargs)

    return checkpoint(computed, *given, use_reentrant=False, preserve_rng_state=True)


class LayerState:
    """State of a layer's modules when it is called: attributes, parameters, buffers, training or not.

    ``torch.func.functional_call``, spectral norms, counters and ``eval()`` change them between a layer's forward pass
    and backward, in which it is computed again.
    """

    def __init__(self, layer: nn.Module) -> None:
        """Note it as it is."""
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Tables of names, each with what was in it."""
        self._versions: list[tuple[str, torch.Tensor, int, bytes]] = []
        self._needed = [one.detach() for one in layer.parameters()]
        """Views of parameters, until backward has computed the layer again: they tell that it still needs them."""
        self._leaves = [(one, one.requires_grad) for one in layer.parameters() if one.is_leaf]
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor, int, torch.Tensor | None]] = []
        for module in layer.modules():
            own = {name: _copied(value) for name, value in module.__dict__.items() if name not in _TABLES}
            self._tables += [(module.__dict__, own)]
            for table in (module._parameters, module._buffers):
                self._tables.append((table, dict(table)))
            tensors = {**own, **module._parameters}
            for name, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    self._versions.append(
                        (f"{type(module).__name__}.{name}", value, value._version, _sample(value))
                    )
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    copy = buffer.clone() if buffer.nbytes <= _SMALL_BUFFER else None
                    self._buffers.append((module._buffers, name, buffer, buffer._version, copy))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put it back for a second pass, and then what is there now.

        Raises:
            RuntimeError: a parameter was changed in place since.
        """
        for name, tensor, version, sample in self._versions:
            if tensor._version != version or _sample(tensor) != sample:
                raise _changed(name, tensor, version)
        now = [(table, dict(table)) for table, _ in self._tables]
        toggled = [(one, trains) for one, trains in self._leaves if one.requires_grad != trains]
        try:
            for one, trains in toggled:
                one.requires_grad_(trains)
            for (table, before), (_, found) in zip(self._tables, now, strict=True):
                _put(table, {name: _copied(value) for name, value in before.items()}, found)
            for table, name, buffer, version, copy in self._buffers:
                if buffer._version != version:
                    if copy is None:
                        raise _changed(name, buffer, version)
                    table[name] = copy
            yield
        finally:
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                self._needed.clear()
            for one, trains in toggled:
                one.requires_grad_(not trains)
            for table, found in now:
                _put(table, found, dict(table))


def _sample(tensor: torch.Tensor) -> bytes:
    """Some values, where the CPU has them: not every change has a version."""
    if not tensor.is_cpu or not tensor.numel() or not tensor.is_contiguous() or tensor.is_inference():
        return b""
    count = min(_SAMPLED, tensor.numel())
    values = tensor.detach().as_strided((count,), (tensor.numel() // count,))
    return values.clone().view(torch.uint8).numpy().tobytes()


_TABLES = ("_parameters", "_buffers", "_modules")


def _copied(value: Any) -> Any:
    """A container of its own, so that a second pass adds to that one."""
    return value.copy() if type(value) in (list, dict, set) else value


def _put(table: dict[str, Any], wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """Give a table these entries; others than tables of a module's own."""
    for name in found.keys() - wanted.keys():
        if name not in _TABLES:
            del table[name]
    for name, value in wanted.items():
        if name not in found or found[name] is not value:
            table[name] = value


def _changed(name: str, tensor: torch.Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{name} of shape {list(tensor.shape)} is at version {tensor._version}, and a layer that is computed a second "
        f'time had version {version}: change it after backward, or give activations="swap"'
    )


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` is at work, which knows no hooks of saved tensors."""
    is_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return not is_enabled or torch._C._functorch.peek_interpreter_stack() is not None


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


def dense_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Count the bytes of tensors; sparse ones tell none."""
    return sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
