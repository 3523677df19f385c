"""Foreign text, made safe for a terminal, a log and a message."""

from __future__ import annotations

import re

NAME_CHARACTERS = 200
"""Bound of a single name in a table or a message."""
MESSAGE_CHARACTERS = 4000
"""Bound of a whole message."""
_CUT = " ... "
_KEPT = "\u00a0\u200c\u200d"
"""Characters without a glyph that words of some languages need and that steer nothing: a space, and two joiners."""
CLASS_CHARACTERS = 8192
"""Bound of a class's name on arrival; those of packed datasets are shorter."""


def printable(text: object, limit: int = NAME_CHARACTERS) -> str:
    """Return ``text`` as one line that cannot steer a terminal, of at most ``limit`` characters.

    Control characters, escapes, line ends, marks of writing direction, lone surrogates and all else that has no
    glyph appear as their escapes in Python (``\\x1b``, ``\\u202e``, ``\\udc80``). Where text is too long, its
    middle is left out: a message ends with what to do.

    Args:
        text: Any text, or an object whose ``str()`` is meant.
        limit: The longest result, in characters.
    """
    shown = str(text)
    if len(shown) > limit:  # before anything is done for each character
        shown = _cut(shown, limit)
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
        if len(shown) > limit:
            shown = _cut(shown, limit)
    return shown


def counted(number: int, noun: str, shown: str = "") -> str:
    """Return a number, as it is to be ``shown`` or in digits, with its noun: ``1 class``, ``2.5k classes``."""
    plural = "" if number == 1 else "es" if noun.endswith(("s", "tch", "sh", "x")) else "s"
    return f"{shown or number} {noun}{plural}"


def class_name(text: str) -> str:
    """Return the name of a class that cannot steer a terminal, however it is printed: as :func:`printable`.

    Spaces that do not break and joiners of characters stay as they are, as in Persian words.
    """
    if text.isprintable() and len(text) <= CLASS_CHARACTERS:
        return text
    parts = re.split(f"([{_KEPT}])", text[: CLASS_CHARACTERS + 1])
    shown = "".join(part if part in _KEPT else printable(part, CLASS_CHARACTERS) for part in parts)
    return shown if len(shown) <= CLASS_CHARACTERS else _cut(shown, CLASS_CHARACTERS)


def _cut(text: str, limit: int) -> str:
    """The beginning and the end of ``text``, ``limit`` characters together."""
    room = max(0, limit - len(_CUT))
    end = room // 3
    return (text[: room - end] + _CUT + text[len(text) - end :])[:limit]
