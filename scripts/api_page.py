"""Write ``docs/api.md`` from the docstrings of what ``import hapi`` offers: ``python scripts/api_page.py``."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
GROUPS = {
    "Training": ("Session", "TrainSettings", "Trainer", "keep_freed_memory"),
    "Datasets": (
        "pack", "PackOptions", "index", "IndexOptions", "verify", "list_datasets", "open_dataset",
        "DatasetReader", "Shuffle",
    ),
    "Models": ("push", "open_model", "list_models"),
    "Plans": ("plan", "Profile", "Job"),
    "Servers": ("run_server", "ServerSettings", "ListenSettings"),
    "Stores and errors": ("open_store", "HapiError", "errors"),
}  # fmt: skip
"""Headings, and the names below them in the page's order."""
_INTRODUCTION = """\
Written by `scripts/api_page.py` from the docstrings; a test compares them. `import hapi` is light: each name is
imported when it is first used. Other modules of the package may change without notice."""
_SECTIONS = re.compile(r"(Args|Returns|Raises|Attributes):\n")


def page() -> str:
    """The whole page as Markdown."""
    import hapi

    parts = ["# Python API", _INTRODUCTION]
    for heading, names in GROUPS.items():
        parts.append(f"## {heading}")
        for name in names:
            parts += described(name, getattr(hapi, name))
    return "\n\n".join(parts) + "\n"


def described(name: str, thing: object) -> list[str]:
    """A heading, the docstring, and for a class its public methods."""
    call = "" if inspect.ismodule(thing) or inspect.isclass(thing) else signature_of(thing)
    parts = [f"### `hapi.{name}{call}`", *rendered(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        parts += methods_of(thing)
    if inspect.ismodule(thing):
        parts += errors_of(thing)
    return parts


def signature_of(function: object) -> str:
    """Parameters with plain defaults; those that are functions or objects show as ``...``."""
    shown = []
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        default = parameter.default
        if default is parameter.empty:
            shown.append(parameter.name)
        else:
            plain = default is None or isinstance(default, bool | int | float | str | tuple)
            shown.append(f"{parameter.name}={default if plain and not isinstance(default, str) else '...'}")
    return f"({', '.join(part for part in shown if part not in ('self', 'cls'))})"


def methods_of(kind: type) -> list[str]:
    """A line for each public method and property that is defined in the class itself."""
    lines = []
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        inner = member.fget if isinstance(member, property) else getattr(kind, name)
        if not callable(inner) or not inner.__doc__ or inner.__name__ != name:
            continue
        call = "" if isinstance(member, property) else signature_of(inner)
        lines.append(f"- `{name}{call}`: {plain(rendered(inspect.getdoc(inner) or '')[0])}")
    return ["Methods and properties:", "\n".join(lines)] if lines else []


def errors_of(module: object) -> list[str]:
    """A line for each error of the tree."""
    kinds = [
        kind for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == "hapi.errors"
    ]  # fmt: skip
    return [
        "\n".join(f"- `{kind.__name__}`: {plain((kind.__doc__ or '').partition('.')[0])}." for kind in kinds)
    ]


def rendered(text: str) -> list[str]:
    """The blocks of a docstring as Markdown: text, examples, and lists of arguments."""
    blocks: list[str] = []
    for block in text.split("\n\n"):
        section = _SECTIONS.match(block)
        if block.startswith(">>>"):
            blocks.append(f"```pycon\n{block}\n```")
        elif block.startswith("    "):
            blocks.append(f"```python\n{textwrap.dedent(block)}\n```")
        elif section is not None:
            entries = re.split(r"\n(?=\S)", textwrap.dedent(block[section.end() :]))
            lines = []
            for entry in entries:
                name, colon, what = plain(entry).partition(": ")
                lines.append(f"- `{name}`: {what}" if colon else f"- {name}")
            blocks.append(f"{section[1]}:\n\n" + "\n".join(lines))
        else:
            blocks.append(plain(block))
    return blocks


def plain(text: str) -> str:
    """One line, with Markdown's marks for code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split()))
    return re.sub(r"``([^`]+)``", r"`\1`", text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), encoding="utf-8")
