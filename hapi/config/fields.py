"""Rules of a settings class for its fields: types, ranges, units, flags (see :mod:`hapi.config.settings`)."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule of a field beside its type, from ``hapi.config.settings.setting``."""

    help: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    unit: str | None = None
    flags: tuple[str, ...] = ()
    env: str | None = None
    metavar: str | None = None
    none_help: str | None = None

    def range_text(self) -> str:
        """The bounds as the end of "a number ..." (empty without bounds)."""
        parts = []
        if self.above is not None:
            parts.append(f"above {self.above:.15g}")
        if self.low is not None:
            parts.append(f"from {self.low:.15g}")
        if self.high is not None:
            parts.append(f"to {self.high:.15g}" if parts else f"up to {self.high:.15g}")
        return "".join(" " + part for part in parts)

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is within the bounds."""
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )


@dataclass(frozen=True, kw_only=True)
class SettingField:
    """One field of a settings class, its type resolved."""

    name: str
    annotation: Any
    rule: Rule
    required: bool
    default: Any
    """The default, ``None`` when the field is required."""


@functools.cache
def settings_fields(cls: Any) -> tuple[SettingField, ...]:
    """The fields of the settings class ``cls`` in order of definition."""
    hints = typing.get_type_hints(cls)
    found = []
    for f in dataclasses.fields(cls):
        default = f.default
        if default is MISSING and f.default_factory is not MISSING:
            default = f.default_factory()
        found.append(
            SettingField(
                name=f.name,
                annotation=hints[f.name],
                rule=f.metadata.get("hapi", Rule()),
                required=default is MISSING,
                default=None if default is MISSING else default,
            )
        )
    return tuple(found)


def flat(value: Any) -> dict[str, Any]:
    """The settings of the instance ``value`` as a file has them: nested settings as dicts."""
    cls: Any = type(value)
    held = {f.name: getattr(value, f.name) for f in settings_fields(cls)}
    return {name: flat(inner) if dataclasses.is_dataclass(inner) else inner for name, inner in held.items()}


def members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def settings_class(annotation: Any) -> Any | None:
    """The settings class that ``annotation`` is, or is optionally; None for plain values."""
    return next((m for m in members(annotation) if dataclasses.is_dataclass(m)), None)


def every_field(cls: Any, prefix: str = "") -> Iterator[SettingField]:
    """All plain fields of ``cls``, and of the settings nested in it, these with dotted names."""
    for f in settings_fields(cls):
        nested = settings_class(f.annotation)
        if nested is not None:
            yield from every_field(nested, f"{prefix}{f.name}.")
        else:
            yield dataclasses.replace(f, name=prefix + f.name)


def other_names(cls: Any) -> dict[str, str]:
    """Names under which settings of ``cls`` may be given too, from the flags beside ``--the-name``, to their names."""
    return {
        flag.removeprefix("--").replace("-", "_"): f.name
        for f in settings_fields(cls)
        for flag in f.rule.flags
    }


def flag_of(name: str) -> str:
    """The flag of a dotted setting name: ``validation.every_n`` is ``--validation-every-n``."""
    return "--" + name.replace("_", "-").replace(".", "-")


def variable_of(f: SettingField, prefix: str) -> str:
    """The environment variable of a setting: its own, or ``HAPI_TRAIN_LR`` for ``lr`` with the prefix ``HAPI_TRAIN_``.

    Without both there is none, and the text is empty.
    """
    return f.rule.env or (prefix and prefix + f.name.upper().replace(".", "_"))


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``known``, otherwise ``"; known are ..."``."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, 0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
