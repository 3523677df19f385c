"""Torchvision, imported without torch's compiler.

Torchvision wants two things of the compiler (``torch._dynamo``) when it is imported: a function that ``roi_align``
asks one question when it is called, and a mark on one function not to be compiled. For that the compiler is imported,
which takes 1.3 of the 1.5 seconds of torchvision's import; nothing of ours compiles.
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
    """The module of that name, ``torchvision`` or one inside it."""
    with _LOCK, _compiler_later():
        return importlib.import_module(module)


@contextmanager
def _compiler_later() -> Iterator[None]:
    """Where torch's compiler has not been imported: stand-ins for what torchvision wants of it.

    They import the real one as soon as they are called. Afterwards everybody else finds the real one.
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
    """What is imported from it is there at once, and works by importing the real module when it is called."""

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
