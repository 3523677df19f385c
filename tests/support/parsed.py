"""The project's modules, parsed once for all tests of a process that look at them."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

import hapi

ROOT = Path(hapi.__file__).parents[1]


@cache
def _trees(room: str) -> dict[Path, tuple[ast.Module, tuple[ast.AST, ...]]]:
    """Trees of the modules in a folder of the checkout, which no garbage collection has to look through again."""
    gc.collect()
    gc.disable()
    try:
        found = {}
        for path in sorted((ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
            found[path] = tree, tuple(ast.walk(tree))
        gc.freeze()
    finally:
        gc.enable()
    return found


def modules_of(*rooms: str) -> list[Path]:
    """Every module of these folders of the checkout."""
    return [path for room in rooms for path in _trees(room)]


def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a module; it may not be changed."""
    return _trees(path.relative_to(ROOT).parts[0])[path][0]


def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a module's tree, in the order of :func:`ast.walk`."""
    return _trees(path.relative_to(ROOT).parts[0])[path][1]
