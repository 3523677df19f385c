"""Identity of a prefix: the operations and numbers of its layers, as one digest per split.

DStore identifies models by their structure. Resident weights that tenants share need their content as well,
so both go in. Layers past the split do not: a prefix is the same for every head.
"""

from __future__ import annotations

import functools
import hashlib
import json
import types
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from hapi.errors import ModelError
from hapi.models.graph.cuts import Crossings, CutPoint
from hapi.models.graph.segment import slice_nodes
from hapi.models.graph.user_code import held_text, user_code
from hapi.models.tensors import tensor_bytes
from hapi.models.user_objects import (
    CODE,
    hooks_of,
    module_attributes,
    object_state,
    packed_texts,
    plain_contents,
    plain_text,
)

FORMAT = "hapi-front-3"
"""Version of the canonical text below; it changes whenever the same front would get another digest."""

DIGEST_DIGITS = 32
"""Hexadecimal digits of a digest: no second content of one can be found in 2^128 tries."""


def content_digest(data: memoryview | bytes) -> str:
    """Return the first 128 bits of the SHA-256 of ``data``, in hex.

    It is a strong digest, as it decides which tensors tenants share: anyone who could make other weights of a
    known digest would have them used in the place of the known ones. With xxh3 that takes no search at all.
    """
    digest = ContentDigest()
    digest.update(data)
    return digest.hexdigest()


class ContentDigest:
    """:func:`content_digest` of data that comes piece by piece."""

    def __init__(self) -> None:
        self._state = hashlib.sha256()

    def update(self, data: memoryview | bytes) -> None:
        """Add ``data`` to what came before."""
        self._state.update(data)

    def hexdigest(self) -> str:
        """Return the digest of all data so far."""
        return self._state.hexdigest()[:DIGEST_DIGITS]


def content_key(digest: str, form: torch.Tensor) -> str:
    """Text that two tensors share when one can take the other's place: same elements, dtype, shape and layout.

    ``form`` has the last three (it may be on the meta device). The layout counts because kernels are chosen by it,
    and another kernel gives other last bits.
    """
    dtype, shape = str(form.dtype).removeprefix("torch."), "x".join(map(str, form.shape))
    layout = "" if form.is_contiguous() else f" strides {','.join(map(str, form.stride()))}"
    return f"{digest} {dtype} {shape}{layout}"


class TensorDigests:
    """Digests of tensors, remembered until the tensor is changed in place."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}

    def of(self, name: str, tensor: torch.Tensor) -> str:
        """Digest of the content. Raises :class:`ModelError` when the tensor has none (meta device)."""
        if tensor.is_meta:
            raise ModelError(
                f"tensor {name!r} is not loaded, so it has no digest; load the front's layers first"
            )
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        digest = content_digest(tensor_bytes(tensor))
        self.remember(tensor, digest)
        return digest

    def remember(self, tensor: torch.Tensor, digest: str) -> None:
        """Note that ``tensor``'s present content is known to have ``digest``."""
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, digest)


def plain_tensors(module: nn.Module, path: str) -> list[str]:
    """Return the names of the tensors that ``module``, at ``path``, and its submodules keep as plain
    attributes.

    Those computed from parameters are left out, as the parameters determine them; so are containers, see
    :func:`module_settings`.
    """
    return sorted(
        f"{inner}.{key}"
        for inner, child in module.named_modules(prefix=path)
        for key, value in vars(child).items()
        if isinstance(value, torch.Tensor) and value.grad_fn is None
    )


def structure_text(
    module: nn.Module, crossings: Crossings, points: Sequence[CutPoint | None], names: Sequence[str]
) -> list[str]:
    """Return one canonical text per layer (between ``points``): operations, arguments, module settings.

    Args:
        module: the model.
        crossings: its eval graph.
        points: the cuts that end the layers; None for the input.
        names: of the parameters and buffers.
    """
    index = {node: i for i, node in enumerate(crossings.nodes)}
    texts = []
    for before, after, name in zip(points, points[1:], names, strict=False):
        if after is None:
            raise ValueError("only the first place may be the input")
        lines = [_node_text(module, node, index) for node in slice_nodes(crossings, before, after)]
        texts.append(json.dumps([name, lines, index[after.node]], ensure_ascii=True))
    return texts


