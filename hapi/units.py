"""Sizes, bandwidths, durations and counts as people write them, read strictly and printed back.

A size is a number of bytes, a bandwidth a number of *bits* per second (as links are sold), a duration a
number of seconds. A bare number is in that base unit, but a bandwidth needs its unit. Ambiguous text is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from hapi.errors import UsageError

MAX_VALUE = 2**63 - 1
"""Largest bytes, bits per second or count that is read (they travel as signed 64-bit integers)."""

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_PREFIXES = {**_DECIMAL, **_BINARY}
_SECONDS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "sec": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
# The exponent has at most two digits, so that "1e999999999" cannot ask for an integer of a billion digits.
_NUMBER = r"(?:\d(?:_?\d){0,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][+-]?\d{1,2})?"
_QUANTITY = re.compile(
    rf"\s*(?P<sign>[+-]?)(?P<number>{_NUMBER})\s*(?P<unit>[^\d\s.+_-][^\d\s]{{0,11}})?\s*", re.ASCII
)
_DURATION_PART = re.compile(rf"({_NUMBER})\s*([a-zµ]{{1,3}})\s*", re.ASCII)


def parse_bytes(text: str | int, what: str = "size", example: str = "64MiB or 1.5GB") -> int:
    """Parse ``"64MiB"``, ``"1.5GB"``, ``"512 kB"``, ``"4096"`` or an int into bytes.

    MiB is 2**20, MB is 10**6. ``64M`` (which of the two?) and ``64Mb`` (bits) are refused. Raises
    :class:`UsageError`, its message beginning with ``what``; of what cannot be read it shows an ``example``.
    """
    number, unit = _split(text, what, example)
    if not unit:
        return _whole(number, text, what)
    if re.fullmatch(r"[kKMGTP]b|[KMGTP]ib|.*[bB]its?", unit):
        raise UsageError(f"{what}: {_shown(text)} is in bits; write bytes, such as 64MB or 64MiB")
    lower = unit.lower()
    if lower in _PREFIXES and lower[0] in "kmgtp":
        prefix = lower[0].upper()
        raise UsageError(
            f"{what}: {_shown(text)} is ambiguous; write {prefix}B (decimal) or {prefix}iB (binary)"
        )
    multiplier = _PREFIXES.get(lower.removesuffix("b")) if lower.endswith("b") else None
    if multiplier is None:
        raise UsageError(
            f"{what}: unknown unit in {_shown(text)}; use B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    return _whole(number * multiplier, text, what)


def parse_bandwidth(text: str | float, what: str = "bandwidth") -> float:
    """Parse ``"1Gbps"``, ``"12 Gbit/s"``, ``"100Mb/s"``, ``"125MB/s"`` (bytes) or a number that is not text into
    bits per second.

    Raises :class:`UsageError`; zero and negative bandwidths are refused, and text without a unit.
    """
    number, unit = _split(text, what, "1Gbps, 12 Gbit/s or 125MB/s")
    if unit is None and isinstance(text, str):
        shown = text.strip()[:40]
        raise UsageError(f"{what}: {_shown(text)} has no unit: {shown}Mbps or {shown}MB/s?")
    match = (
        re.fullmatch(r"([kKmMgGtT]?i?)(b|bit|bits|B|Bytes?|bytes?)?(?:/s|ps|/sec)", unit) if unit else None
    )
    if unit and (match is None or match[1].lower() not in _PREFIXES or (match[2] is None and match[1])):
        raise UsageError(
            f"{what}: unknown unit in {_shown(text)}; use kbps, Mbps, Gbps, Gbit/s, MB/s or MiB/s"
        )
    bits = number
    if match is not None:
        per_unit = 8 if match[2] in ("B", "Byte", "Bytes", "byte", "bytes") else 1
        bits = number * _PREFIXES[match[1].lower()] * per_unit
    if not 0 < bits <= MAX_VALUE:
        raise UsageError(f"{what}: {_shown(text)} is out of range; it must be above 0 and at most 2^63 bit/s")
    return float(bits)


def parse_duration(text: str | float, what: str = "duration") -> float:
    """Parse ``"1.5s"``, ``"200ms"``, ``"10us"``, ``"2min"``, ``"1h30m"`` or a number into seconds.

    Raises :class:`UsageError`; negative durations are refused.
    """
    if isinstance(text, str) and (parts := _DURATION_PART.findall(text)):
        unread = _DURATION_PART.sub("", text, count=len(parts)).strip()
        units = [unit for _, unit in parts]
        if not unread and len(set(units)) == len(units) and all(unit in _SECONDS for unit in units):
            seconds = sum(
                (Decimal(number.replace("_", "")) * _SECONDS[unit] for number, unit in parts), Decimal()
            )
            return _checked_seconds(seconds, text, what)
        raise UsageError(f"{what}: cannot read {_shown(text)}; write it as 200ms, 1.5s, 2min or 1h30m")
    number, unit = _split(text, what, "200ms, 1.5s or 1h30m")
    if unit:
        raise UsageError(f"{what}: unknown unit in {_shown(text)}; use ns, us, ms, s, min, h or d")
    return _checked_seconds(number, text, what)


def parse_count(text: str | int, what: str = "count") -> int:
    """Parse ``"10k"``, ``"1.5M"``, ``"1_000"``, ``"1e3"`` or an int into a whole number at least 0 (k =
    1000).

    Raises :class:`UsageError`.
    """
    number, unit = _split(text, what, "1000, 10k or 1.5M")
    multiplier = _DECIMAL.get((unit or "").lower())
    if multiplier is None:
        raise UsageError(f"{what}: unknown unit in {_shown(text)}; use k, M or G")
    return _whole(number * multiplier, text, what)


def environment_number(
    environment: Mapping[str, str], name: str, default: float, low: float, high: float
) -> float:
    """Read the variable ``name``, a number from ``low`` to ``high``; ``default`` when it is not set or empty.

    :class:`UsageError` for anything else.
    """
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise UsageError(f"{name}={text[:80]}: expected a number from {low:g} to {high:g}")
    return value


def format_bytes(size: float) -> str:
    """``size`` bytes with a binary prefix, three significant digits or more: ``"64.0 MiB"``, ``"512 B"``."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_bandwidth(bits_per_second: float) -> str:
    """Bits per second with a decimal prefix: ``"1.0 Gbit/s"``."""
    return _scaled(bits_per_second, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def format_count(count: float) -> str:
    """A count with a decimal prefix: ``"1.5M"``, ``"999"``."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T"), gap="")


def format_money(money: float) -> str:
    """Money in the currency that prices were given in: ``"12.34"``, ``"0.0123"``."""
    # Cents; below ten of them three digits, so that two ways that cost little can be told apart.
    digits = 2 if money >= 0.0995 or money <= 0 else min(9, 2 - math.floor(math.log10(money)))
    return f"{money:.{digits}f}"


def format_duration(seconds: float) -> str:
    """Seconds as a person says them: ``"350 us"``, ``"12.3 ms"``, ``"4.56 s"``, ``"1h 2min"``."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    for limit, scale, digits, unit in ((1e-3, 1e6, 0, "us"), (1.0, 1e3, 1, "ms"), (60.0, 1.0, 2, "s")):
        # Compared after rounding, so that 0.99999 s does not become "1000.0 ms".
        if round(seconds * scale, digits) < limit * scale:
            return f"{seconds * scale:.{digits}f} {unit}"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}min {left}s"
    return f"{minutes // 60}h {minutes % 60}min"


