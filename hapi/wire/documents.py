"""JSON from the other side, read strictly: what two readers might understand differently, or nobody, is refused."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_VALUES = 2_000_000
"""Values of one document, at most: each takes a hundred bytes of memory, and two on the wire."""
MAX_DIGITS = 20
"""Digits of an integer: 64 bits have that many."""


def parse_document(data: bytes | bytearray) -> Any:
    """Read the one JSON document in ``data`` (UTF-8, bounded by its sender's reader).

    Raises :class:`ValueError` for anything else: fields given twice, numbers that are none or have no end, nesting
    beyond what the parser can follow, more than :data:`MAX_VALUES` values.
    """
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=each_once,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of an object's fields; ValueError for two of one name, which two readers may read differently."""
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise ValueError(f"field {name[:80]!r} is given twice")
        document[name] = value
    return document


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _bounded(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)
