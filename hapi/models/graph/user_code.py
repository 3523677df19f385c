"""Digests of a user's own code in a model: modules that stand whole in a graph, and functions that it calls.

A graph has the operations of what was traced. What a module does that could not be traced, or a function that is called
as it is, shows in the source alone. The digest is of the normalised source (no comments, docstrings or layout) of the
class or function, of its bases, and of all other code and plain values that these name, so that it is the same in every
process and folder and changes with whatever changes results. Objects that it names count by their class, and by
what they hold if all of that can be told. Libraries have versions (:mod:`hapi.cache.code_version`) and no digest.

Source that is not what runs, since the file was edited after it was imported, is as good as none.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import linecache
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from hapi.models.tensors import tensor_bytes
from hapi.models.user_objects import (
    CODE,
    LIBRARIES,
    hooks_of,
    is_users,
    module_attributes,
    object_state,
    plain_text,
)

if TYPE_CHECKING:
    from hapi.models.graph.layers import LayeredModel
    from hapi.models.graph.numbering import Layer

DIGITS = 32
_Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_DEEPEST = 32
"""Most values inside of each other that are looked into."""


class _NoSource(Exception):
    """The source of some code cannot be read, or is not what runs."""


def user_code(thing: Any) -> str | None:
    """Return the digest of a class's or function's code, :data:`DIGITS` hexadecimal digits.

    Returns:
        An empty text for anything of a library, and for what is no code; None for code whose source cannot be read.
    """
    return _digest_of([thing])


def held_text(value: Any) -> str | None:
    """Return the text of a value with all that it holds, code by its digest.

    Returns:
        None where some of it cannot be told: objects of libraries, tensors, and code whose source cannot be read.
    """
    todo = list[Any]()
    text = _value_text([value], todo, tensors=False)
    digest = None if text is None else _digest_of(todo)
    return None if digest is None else f"{text} {digest}"


def _digest_of(todo: list[Any]) -> str | None:
    """The digest of code, empty for that of libraries; None when some source cannot be read."""
    texts: dict[int, tuple[str, str]] = {}
    try:
        while todo:
            one = todo.pop()
            if isinstance(one, functools.partial):
                todo.append(one.func)
                continue
            one = inspect.unwrap(getattr(one, "__func__", one))
            if id(one) not in texts and is_users(one):
                texts[id(one)] = f"{one.__module__}.{one.__qualname__}", _text(one, todo)
    except _NoSource:
        return None
    if not texts:
        return ""
    return hashlib.sha256(json.dumps(sorted(texts.values())).encode()).hexdigest()[:DIGITS]


def unidentified_layer(model: LayeredModel, split: int) -> tuple[Layer, str] | None:
    """Find the first layer of which the digests of ``model`` do not tell what it gives.

    Args:
        model: the model.
        split: the last layer that is looked at.

    Returns:
        The layer, and the reason as a clause for people; None if there is none.
    """
    for layer, nodes in zip(model.layers[:split], model.layer_nodes(), strict=False):
        if layer.always_random:
            return layer, (
                "draws random numbers in eval mode too, so what comes after it differs from epoch to epoch"
            )
        if layer.combines:
            return (
                layer,
                "computes with all samples of a batch, so what it gives for one depends on the others",
            )
        if name := next(filter(None, (_unread(model, node) for node in nodes)), ""):
            return layer, (
                f"runs {name}, whose source cannot be read or is not what runs, so that changes of it would go "
                "unnoticed"
            )
    return None


def _unread(model: LayeredModel, node: fx.Node) -> str:
    """Name of code that a node runs and of which the digests know no more; empty if there is none."""
    called: list[Any] = [] if isinstance(node.target, str) else [node.target]
    if node.op == "call_module":
        for module in model.module.get_submodule(str(node.target)).modules():
            called += _code_of(module)
            for hook in hooks_of(module):
                if held_text(hook) is None:
                    return f"the hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"
    unread = next((thing for thing in called if user_code(thing) is None), None)
    return "" if unread is None else f"{unread.__module__}.{unread.__qualname__}"


def _code_of(module: nn.Module) -> list[Any]:
    """The class of a module, and code in its attributes, as far as these can be told."""
    found: list[Any] = [type(module)]
    for value in module_attributes(module).values():
        held = list[Any]()
        if _value_text([value], held, tensors=False) is not None:
            found += held
    return found


def _text(thing: Any, todo: list[Any]) -> str:
    """Normalised source of a class or function; ``todo`` takes the code that it names."""
    functions, values = [thing], dict[str, str]()
    if isinstance(thing, type):
        todo += thing.__bases__
        functions = []
        for name, function in _methods(thing):
            if _is_made(thing, function):
                continue
            if function.__qualname__.rpartition(".")[0] == thing.__qualname__:
                functions.append(function)
            else:  # put into the class from outside
                todo.append(function)
                values[f".{name}"] = f"{function.__module__}.{function.__qualname__}"
        for name, value in () if issubclass(thing, Enum) else vars(thing).items():
            text = None if name.startswith("__") else _value_text(value, todo)
            if text is not None:
                values[f".{name}"] = text
    found, scope = _definitions(thing, functions), _scope(thing, functions)
    if any(map(_computes_defaults, found)):
        defaults = [[one.__qualname__, one.__defaults__, one.__kwdefaults__] for one in functions]
        values[".defaults"] = _value_text(defaults, todo) or ""
    for node in found:
        for chain in _names(node):
            _resolve(chain, scope, values, todo)
    return json.dumps([[source_form(node) for node in found], sorted(values.items())])


def _computes_defaults(node: ast.AST) -> bool:
    """Whether an argument's default is none that the source shows: it is what it was when the function was made."""
    arguments = (inner for inner in ast.walk(node) if isinstance(inner, ast.arguments))
    defaults = (default for inner in arguments for default in (*inner.defaults, *inner.kw_defaults))
    return not all(default is None or _is_literal(default) for default in defaults)


