"""Rates of the cache's disk: measured while it is used, and by a short probe before."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

STRETCH_BYTES = 64 << 20
"""A rate is that of the last so many bytes: a disk may become slower when its fast part is full."""
_LEAST_SECONDS = 1e-4
"""Below this a clock says nothing."""
PROBE_BYTES = 32 << 20
PROBE_SECONDS = 0.3
_PIECE = 1 << 20


class DiskRates(NamedTuple):
    """Bytes a second; None for what was not measured."""

    read: float | None
    write: float | None


class WriterPace(NamedTuple):
    """Seconds of a cache's writer for a byte on the disk; 0 for what was not measured."""

    work: float
    """Encoding, and handing over to the system."""
    wait: float
    """Waiting for the disk at the end of a segment."""


class DiskBacklog(NamedTuple):
    """A disk's rate of writing, and what it has yet to write."""

    rate: float | None
    """Bytes a second; None where it is not known."""
    nbytes: float
    """Bytes that the page cache has for it."""


class RateMeter:
    """Rate of the last stretch of transfers. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, stretches: int = 1) -> None:
        """Begin without a measurement.

        Args:
            clock: returns seconds.
            stretches: number of times :data:`STRETCH_BYTES` of which the rate is the mean.
        """
        self._lock, self._clock, self._stretches = threading.Lock(), clock, stretches
        self._under_way, self._counted = 0, 0.0
        """Transfers that have begun and not ended, and the time up to which their seconds were counted."""
        self._parts: deque[tuple[int, float]] = deque()
        self._bytes = 0
        self._seconds = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a transfer; one of no bytes (a wait for the disk) belongs to those before it."""
        with self._lock:
            self._add(nbytes, seconds)

    def begin(self) -> None:
        """Note that a transfer begins, in any thread; :meth:`end` must follow."""
        with self._lock:
            if not self._under_way:
                self._counted = self._clock()
            self._under_way += 1

    def end(self, nbytes: int) -> None:
        """Count a transfer that ends: time in which several are under way, one behind the other, counts once."""
        with self._lock:
            self._under_way -= 1
            before, self._counted = self._counted, self._clock()
            self._add(nbytes, self._counted - before)

    def _add(self, nbytes: int, seconds: float) -> None:
        self._parts.append((nbytes, seconds))
        self._bytes += nbytes
        self._seconds += seconds
        while self._bytes - self._parts[0][0] >= self._stretches * STRETCH_BYTES:
            first, took = self._parts.popleft()
            self._bytes -= first
            self._seconds -= took

    @property
    def rate(self) -> float | None:
        """Bytes a second of the last stretch; None before there was anything to measure."""
        with self._lock:
            if not self._bytes or self._seconds < _LEAST_SECONDS:
                return None
            return self._bytes / self._seconds


def measure_disk(folder: Path, nbytes: int = PROBE_BYTES, seconds: float = PROBE_SECONDS) -> DiskRates:
    """Measure the disk of ``folder`` with a file that is removed again.

    Every megabyte that is written is brought to the disk before the next one; what is read back was dropped from the
    page cache before, where the system can be told. The second half of the time counts: what comes first may go into a
    buffer, or be what a bounded rate lets pass at once.

    Args:
        folder: where to measure; the nearest folder above it that exists, if it does not.
        nbytes: most bytes that are written.
        seconds: time after which no further megabyte is begun; half of it for each direction.

    Returns:
        The rates; None for what could not be measured.
    """
    folder = folder.absolute()
    nearest = next((path for path in (folder, *folder.parents) if path.is_dir()), folder)
    reads, writes = list[_Transfer](), list[_Transfer]()
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
        descriptor = file.fileno()
        piece = os.urandom(min(_PIECE, max(1, nbytes)))  # a disk may shorten what repeats
        done, deadline = 0, time.monotonic() + seconds / 2
        while done < nbytes and (not done or time.monotonic() < deadline):
            started = time.monotonic()
            written = os.pwrite(descriptor, piece, done)
            os.fsync(descriptor)
            writes.append(_Transfer(written, started, time.monotonic()))
            done += written
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        deadline = time.monotonic() + seconds / 2
        for start in range(0, done, _PIECE):
            if start and time.monotonic() >= deadline:
                break
            started = time.monotonic()
            reads.append(_Transfer(len(os.pread(descriptor, _PIECE, start)), started, time.monotonic()))
    return DiskRates(_late_rate(reads), _late_rate(writes))


class _Transfer(NamedTuple):
    nbytes: int
    began: float
    ended: float


def _late_rate(done: Sequence[_Transfer]) -> float | None:
    """Bytes a second of those that began in the second half of the time, at least of the last one."""
    meter = RateMeter()
    for one in done:
        if one is done[-1] or one.began >= (done[0].began + done[-1].ended) / 2:
            meter.add(one.nbytes, one.ended - one.began)
    return meter.rate
