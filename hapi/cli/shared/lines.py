"""Lines of a console that fit 100 columns."""

from __future__ import annotations

import textwrap

LINE_COLUMNS = 100
"""Most characters of a line that is no bar; a single long word, such as a path, may take more."""
_INDENT = 6
"""Columns of a title, and of what goes on in another line."""


def print_parts(title: str, *parts: str) -> None:
    """Print ``parts`` after their title, in several lines where one is too short; each line ends after a part."""
    lines = [f"{title:<{_INDENT}}{parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 <= LINE_COLUMNS:
            lines[-1] += f", {part}"
        else:
            lines[-1] += ","
            lines.append(" " * _INDENT + part)
    print("\n".join(lines), flush=True)


def print_wrapped(text: str) -> None:
    """Print a sentence, in several lines where one is too short; none ends within a word."""
    lines = textwrap.wrap(
        text, LINE_COLUMNS, subsequent_indent=" " * _INDENT, break_long_words=False, break_on_hyphens=False
    )
    print("\n".join(lines), flush=True)