def _is_literal(node: ast.expr) -> bool:
    with contextlib.suppress(ValueError, TypeError):
        ast.literal_eval(node)
        return True
    return False


def _is_made(owner: type, function: types.FunctionType) -> bool:
    """Whether a method is not written but made from the class's source, in another way by each version of Python."""
    if issubclass(owner, Enum) and function.__module__ == "enum":
        return True
    made = function.__code__.co_filename == "<string>" or function.__module__ == "dataclasses"
    return made and hasattr(owner, "__dataclass_fields__")


def _methods(owner: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Names and functions of a class: methods of all kinds and those of properties."""
    for name, value in vars(owner).items():
        for one in (value.fget, value.fset) if isinstance(value, property) else (value,):
            function = inspect.unwrap(getattr(one, "__func__", one)) if one is not None else None
            if isinstance(function, types.FunctionType):
                yield name, function


def _definitions(thing: Any, functions: list[types.FunctionType]) -> list[_Node]:
    """The definition of ``thing`` in its file; all of them, if there are several of its name.

    Raises:
        _NoSource: there is none, or one of ``functions`` is not what the file has.
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
            raise _NoSource
    found = source.nodes.get(thing.__qualname__, [])
    if not found:
        raise _NoSource
    return found


def _scope(thing: Any, functions: list[types.FunctionType]) -> dict[str, Any]:
    """Values of the names around a definition: those of its module, and of functions that it is in."""
    module = sys.modules.get(thing.__module__)
    scope = dict(vars(module)) if module is not None else {}
    for function in functions:
        scope.update(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not set yet
                scope[name] = cell.cell_contents
    return scope


def _names(node: ast.AST) -> Iterator[list[str]]:
    """Names that a definition reads, each with the attributes that follow it."""
    chain, inner = list[str](), node
    while isinstance(inner, ast.Attribute):
        chain, inner = [inner.attr, *chain], inner.value
    if isinstance(inner, ast.Name):
        yield [inner.id, *chain]
        return
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


def _resolve(chain: list[str], scope: dict[str, Any], values: dict[str, str], todo: list[Any]) -> None:
    """Find what a name stands for: code goes to ``todo``, a plain value's text into ``values``."""
    if chain[0] not in scope:
        return
    value = scope[chain[0]]
    for name in chain[1:]:
        inside = getattr(value, "__dict__", {})
        library = isinstance(value, types.ModuleType) and value.__name__.split(".")[0] in LIBRARIES
        if library or is_users(value) or name not in inside:
            break
        value = inside[name]
    text = _value_text(value, todo)
    if text is not None:
        values[".".join(chain)] = text
    else:
        todo += [value, type(value)]


def _value_text(
    value: Any, todo: list[Any], *, tensors: bool = True, within: frozenset[int] = frozenset()
) -> str | None:
    """Text of a value with all that it holds; None for code alone, and where some of it cannot be told.

    Args:
        value: the value.
        todo: takes the code that it holds.
        tensors: whether tensors have a text.
        within: ids of the values that it is in.
    """

    def inner(held: Any) -> str | None:
        """Text of a part of it."""
        if isinstance(held, CODE) and not isinstance(held, types.MethodType):
            todo.append(held)
            return f"{held.__module__}.{held.__qualname__}" if is_users(held) else held.__qualname__
        return _value_text(held, todo, tensors=tensors, within=within | {id(value)})

    if (text := plain_text(value)) is not None:
        return text
    if isinstance(value, torch.Tensor):
        if not tensors or value.is_meta:
            return None
        return f"{value.dtype}{list(value.shape)}{hashlib.sha256(tensor_bytes(value)).hexdigest()}"
    if id(value) in within or len(within) > _DEEPEST:
        return None
    kind, parts = type(value).__name__, list[Any]()
    if isinstance(value, Enum):
        parts = [type(value), value.name]
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif (state := object_state(value)) is not None:
        parts = [type(value), state]
    elif isinstance(value, dict):
        kind, parts = "list", sorted(value.items(), key=lambda item: inner(item[0]) or "")
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    else:
        return None
    texts = list(map(inner, parts))
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    return f"{kind}{sorted(known) if isinstance(value, set | frozenset) else known}"


@dataclass(frozen=True)
class _Source:
    """A file of source."""

    nodes: dict[str, list[_Node]] = field(default_factory=dict)
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
        if isinstance(child, _Node):
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
