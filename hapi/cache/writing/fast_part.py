"""End of a disk's fast part: found in the rates of what a cache writes, and remembered in its folder.

Many disks take a first part of what comes into a fast buffer, which they empty while they are idle. What a run writes
shows where that ends, by a step between the rates of its stretches. The next run there begins with the buffer empty.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from hapi.atomic import write_atomically
from hapi.wire.documents import parse_document

FILE, MOST_BYTES = "rates.json", 256
"""Name of the file that remembers it, and bytes that it needs at most."""
SLOW_BYTES = 128 << 20
"""Bytes that must have been written slowly: less may be the work of others."""
STEP = 2.0
"""Least ratio of the rates before and after the step."""
_LIMIT = 256
"""Stretches that are told apart; of more, two neighbours become one."""


class Stretch(NamedTuple):
    """Bytes that reached the disk one after the other."""

    nbytes: int
    seconds: float | None
    """None where the disk was not at work all the time, so that they tell no rate."""


@dataclass(frozen=True)
class FastPart:
    """Bytes that a disk takes fast, and its rates (bytes per second) in them and after them."""

    fast_bytes: int
    write: float
    slow_write: float

    @classmethod
    def load(cls, folder: Path) -> FastPart | None:
        """Return what is remembered in a cache's ``folder``; None for nothing, or nothing that can be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            document = parse_document((folder / FILE).read_bytes())
            found = cls(*(document[name] for name in ("fast_bytes", "write", "slow_write")))
            numbers = (found.fast_bytes, found.write, found.slow_write)
            if all(type(n) in (int, float) and math.isfinite(n) and n < 1e18 for n in numbers):
                return found if int(found.fast_bytes) >= 0 < min(found.write, found.slow_write) else None
        return None

    def save(self, folder: Path) -> None:
        """Remember it in ``folder``, if that is there and can be written."""
        if folder.is_dir():
            with contextlib.suppress(OSError, ValueError):
                write_atomically(str(folder / FILE), json.dumps(asdict(self)).encode())


def fast_part(stretches: Sequence[Stretch], before: float | None = None) -> FastPart | None:
    """Return the fast part of the disk that ``stretches`` were written to.

    The step is where two rates fit the stretches best, by the squares of their logarithms.

    Args:
        stretches: in their order, from the first that a process has written.
        before: bytes per second of the disk as a probe found it; counts where no stretch before the step tells a rate.

    Returns:
        None where no step is seen.
    """
    at, known = 0, list[tuple[int, int, float]]()
    for nbytes, seconds in stretches:
        if nbytes > 0 and seconds is not None and seconds > 0:
            known.append((at, nbytes, seconds))
        at += nbytes
    best: tuple[float, FastPart] | None = None
    for place, (start, _, _) in enumerate(known):
        head, tail = known[:place], known[place:]
        fast = _rate(head) if head else before
        if fast is None or sum(nbytes for _, nbytes, _ in tail) < SLOW_BYTES:
            continue
        slow = _rate(tail)
        misfit = _misfit(head, fast) + _misfit(tail, slow)
        if fast >= STEP * slow and (best is None or misfit < best[0]):
            best = misfit, FastPart(start, fast, slow)
    return None if best is None else best[1]


def _rate(stretches: Sequence[tuple[int, int, float]]) -> float:
    return sum(nbytes for _, nbytes, _ in stretches) / sum(seconds for _, _, seconds in stretches)


def _misfit(stretches: Sequence[tuple[int, int, float]], rate: float) -> float:
    return sum(nbytes * math.log(nbytes / seconds / rate) ** 2 for _, nbytes, seconds in stretches)


class WriteLog:
    """Log of the bytes that one process has written into a cache's folder, by stretch. Thread-safe."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._lock = threading.Lock()
        self._stretches: list[Stretch] = []
        self._stretch_bytes = 0
        """Bytes of a stretch up to which more is added to it."""

    def add(self, nbytes: int, seconds: float | None) -> None:
        """Note that ``nbytes`` reached the disk, in ``seconds`` where it was at work in all of them."""
        with self._lock:
            self._append(Stretch(nbytes, seconds))
            if len(self._stretches) > _LIMIT:
                before, self._stretches = self._stretches, []
                self._stretch_bytes = 2 * max(
                    self._stretch_bytes, sum(stretch.nbytes for stretch in before) // _LIMIT
                )
                for stretch in before:
                    self._append(stretch)

    def _append(self, stretch: Stretch) -> None:
        if self._stretches and self._stretches[-1].nbytes + stretch.nbytes <= self._stretch_bytes:
            stretch = _joined(self._stretches.pop(), stretch)
        self._stretches.append(stretch)

    @property
    def written(self) -> int:
        """Bytes in all."""
        with self._lock:
            return sum(stretch.nbytes for stretch in self._stretches)

    @property
    def rate(self) -> float | None:
        """Bytes a second of all stretches that tell a rate; None where none does."""
        with self._lock:
            known = [(0, stretch.nbytes, stretch.seconds) for stretch in self._stretches if stretch.seconds]
        return _rate(known) if known else None

    def fast_part(self, before: float | None) -> FastPart | None:
        """Return :func:`fast_part` of what was written until now."""
        with self._lock:
            stretches = list(self._stretches)
        return fast_part(stretches, before)


def _joined(one: Stretch, other: Stretch) -> Stretch:
    if one.seconds is None or other.seconds is None:
        return Stretch(one.nbytes + other.nbytes, None)
    return Stretch(one.nbytes + other.nbytes, one.seconds + other.seconds)
