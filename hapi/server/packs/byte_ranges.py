"""The header ``Range`` of a request (RFC 9110, section 14): one range of bytes."""

from __future__ import annotations

import re

from hapi.errors import RangeError

_UNIT = "bytes="
_ONE = re.compile(r"([0-9]{0,19})-([0-9]{0,19})", re.ASCII)


def wanted_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the bytes ``start..stop`` (excluded) that ``header`` asks for; None: the whole object.

    A header of another unit or form means nothing, as the RFC has it.

    Args:
        header: value of ``Range``; None for none.
        size: bytes of the object.

    Raises:
        RangeError: the range has no byte of the object, or there are several ranges.
    """
    asked = (header or "").replace(" ", "").replace("\t", "")
    if not asked.lower().startswith(_UNIT):
        return None
    ranges = asked[len(_UNIT) :]
    if "," in ranges:
        raise _refused("several ranges in one request; send a request for each", size)
    match = _ONE.fullmatch(ranges)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, stop = max(0, size - int(match[2])), size
    else:
        start, last = int(match[1]), int(match[2]) if match[2] else size - 1
        if match[2] and last < start:
            return None
        stop = min(size, last + 1)
    if start >= stop:
        raise _refused(f"bytes {ranges[:50]} were asked for, it has {size}", size)
    return start, stop


def named_end(header: str | None) -> int:
    """Return the bytes that an object has at least if it has the range that ``header`` asks for; 0 where that does not
    say so.
    """
    match = _ONE.fullmatch((header or "").replace(" ", "").lower().removeprefix(_UNIT))
    return int(match[2] or match[1]) + 1 if match is not None and match[1] else 0


def _refused(text: str, size: int) -> RangeError:
    error = RangeError(text)
    error.size = size
    return error
