"""Digests of a user's own code in a model: modules that stand whole in a graph, and functions that it calls.

A graph has the operations of what was traced. What a module does that could not be traced, or a function that is called
as it is, shows in the source alone. The digest is of the normalised source (no comments, docstrings or layout) of the
class or function, of its bases, and of all other code and plain values that these name, so that it is the same in every
process and folder and changes with whatever changes results. Objects that it names count by their class, and by
what they hold if all of that can be told. Libraries have versions (:mod:`hapi.cache.code_version`) and no digest.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import os
import sys
import types
from collections import deque
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from hapi.models.source_files import NoSource, definitions, source_form
from hapi.models.tensors import tensor_bytes
from hapi.models.user_objects import (
    CODE,
    LIBRARIES,
    hooks_of,
    hooks_of_all_modules,
    is_users,
    module_attributes,
    object_state,
    plain_contents,
    plain_text,
)

if TYPE_CHECKING:
    from hapi.models.graph.layers import LayeredModel
    from hapi.models.graph.numbering import Layer

DIGITS = 32
_DEEPEST = 32
"""Most values inside of each other that are looked into."""


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
            one = _function_of(one)
            if id(one) in texts:
                continue
            if is_users(one):
                texts[id(one)] = f"{one.__module__}.{one.__qualname__}", _text(one, todo)
            elif isinstance(
                one, type
            ):  # torch makes subclasses of users' classes, and users replace torch's forward
                todo += filter(is_users, (*one.__mro__, getattr(one, "forward", None)))
    except NoSource:
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
    hooks = hooks_of_all_modules()
    for layer, nodes in zip(model.layers[:split], model.layer_nodes(), strict=False):
        if hooks:
            return layer, f"runs under {_hook_name(hooks[0])} of all modules, which is no part of the model"
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
                    return _hook_name(hook)
    unread = next((thing for thing in called if user_code(thing) is None), None)
    return "" if unread is None else f"{unread.__module__}.{unread.__qualname__}"


def _hook_name(hook: Any) -> str:
    return f"the hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"


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
    found = [] if _is_named_tuple(thing) else definitions(thing, functions)
    scope = _scope(thing, functions)
    if any(map(_computes_defaults, found)):
        defaults = [[one.__qualname__, one.__defaults__, one.__kwdefaults__] for one in functions]
        values[".defaults"] = _value_text(defaults, todo) or ""
    module, imported = sys.modules.get(thing.__module__), dict[str, str]()
    for node in found:
        inside = {} if module is None else _imports(node, module)
        for chain in _names(node):
            _resolve(chain, scope, values, todo)
            _resolve(chain, inside, imported, todo)
    values.update({f"import {name}": text for name, text in imported.items()})
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
    if issubclass(owner, tuple) and hasattr(owner, "_fields"):
        return function.__code__.co_filename == "<string>" or function.__module__ in ("collections", "typing")
    made = function.__code__.co_filename == "<string>" or function.__module__ == "dataclasses"
    return made and hasattr(owner, "__dataclass_fields__")


def _is_named_tuple(thing: Any) -> bool:
    """Whether ``collections.namedtuple`` has made a class, which has no source: its fields and defaults tell all."""
    is_one = isinstance(thing, type) and thing.__bases__ == (tuple,) and hasattr(thing, "_fields")
    written = "__orig_bases__" in vars(thing) or not is_one
    return not written and all(_is_made(thing, function) for _, function in _methods(thing))


def _methods(owner: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Names and functions of a class: methods of all kinds and those of properties."""
    for name, value in vars(owner).items():
        for one in (value.fget, value.fset) if isinstance(value, property) else (value,):
            if isinstance(function := _function_of(one), types.FunctionType):
                yield name, function


def _function_of(value: Any) -> Any:
    """The function in a method of any kind or behind decorators; any other value as it is."""
    with contextlib.suppress(Exception):  # of a user's __getattr__, such as KeyError
        return inspect.unwrap(getattr(value, "__func__", value))
    return value


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


def _imports(node: ast.AST, module: types.ModuleType) -> dict[str, Any]:
    """Values of the names that a definition of ``module`` imports when it runs, as far as they are of its project."""
    found = dict[str, Any]()
    for one in ast.walk(node):
        for alias in one.names if isinstance(one, ast.Import | ast.ImportFrom) else ():
            # The code fails for itself where there is no such module.
            with contextlib.suppress(Exception):
                if isinstance(one, ast.ImportFrom):
                    name = resolve_name("." * one.level + (one.module or ""), module.__package__)
                    found[alias.asname or alias.name] = _member(_imported(name, module), alias.name)
                else:
                    whole = _imported(alias.name, module)
                    first = alias.name.split(".")[0]
                    found[alias.asname or first] = whole if alias.asname else sys.modules[first]
    return found


def _imported(name: str, module: types.ModuleType) -> types.ModuleType:
    """Import a module of the package, or else of the folder, that ``module`` is in; ImportError for any other."""
    first = name.split(".")[0]
    if first != module.__name__.split(".")[0]:
        spec = find_spec(first)
        origin = None if spec is None or first in LIBRARIES else spec.origin
        if origin is None or not Path(origin).is_relative_to(Path(module.__file__ or os.devnull).parent):
            raise ImportError(f"{name} is of another project than {module.__name__}")
    return import_module(name)


def _member(module: types.ModuleType, name: str) -> Any:
    return getattr(module, name) if hasattr(module, name) else import_module(f"{module.__name__}.{name}")


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
        parts = [type(value), state, *plain_contents(value)]
    elif isinstance(value, dict | types.MappingProxyType):
        kind, parts = "list", sorted(value.items(), key=lambda item: inner(item[0]) or "")
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts = list(value)
    elif isinstance(value, slice):
        parts = [value.start, value.stop, value.step]
    else:
        return None
    texts = list(map(inner, parts))
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    return f"{kind}{sorted(known) if isinstance(value, set | frozenset) else known}"
