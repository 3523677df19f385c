"""Foreign text, made safe for a terminal, a log and a message."""

from __future__ import annotations

NAME_CHARACTERS = 200
"""Bound of a single name in a table or a message."""
MESSAGE_CHARACTERS = 4000
"""Bound of a whole message."""
_CUT = " ... "


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


def _cut(text: str, limit: int) -> str:
    """The beginning and the end of ``text``, ``limit`` characters together."""
    room = max(0, limit - len(_CUT))
    end = room // 3
    return (text[: room - end] + _CUT + text[len(text) - end :])[:limit]