def _node_text(module: nn.Module, node: fx.Node, index: dict[fx.Node, int]) -> list[str]:
    target = node.target if isinstance(node.target, str) else name_with_code(node.target)
    if node.op == "call_module":
        target = f"{target} {module_settings(module.get_submodule(target))}"
    arguments = [value_text(a, index) for a in node.args]
    keywords = [f"{k}={value_text(v, index)}" for k, v in sorted(node.kwargs.items())]
    return [str(index[node]), node.op, target, *arguments, *keywords]


def module_settings(module: nn.Module) -> str:
    """Class, attributes (strides, eps, number of heads ...) and hooks of a module and what is in it.

    A container that holds tensors is taken as empty: it is a cache that forward fills, and says nothing.
    """
    plain = {
        key: value_text(_without_cache(value), {}) for key, value in sorted(module_attributes(module).items())
    }
    inner = {name: module_settings(child) for name, child in module.named_children()}
    hooks = [held_text(hook) or "unread" for hook in hooks_of(module)]
    more = [texts for texts in (hooks, packed_texts(module)) if texts]
    found = [name_with_code(type(module)), plain, inner, *more]
    return json.dumps(found, ensure_ascii=True)


def _without_cache(value: Any) -> Any:
    if not _holds_tensors(value):
        return value
    return {} if isinstance(value, dict) else []


def _holds_tensors(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, torch.Tensor) or _holds_tensors(item) for item in inner)


def value_text(value: Any, index: dict[fx.Node, int]) -> str:
    """Return an argument or a setting as canonical text, other text for another value, whatever names are in it.

    A list and a tuple are the same, and so is any order of a dictionary or set. Of an object of a library, and of one
    that holds such or tensors, the type counts alone.

    Args:
        value: the argument.
        index: numbers by which nodes in it are written.
    """
    return _value_text(value, index, frozenset())


def _value_text(value: Any, index: dict[fx.Node, int], within: frozenset[int]) -> str:
    """Text of a value inside of the data classes of these ids."""

    def joined(values: Iterable[Any]) -> str:
        return ",".join(_value_text(v, index, within) for v in values)

    if isinstance(value, fx.Node):
        return f"%{index[value]}"
    if isinstance(value, Enum):
        return f"<{name_with_code(type(value))!r}.{value.name!r}>"
    if contents := plain_contents(value):
        attributes = held_text(object_state(value))
        return f"<{name_with_code(type(value))!r}>({joined(contents)} {attributes!r})"
    if isinstance(value, list | tuple):
        return f"[{joined(value)}]"
    if isinstance(value, dict):
        return (
            "{" + ",".join(sorted(f"{joined([key])}:{joined([held])}" for key, held in value.items())) + "}"
        )
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(joined([held]) for held in value)) + ",}"
    if isinstance(value, slice):
        return f"slice({joined([value.start, value.stop, value.step])})"
    if (text := plain_text(value)) is not None:
        return text
    # Objects print their address, which says nothing; their type and name do. Quoted, as a name may spell anything.
    named = f"<{name_with_code(value if callable(value) else type(value))!r}>"
    if isinstance(value, functools.partial):
        return f"{named}({joined([value.func, value.args, value.keywords])})"
    if is_dataclass(value) and not isinstance(value, type | nn.Module) and id(value) not in within:
        held = {each.name: getattr(value, each.name, None) for each in fields(value) if each.compare}
        return f"{named}({_value_text(held, index, within | {id(value)})})"
    has_more = not isinstance(value, CODE) or isinstance(value, types.MethodType)
    text = held_text(value) if has_more else None
    return named if text is None else f"{named}({text!r})"


def name_with_code(thing: Any) -> str:
    """Return the name of a class or function, with the digest of its code if it is a user's own."""
    digest = user_code(thing)
    return " ".join([qualified_name(thing), *([] if digest == "" else [digest or "unread"])])


def qualified_name(thing: Any) -> str:
    """Return the name of a class or function with its module's, without the latter where versions of torch differ."""
    module = getattr(thing, "__module__", None) or ""
    name = (
        getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or type(thing).__qualname__
    )
    # Where torch keeps a function changes between versions (torch._C._nn, torch.nn.functional), its name not.
    return name if module.startswith(("torch", "_operator")) or not module else f"{module}.{name}"
