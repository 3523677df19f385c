"""Models that torch compiles, before or after they were given: what follows them in Python is not in compiled code."""

from __future__ import annotations

import itertools
import weakref
from types import FunctionType
from typing import Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Follower(Protocol):
    """Something that follows a model by its hooks."""

    def note_compiling(self) -> None:
        """Do without them: torch compiles the model, or a part of it."""


class ObservingMode(TorchDispatchMode):
    """A mode that only looks on: what torch compiles runs compiled under it too, with the bits of that.

    Under any other mode torch runs compiled functions as they were written.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: torch compiles as if there were no mode."""
        return True


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch has compiled a model, a part of it, or a function that is an attribute of one."""
    return any(
        type(module).__module__.startswith("torch._dynamo")
        or module._compiled_call_impl is not None
        or any(map(_is_compiled_function, (type(module).forward, *vars(module).values())))
        for module in model.modules()
    )


def _is_compiled_function(value: object) -> bool:
    return isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable")


_FOLLOWERS: weakref.WeakValueDictionary[int, Follower] = weakref.WeakValueDictionary()
_KEYS = itertools.count()


def key_of(follower: Follower) -> int:
    """Return a number for :func:`is_traced`: of objects, torch takes no constants into what it compiles (2.9)."""
    key = next(_KEYS)
    _FOLLOWERS[key] = follower
    return key


def _note(key: int) -> bool:
    """Tell a follower: this is called while torch traces, and its result is a constant of the compiled code."""
    follower = _FOLLOWERS.get(key)
    if follower is not None:
        follower.note_compiling()
    return True


_note._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced(key: int) -> bool:
    """Return whether torch traces the caller, and tell the follower with this key.

    The compiled code has nothing of this.
    """
    return torch.compiler.is_compiling() and _note(key)
