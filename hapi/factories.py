"""Factories of user models (``package.module:factory``): where they are found, and which may be called."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Collection
from pathlib import Path

from hapi.errors import ModelChoiceError, UsageError

_FACTORY = re.compile(r"(?!timm:|store:)[\w.-]{1,200}:[\w.:-]{1,200}", re.ASCII)


def is_factory(model: str) -> bool:
    """Return whether ``model`` names a factory, not a library's model or a pushed one (``timm:NAME``,
    ``store:NAME``).
    """
    return _FACTORY.fullmatch(model) is not None


def check_allowed(factory: str, allowed: bool | Collection[str], name: str) -> None:
    """Raise :class:`UsageError` unless ``factory``, which makes the model ``name``, is allowed.

    Whoever wrote the file, or can write into a store, has chosen it, and a factory is imported and called.

    Args:
        factory: ``package.module:factory``, as the model's manifest or file names it.
        allowed: all or none, or factories and whole modules, as given to hapi-server's ``--allow-model``.
        name: the model's name or file, for the message.
    """
    if isinstance(allowed, bool):
        allowed = (factory,) if allowed else ()
    if is_factory(factory) and not {factory, factory.partition(":")[0]} & set(allowed):
        raise UsageError(
            f"model {name!r} would run the code of {factory!r} here; if you trust it, allow it with "
            f"--allow-model {factory} (allow_import in Python)"
        )


def check_module(model: str) -> None:
    """Raise :class:`ModelChoiceError` if ``model`` is a factory in a package or module that is not there.

    Nothing is imported.
    """
    if not is_factory(model):
        return
    module, _, attribute = model.partition(":")
    if module.endswith(".py"):
        raise ModelChoiceError(
            f"{model!r}: a module is named without .py; write {module.removesuffix('.py')}:{attribute}"
        )
    top = module.partition(".")[0]
    if top not in sys.modules and (not top or importlib.util.find_spec(top) is None):
        raise ModelChoiceError(f"{model!r} cannot be imported: there is no module {top!r}")


def search_here() -> None:
    """Make modules in the current folder importable, as ``python SCRIPT`` does and an installed command does
    not.
    """
    try:
        cwd = str(Path.cwd())
    except FileNotFoundError:  # a folder that was removed has no modules
        return
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
