"""Pieces of the page: sections, figures, tables, and the one place where text becomes HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def section(title: str, body: str) -> str:
    """Return a part of the page with its heading."""
    return f"<section><h2>{escaped(title)}</h2>\n{body}</section>"


def figure(svg: str, caption: str, wide: bool = False) -> str:
    """Return a drawing with its caption; a ``wide`` one is scrolled rather than shrunk."""
    words = f"<figcaption>{escaped(caption)}</figcaption>" if caption else ""
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}>{scrolled('Figure', svg)}{words}</figure>"


def scrolled(label: str, content: str) -> str:
    """Return ``content`` in a frame that scrolls, by keyboard too, where the page is narrower."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(label)}">{content}</div>'


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    classes: Sequence[str] = (),
    left: Iterable[int] = (),
    long: Iterable[int] = (),
) -> str:
    """Return a table whose first column heads its rows.

    Args:
        caption: text above it.
        head: titles of the columns.
        rows: cells of each row, as text.
        classes: style class of each row; empty for none.
        left: numbers of the columns that hold text.
        long: numbers of the columns that may wrap.
    """
    kinds = [
        " ".join(k for k, those in (("l", set(left)), ("long", set(long))) if i in those)
        for i in range(len(head))
    ]
    tops = "".join(
        f'<th scope="col" class="{kind}">{escaped(name)}</th>' for kind, name in zip(kinds, head, strict=True)
    )
    full = ' class="full"' if len(head) > 5 else ""
    lines = []
    for number, row in enumerate(rows):
        first, *others = row
        cells = "".join(
            f'<td class="{kind}">{escaped(cell)}</td>' for kind, cell in zip(kinds[1:], others, strict=True)
        )
        kind = classes[number] if classes else ""
        lines.append(
            f'<tr class="{kind}"><th scope="row" class="{kinds[0]}">{escaped(first)}</th>{cells}</tr>'
        )
    return scrolled(
        caption,
        f"<table{full}><caption>{escaped(caption)}</caption><thead><tr>{tops}</tr></thead>\n"
        f"<tbody>{chr(10).join(lines)}</tbody></table>",
    )


def escaped(text: str) -> str:
    """Return ``text`` from any source as content or attribute value; characters that no page may have are
    replaced.
    """
    return escape("".join(c if c.isprintable() or c == "\n" else "�" for c in text))


def decimal(value: float | None) -> str:
    """Format a loss."""
    return "–" if value is None else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Format a share."""
    return "–" if value is None else f"{value:.1%}"
