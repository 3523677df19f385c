"""JSON files that a person names, read into dataclasses: profiles, machines, reports of runs."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from hapi.errors import BadRequestError, ConfigError
from hapi.paths import read_bounded
from hapi.wire.documents import parse_document, strict_fields

_MAX_ENTRIES = 100_000


def load_document(path: str, max_bytes: int, advice: str) -> Any:
    """Read the JSON document in the file at ``path``.

    Args:
        path: the file, as the person wrote it.
        max_bytes: largest sensible size, in bytes.
        advice: what to do if the file is not JSON.

    Raises:
        UsageError: it cannot be read, or is larger.
        ConfigError: it is not JSON.
    """
    raw = read_bounded(path, max_bytes, path)
    try:
        return parse_document(raw)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); {advice}") from None


def read_strictly(kind: type[Any], document: Any, where: str) -> Any:
    """Read ``document`` as the dataclass ``kind``: every field there, none beside, each of its type.

    Args:
        kind: a dataclass of plain values and other such classes.
        document: parsed JSON.
        where: name of the document, for messages.

    Raises:
        ConfigError: a field is wrong; the message has its place below ``where``.
    """
    known = typing.get_type_hints(kind)
    try:
        found = strict_fields(document, dict.fromkeys(known, True), where)
    except BadRequestError as error:
        raise ConfigError(str(error)) from None
    return kind(**{name: _value(known[name], found[name], f"{where}.{name}") for name in known})


def _value(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return read_strictly(kind, value, where)
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        (kind,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
        return _value(kind, value, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or len(value) > _MAX_ENTRIES:
            raise ConfigError(f"{where}: expected a list of at most {_MAX_ENTRIES}")
        (inner, _) = typing.get_args(kind)
        return tuple(_value(inner, element, f"{where}[{i}]") for i, element in enumerate(value))
    if kind in (int, float):
        allowed = int | float if kind is float else int
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ConfigError(f"{where}: expected a number, found {type(value).__name__}")
        if not 0 <= value < 1e18 or not math.isfinite(value):
            raise ConfigError(f"{where}: the number is out of range; expected 0 to 1e18")
        return kind(value)
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", str(kind))
        raise ConfigError(f"{where}: expected {wanted}, found {type(value).__name__}")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise ConfigError(f"{where}: half a character, which cannot be written")
    return value
