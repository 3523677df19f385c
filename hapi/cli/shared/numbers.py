"""Bounded numbers on the command line: errors are reported at once, in one line.

``parser.add_argument("--bs", type=count(1, 65536))`` refuses text that is not a number, not finite or out of
bounds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from hapi.errors import UsageError
from hapi.text import printable
from hapi.units import format_bytes, parse_bandwidth, parse_bytes, parse_count, parse_duration

MOST_BYTES = 1 << 48
"""More than any machine has: what only bounds something may be as large."""
DAY = 86400.0
_SHOWN = 40
"""Characters of a wrong text that are shown."""


class Number:
    """Reads one kind of number within bounds; the ``type`` of an argument."""

    def __init__(self, read: Callable[[str], Any], low: float, high: float, expected: str) -> None:
        """Read numbers in ``low`` to ``high``; ``expected`` is the range for people, such as ``1 to 64``."""
        self._read, self.low, self.high, self.expected = read, low, high, expected

    def __call__(self, text: str) -> Any:
        """Return the number; ``ArgumentTypeError`` for anything else."""
        shown = repr(text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...")
        try:
            value = self._read(text)
        except UsageError as error:
            reason = str(error).split(": ", 1)[-1]  # the flag's name takes the place of the quantity's
            raise argparse.ArgumentTypeError(printable(f"{reason}; expected {self.expected}")) from None
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"expected {self.expected}, got {printable(shown)}") from None
        if not self.low <= value <= self.high:  # false for what is not a number, too
            raise argparse.ArgumentTypeError(f"expected {self.expected}, got {printable(shown)}")
        return value


def count(low: int, high: int) -> Number:
    """A whole number, also as ``10k`` or ``1.5M``."""
    return Number(lambda text: parse_count(text, "number"), low, high, f"{low} to {high}")


def size(low: int, high: int = MOST_BYTES, expected: str | None = None) -> Number:
    """Bytes, as ``64MiB`` or ``1.5GB``."""
    return Number(parse_bytes, low, high, expected or f"{format_bytes(low)} to {format_bytes(high)}")


def seconds(low: float, high: float = 100 * DAY) -> Number:
    """A duration, as ``1.5``, ``200ms`` or ``1h30m``."""
    return Number(parse_duration, low, high, f"{low:g} to {high:g} seconds")


def rate(low: float = 1e3, high: float = 1e14) -> Number:
    """Bits per second, as ``1Gbps``."""
    return Number(parse_bandwidth, low, high, f"{low / 1e3:g}kbps to {high / 1e12:g}Tbps")


def real(low: float, high: float, *, suffix: str = "") -> Number:
    """Any number, also with ``suffix`` behind it."""
    return Number(
        lambda text: _finite(text.removesuffix(suffix)), low, high, f"{low:.9g}{suffix} to {high:.9g}{suffix}"
    )


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or not text.isascii() or "_" in text:
        raise ValueError(text)
    return value