def _split(text: object, what: str, example: str) -> tuple[Decimal, str | None]:
    """Number and unit of ``text``; a number that is not text has no unit."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise UsageError(f"{what}: expected something like {example}, got {_shown(text)}")
    if isinstance(text, int) and abs(text) > MAX_VALUE:
        raise UsageError(f"{what}: the number is out of range; it must be from 0 to 2^63-1")
    match = _QUANTITY.fullmatch(text if isinstance(text, str) else repr(text))
    if match is None:
        raise UsageError(f"{what}: cannot read {_shown(text)}; write it as {example}")
    number = Decimal(match["number"].replace("_", ""))
    if match["sign"] == "-" and number != 0:
        raise UsageError(f"{what}: {_shown(text)} is negative")
    return number, match["unit"]


def _whole(number: Decimal, text: object, what: str) -> int:
    if number > MAX_VALUE:
        raise UsageError(f"{what}: {_shown(text)} is out of range; it must be from 0 to 2^63-1")
    if number != int(number):
        raise UsageError(f"{what}: {_shown(text)} is not a whole number")
    return int(number)


def _checked_seconds(seconds: Decimal, text: object, what: str) -> float:
    if seconds > MAX_VALUE // 10**9:
        raise UsageError(f"{what}: {_shown(text)} is out of range; it must be below 292 years")
    return float(seconds)


def _scaled(value: float, base: int, names: tuple[str, ...], gap: str = " ") -> str:
    sign, value, index = ("-", -value, 0) if value < 0 else ("", value, 0)
    # Compared after rounding, so that 1023.99 KiB becomes "1.0 MiB" and not "1024.0 KiB".
    while round(value, 1) >= base and index + 1 < len(names):
        value, index = value / base, index + 1
    number = (
        f"{value:.0f}"
        if value == int(value) and index == 0
        else f"{value:.{2 if value < 10 and index else 1}f}"
    )
    return f"{sign}{number}{gap}{names[index]}".rstrip()


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


PARSERS: Mapping[str, Callable[[Any, str], float]] = {
    "bytes": parse_bytes,
    "bandwidth": parse_bandwidth,
    "duration": parse_duration,
    "count": parse_count,
}
"""Parser by the name of its quantity, as settings name it (``hapi.config.settings.setting(unit=...)``)."""
