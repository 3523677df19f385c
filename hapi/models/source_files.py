"""Source of the code that runs: definitions in its file, as long as they are what was compiled.

Source that is not what runs, since the file was edited after it was imported, is as good as none.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import types
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class NoSource(Exception):
    """The source of some code cannot be read, or is not what runs."""


def definitions(thing: Any, functions: list[types.FunctionType]) -> list[Definition]:
    """Return the definition of ``thing`` in its file; all of them, if there are several of its name.

    Args:
        thing: a class or function.
        functions: its own, or those of the class.

    Raises:
        NoSource: there is none, or one of ``functions`` is not what the file has.
    """
    try:
        file = inspect.getsourcefile(thing) or ""
    except TypeError:
        file = functions[0].__code__.co_filename if functions else ""
    linecache.checkcache(file)
    source = _parsed(file, "".join(linecache.getlines(file)))
    for function in functions:
        code = function.__code__
        if _print(code) not in source.codes.get(code.co_qualname, ()):
            raise NoSource
    found = source.nodes.get(thing.__qualname__, [])
    if not found:
        raise NoSource
    return found


@dataclass(frozen=True)
class _Source:
    """A file of source."""

    nodes: dict[str, list[Definition]] = field(default_factory=dict)
    """Definitions by their qualified names."""
    codes: dict[str, set[Any]] = field(default_factory=dict)
    """Prints of the code that they are compiled to, likewise."""


@lru_cache(maxsize=32)
def _parsed(file: str, text: str) -> _Source:
    found = _Source()
    try:
        tree = ast.parse(text)
        codes = [compile(text, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return found
    _collect(tree, "", found)
    while codes:
        code = codes.pop()
        found.codes.setdefault(code.co_qualname, set()).add(_print(code))
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return found


def _collect(node: ast.AST, prefix: str, found: _Source) -> None:
    for child in ast.iter_child_nodes(node):
        below = prefix
        if isinstance(child, Definition):
            name = prefix + ("<lambda>" if isinstance(child, ast.Lambda) else child.name)
            found.nodes.setdefault(name, []).append(child)
            below = f"{name}." if isinstance(child, ast.ClassDef) else f"{name}.<locals>."
        _collect(child, below, found)


def _print(code: types.CodeType) -> tuple[Any, ...]:
    """A code object as far as it decides results: without lines and names of files."""
    constants = tuple(_print(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants


def _constant(value: Any) -> str:
    return f"frozenset {sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)


def source_form(value: Any) -> Any:
    """Return parsed source as JSON: the same for all layouts, comments, docstrings and versions of Python."""
    if isinstance(value, list):
        return [source_form(item) for item in value]
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = dict(ast.iter_fields(value))
    if isinstance(value, _DOCUMENTED) and ast.get_docstring(value, clean=False):
        fields["body"] = value.body[1:]
    if isinstance(value, ast.JoinedStr):  # Python 3.12 ends some formats with an empty text
        fields["values"] = [v for v in value.values if not (isinstance(v, ast.Constant) and v.value == "")]
    kept = {
        name: inner for name, inner in fields.items() if inner is not None and inner != [] and name != "kind"
    }
    return [type(value).__name__, *([name, source_form(inner)] for name, inner in kept.items())]
