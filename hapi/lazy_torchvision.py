"""Torchvision, imported without torch's compiler.

When torchvision is imported, it needs two things from the compiler (``torch._dynamo``): a function that
``roi_align`` calls, and a marker that keeps one function from being compiled. Importing the compiler for them
takes 1.3 of the 1.5 seconds of torchvision's import, and Hapi compiles nothing.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_COMPILER, _ASKED = "torch._dynamo", "torch._dynamo.utils"
_LOCK = threading.Lock()


def vision(module: str) -> Any:
    """Import and return ``torchvision`` or one of its modules."""
    with _LOCK, _compiler_later():
        return importlib.import_module(module)


@contextmanager
def _compiler_later() -> Iterator[None]:
    """Put stand-ins in the place of torch's compiler during the block, unless it is imported already.

    A stand-in imports the real compiler as soon as it is called. After the block, imports find the real one.
    """
    torch = importlib.import_module("torch")
    lazily = getattr(
        torch, "_disable_dynamo", None
    )  # torch's own way of marking a function without the import
    if _COMPILER in sys.modules or lazily is None:
        yield
        return
    stand_in, disable = _Later(_ASKED), torch.compiler.disable
    sys.modules[_ASKED] = stand_in
    torch.compiler.disable = lazily
    try:
        yield
    finally:
        torch.compiler.disable = disable
        _withdraw(stand_in)


class _Later(types.ModuleType):
    """A module whose names exist at once and import the real module when they are called."""

    def is_compile_supported(self, *args: Any) -> Any:
        return _real(self).is_compile_supported(*args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self), name)


def _real(stand_in: types.ModuleType) -> Any:
    _withdraw(stand_in)
    return importlib.import_module(_ASKED)


def _withdraw(stand_in: types.ModuleType) -> None:
    if sys.modules.get(_ASKED) is stand_in:
        del sys.modules[_ASKED]
