"""Fields of a foreign JSON object, by type; an error names the field's place in the document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hapi.errors import ConfigError

MAX_ENTRIES = 100_000


class Fields:
    """An object of the document, with its place in it."""

    def __init__(self, document: Any, where: str) -> None:
        if not isinstance(document, Mapping):
            raise ConfigError(f"{where}: expected an object, found {type(document).__name__}")
        self._document, self.where = document, where

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null."""
        return self._document.get(name) is not None

    def named(self, name: str) -> bool:
        """Return whether the field is there, perhaps null."""
        return name in self._document

    def raw(self, name: str) -> Any:
        """Return the unchecked value; :class:`ConfigError` when it is missing."""
        if name not in self._document:
            raise ConfigError(f"{self.where}: field {name!r} is missing")
        return self._document[name]

    def number(self, name: str) -> float:
        """Return a finite number."""
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number", value)
        if not abs(value) < 1e300:
            raise ConfigError(f"{self.where}.{name}: the number is out of range")
        return float(value)

    def integer(self, name: str) -> int:
        """Return a whole number of at least 0."""
        value = self.number(name)
        if value != int(value) or not 0 <= value < 1e18:
            raise self._wrong(name, "a whole number of at least 0", self.raw(name))
        return int(value)

    def seconds(self, name: str) -> float:
        """Return a number of at least 0."""
        value = self.number(name)
        if value >= 1e18:
            raise ConfigError(f"{self.where}.{name}: the number is out of range")
        if value < 0:
            raise ConfigError(f"{self.where}.{name}: is negative")
        return value

    def text(self, name: str) -> str:
        """Return text, at most 1000 characters of it."""
        value = self.raw(name)
        if not isinstance(value, str):
            raise self._wrong(name, "text", value)
        return value[:1000]

    def optional(self, name: str) -> float | None:
        """Return a number; None also for a loss that diverged, which the report has as null."""
        value = self.raw(name) if self.has(name) else None
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return None if value is None else self.number(name)

    def whole(self, name: str) -> int | None:
        """Return a whole number, or None."""
        return self.integer(name) if self.has(name) else None

    def inner(self, name: str) -> Fields:
        """Return an object within."""
        return Fields(self.raw(name), f"{self.where}.{name}")

    def items(self, name: str) -> list[Any]:
        """Return a list."""
        value = self.raw(name)
        if not isinstance(value, list | tuple) or len(value) > MAX_ENTRIES:
            raise self._wrong(name, f"a list of at most {MAX_ENTRIES}", value)
        return list(value)

    def objects(self, name: str) -> list[Fields]:
        """Return the elements of a list of objects; none when the field is absent."""
        if not self.has(name):
            return []
        return [Fields(item, f"{self.where}.{name}[{i}]") for i, item in enumerate(self.items(name))]

    def shown(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the fields of an inner object as text; none when it is absent."""
        if not self.has(name):
            return ()
        found = self.inner(name)._document
        return tuple((str(key)[:200], as_text(value)) for key, value in found.items())

    def _wrong(self, name: str, expected: str, value: Any) -> ConfigError:
        return ConfigError(f"{self.where}.{name}: expected {expected}, found {type(value).__name__}")


def as_text(value: Any) -> str:
    """Return a setting or fact as text for people, not longer than a paragraph."""
    if value is None or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) for item in value[:50])[:500]
    return str(value)[:500]
