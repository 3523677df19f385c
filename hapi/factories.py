"""Model factories of a user's own (``package.module:factory``): who may name them, and where they are looked for."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from pathlib import Path

from hapi.errors import UsageError

_FACTORY = re.compile(r"(?!timm:|store:)[\w.-]{1,200}:[\w.:-]{1,200}", re.ASCII)


def is_factory(model: str) -> bool:
    """Whether ``model`` names a factory, not a library's model or a pushed one (``timm:NAME``, ``store:NAME``)."""
    return _FACTORY.fullmatch(model) is not None


def check_allowed(factory: str, allowed: Collection[str], name: str) -> None:
    """:class:`UsageError` if the pushed model ``name`` is of a factory that nobody here allowed.

    Whoever writes into a store chooses the names in it, and a factory is imported and called. ``allowed`` has
    factories or their modules, as hapi-server's ``--allow-model`` does.
    """
    if is_factory(factory) and not {factory, factory.partition(":")[0]} & set(allowed):
        raise UsageError(
            f"model {name!r} is made by the code of {factory!r}, which would run here; if you trust it, allow it "
            f"with --allow-model {factory}"
        )


def search_here() -> None:
    """Modules in the current folder are found too, as they are by ``python SCRIPT``; an installed command's are not."""
    try:
        cwd = str(Path.cwd())
    except FileNotFoundError:  # a folder that was removed has no modules
        return
    if cwd not in sys.path:
        sys.path.insert(0, cwd)
