"""Paths as a person writes them."""

from __future__ import annotations

from pathlib import Path

from hapi.errors import UsageError


def user_path(text: str | Path, what: str) -> Path:
    """``text`` as a path, its ``~`` or ``~NAME`` replaced; :class:`UsageError` naming ``what`` for an unknown user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{what} {text}: there is no such user's home; write the folder's path") from None
