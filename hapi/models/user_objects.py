"""Contents of a user's own modules and objects, as far as they decide what these compute.

A library's classes have versions (:mod:`hapi.cache.code_version`); a user's own are told by their code
(:mod:`hapi.models.graph.user_code`) and by what is in their objects.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from hapi.models.tensors import tensor_bytes

LIBRARIES = frozenset(("torch", "torchvision", "timm", "numpy", "PIL", *sys.stdlib_module_names)) - {
    "__main__"
}
"""Packages whose versions are in the code version, or which come with Python."""
CODE = type | types.FunctionType | types.MethodType | types.BuiltinFunctionType
"""Kinds of code."""
_PLAIN = str | bytes | int | float | complex | range
_CONTAINERS = (dict, list, tuple, set, frozenset)
_NAMED_BY_TORCH = torch.dtype | torch.device | torch.memory_format | torch.layout
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that torch gives each module."""


def is_users(thing: Any) -> bool:
    """Return whether ``thing`` is a class or function that is no library's."""
    module = getattr(thing, "__module__", None) or ""
    return isinstance(thing, type | types.FunctionType) and module.split(".")[0] not in LIBRARIES


def module_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module's class has made: settings and objects, but no tensors and submodules.

    Names that begin with an underscore count in modules of a user's own class alone: in those of a library they follow
    from the others.
    """
    own = any(map(is_users, type(module).__mro__))
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_TORCH
        and (own or not name.startswith("_"))
        and not isinstance(value, torch.Tensor | nn.Module)
    }


def packed_texts(module: nn.Module) -> list[str]:
    """Return texts of the weights of a quantised module of torch, which are no tensors of its own; none for others."""
    if not any(isinstance(value, torch.ScriptObject) for value in vars(module).values()):
        return []
    return [text for name, value in sorted(module.state_dict().items()) for text in _state_texts(name, value)]


def _state_texts(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _state_texts(f"{name}.{place}", item)
    elif isinstance(value, torch.Tensor):
        # Steps and values together tell scales and zero points.
        parts = (value.int_repr(), value.dequantize()) if value.is_quantized else (value,)
        digests = [hashlib.sha256(tensor_bytes(part)).hexdigest() for part in parts]
        yield f"{name} {value.dtype} {list(value.shape)} {digests}"
    else:
        yield f"{name} {value!r}"


def hooks_of(module: nn.Module) -> list[Any]:
    """Return what runs before and after a module's forward, but for what torch itself has put there."""
    return _without_those_of_torch([*module._forward_pre_hooks.values(), *module._forward_hooks.values()])


def hooks_of_all_modules() -> list[Any]:
    """Return what runs before and after every module's forward in this process, likewise."""
    every = torch.nn.modules.module
    return _without_those_of_torch(
        [*every._global_forward_pre_hooks.values(), *every._global_forward_hooks.values()]
    )


def _without_those_of_torch(hooks: list[Any]) -> list[Any]:
    return [hook for hook in hooks if not (getattr(hook, "__module__", None) or "").startswith("torch.")]


def object_state(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a user's own class or of a data class, of a namespace, or of a module.

    Paths are left out: the same may lie elsewhere on another machine.

    Returns:
        None for any other value.
    """
    if isinstance(value, CODE | Enum):
        return None
    if isinstance(value, nn.Module):
        return {**module_attributes(value), **dict(value.named_children())}
    if is_dataclass(value):
        return {one.name: getattr(value, one.name, None) for one in fields(value) if one.compare}
    if not (is_users(type(value)) or isinstance(value, types.SimpleNamespace | argparse.Namespace)):
        return None
    slots = [getattr(each, "__slots__", ()) for each in type(value).__mro__]
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    found = {name: getattr(value, name) for name in names if name != "__dict__" and hasattr(value, name)}
    found.update(getattr(value, "__dict__", {}))
    return {name: held for name, held in found.items() if not _is_path(held)}


def plain_contents(value: Any) -> list[Any]:
    """Return what an object of a user's own kind of dict, list, tuple or set has in it, beside its attributes."""
    return [kind(value) for kind in _CONTAINERS if isinstance(value, kind) and is_users(type(value))]


def plain_text(value: Any) -> str | None:
    """Return the text of a value that holds nothing else, such as a number, an array or a type of elements.

    Returns:
        None for any other value.
    """
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, _NAMED_BY_TORCH):
        return str(value)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return f"{value.dtype.str}{list(value.shape)}{hashlib.sha256(value.tobytes()).hexdigest()}"
    return None


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike) or (isinstance(value, str) and os.sep in value)
