"""Strict reading of JSON from elsewhere: anything that two readers might understand differently is refused.

It is the one reader of documents that another process, another tier or a person wrote: requests, answers,
frames' headers, objects of a store, profiles, reports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from hapi.errors import BadRequestError

MAX_VALUES = 2_000_000
"""Most values of one document: each takes a hundred bytes of memory, and two on the wire."""
MAX_DIGITS = 20
"""Most digits of an integer, as many as 64 bits have."""


def parse_document(data: bytes | bytearray, max_values: int = MAX_VALUES, *, nan: bool = False) -> Any:
    """Read the one JSON document in ``data`` (UTF-8).

    Args:
        data: the text, of bounded size.
        max_values: most values, approximately; commas within texts count too.
        nan: accept ``NaN`` and ``Infinity`` as numbers, as Python's own writer makes them.

    Raises:
        ValueError: ``data`` is anything else. That includes a field given twice, a number that is not finite,
            an integer of more than :data:`MAX_DIGITS` digits, and nesting that the parser cannot follow.
    """
    # A value takes at least a byte and its comma or bracket, so that a short text need not be counted.
    if len(data) > max_values and data.count(b",") + data.count(b"[") + data.count(b"{") > max_values:
        raise ValueError(f"more than {max_values} values")
    # A call for each integer would double the time of a request, and hardly a document has a long one.
    long_integers = _LONG_INTEGER in data.translate(_DIGITS)
    try:
        return _DECODERS[nan, long_integers].decode(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of an object's fields; ValueError for two of one name."""
    document: dict[str, Any] = {}
    for name, value in pairs:
        if name in document:
            raise ValueError(f"field {name[:80]!r} is given twice")
        document[name] = value
    return document


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number


def _bounded(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


_DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else ord(" ") for byte in range(256))
_LONG_INTEGER = b"0" * MAX_DIGITS
_DECODERS = {
    (nan, long_integers): json.JSONDecoder(
        object_pairs_hook=_each_once,
        parse_constant=None if nan else _no_number,
        parse_float=_finite,
        parse_int=_bounded if long_integers else None,
    )
    for nan in (False, True)
    for long_integers in (False, True)
}
"""Decoders by two flags: NaN is a number; there is a run of digits that may be too long."""


def strict_fields(
    document: Any, allowed: Mapping[str, bool], what: str, *, answer: bool = False
) -> dict[str, Any]:
    """Return ``document`` as a dict with known keys only.

    Args:
        document: parsed JSON.
        allowed: name of each known key, and whether it is required.
        what: name of the document, for messages.
        answer: leave unknown keys out: a server's answer, which may be of a later version.

    Raises:
        BadRequestError: it is no object, a key is missing, or one is unknown and not left out.
    """
    if not isinstance(document, dict):
        raise BadRequestError(f"{what}: expected an object, got {type(document).__name__}")
    unknown = sorted(set(document) - set(allowed))
    if unknown and not answer:
        raise BadRequestError(
            f"{what}: unknown field {shortened(unknown[0])}; known are {', '.join(sorted(allowed))}"
        )
    missing = sorted(name for name, required in allowed.items() if required and name not in document)
    if missing:
        raise BadRequestError(f"{what}: field {missing[0]!r} is missing")
    return {name: value for name, value in document.items() if name in allowed} if unknown else document


def check_int(value: Any, low: int, high: int, what: str) -> int:
    """Return ``value`` if it is a whole number within bounds.

    Args:
        value: parsed JSON; a bool is no number.
        low: inclusive.
        high: inclusive.
        what: name of the value, for messages.

    Raises:
        BadRequestError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequestError(f"{what}: expected an integer from {low} to {high}, got {shortened(value)}")
    return value


def check_number(value: Any, low: float, high: float, what: str) -> float:
    """Return ``value`` as a float if it is a number (no bool) in low..high, else raise :class:`BadRequestError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequestError(f"{what}: expected a number from {low:g} to {high:g}, got {shortened(value)}")
    return float(value)


def shortened(value: Any) -> str:
    """``repr`` of a value in a message, of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
