"""Docstrings: every public name has one, they begin with a verb or a noun phrase, and they name real arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
from support.parsed import ROOT, modules_of, tree_of

TRANSLATED = re.compile(r"(Of|What|Whatever|Who|Whoever|Whose|Whom|Nobody)\b")
MOST_TRANSLATED = 10
"""Docstrings that may begin so in the whole tree."""
ARGUMENT = re.compile(r"(\s+)\*{0,2}(\w+):")
LEAST_EXPLAINED = 0.5
"""Share of the package's public functions with three or more parameters whose docstring has an Args section."""

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Function = ast.FunctionDef | ast.AsyncFunctionDef
LOCAL = "<locals>"


def _names(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST, str | None]]:
    """Name, node and docstring of a module, of all definitions in it, and of attributes that have a docstring."""
    body: list[ast.stmt] = getattr(node, "body", [])
    if isinstance(node, Definition):
        yield name, node, ast.get_docstring(node)
    for before, statement in zip([None, *body], body, strict=False):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = f"{name}.{LOCAL}" if isinstance(node, Function) else name
            yield from _names(statement, f"{scope}.{statement.name}" if scope else statement.name)
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _names(statement, name)
        elif isinstance(before, ast.Assign | ast.AnnAssign) and _is_text(statement):
            target = before.target if isinstance(before, ast.AnnAssign) else before.targets[0]
            yield f"{name}.{ast.unparse(target)}", before, ast.literal_eval(statement.value)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


class Documented(NamedTuple):
    """What the tests look at."""

    name: str
    """``path::name``."""
    text: str | None
    is_definition: bool
    arguments: list[str] | None
    """Of a function."""


@cache
def _documented() -> tuple[Documented, ...]:
    """Everything in the tree."""
    return tuple(
        Documented(
            f"{path.relative_to(ROOT)}::{name}",
            text,
            isinstance(node, Definition),
            _arguments(node) if isinstance(node, Function) else None,
        )
        for path in modules_of("hapi", "benchmarks")
        for name, node, text in _names(tree_of(path))
    )


def _is_public(name: str) -> bool:
    """Whether the name is neither private nor inside of a function."""
    return not any(part.startswith("_") or part == LOCAL for part in name.partition("::")[2].split("."))


def _arguments(function: Function) -> list[str]:
    """Names of the parameters, without self and a class method's cls."""
    a = function.args
    found = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(extra for extra in (a.vararg, a.kwarg) if extra)]
    bound = ["cls"] if any(ast.unparse(d) == "classmethod" for d in function.decorator_list) else ["self"]
    return [argument.arg for argument in found if argument.arg not in bound]


def _explained(text: str) -> list[str]:
    """Names in the Args section of a docstring."""
    section = re.search(r"^Args:\n(.*?)(?:\n\s*\n|\Z)", text, re.DOTALL | re.MULTILINE)
    entries = [ARGUMENT.match(line) for line in section.group(1).split("\n")] if section else []
    return [entry.group(2) for entry in entries if entry and len(entry.group(1)) == 4]


def test_docstrings_begin_with_a_verb_or_a_noun_phrase() -> None:
    wrong = [
        f"{found.name}: {found.text.splitlines()[0]}"
        for found in _documented()
        if found.text and TRANSLATED.match(found.text)
    ]
    assert len(wrong) <= MOST_TRANSLATED, "reword these, as docs/contributing.md says:\n" + "\n".join(wrong)


def test_every_public_name_has_a_docstring() -> None:
    missing = [
        found.name
        for found in _documented()
        if found.is_definition and not found.text and _is_public(found.name)
    ]
    assert not missing, "say what they are or do:\n" + "\n".join(missing)


def test_explained_arguments_exist() -> None:
    wrong = [
        f"{found.name}: {argument}"
        for found in _documented()
        if found.arguments is not None and found.text
        for argument in _explained(found.text)
        if argument not in found.arguments
    ]
    assert not wrong, "the function has no such argument; follow its signature:\n" + "\n".join(wrong)


def test_many_arguments_are_explained() -> None:
    functions = [
        (found.name, bool(_explained(found.text or "")))
        for found in _documented()
        if found.arguments is not None
        and found.name.startswith("hapi/")
        and _is_public(found.name)
        and len(found.arguments) >= 3
    ]
    bare = [name for name, explained in functions if not explained]
    share = 1 - len(bare) / len(functions)
    assert share >= LEAST_EXPLAINED, (
        f"only {share:.0%} have an Args section; some that have none: {bare[:20]}"
    )


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Of each layer.", True),
        ("What a profile holds.", True),
        ("Offset of a layer.", False),
        ("Whole file.", False),
    ],
)
def test_translated_beginnings_are_recognised(text: str, wrong: bool) -> None:
    assert bool(TRANSLATED.match(text)) is wrong
