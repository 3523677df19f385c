"""Ways of doing one thing that a benchmark compares, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from hapi.errors import UsageError


class Named(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """Name for flags and records."""


_W = TypeVar("_W", bound=Named)


def way_called(name: str, ways: Sequence[_W]) -> _W:
    """Return the one of ``ways`` with this name; :class:`UsageError` for an unknown one."""
    for way in ways:
        if way.name == name:
            return way
    raise UsageError(f"--way {name}: expected one of {', '.join(way.name for way in ways)}")
