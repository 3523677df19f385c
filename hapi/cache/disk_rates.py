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

from hapi.process.read_ahead import announced
from hapi.process.write_back import begin_writing, wait_written

STRETCH_BYTES = 64 << 20
"""A rate is that of the last so many bytes: a disk may become slower when its fast part is full."""
_LEAST_SECONDS = 1e-4
"""Below this a clock says nothing."""
PROBE_BYTES = 64 << 20
WRITE_SECONDS, READ_SECONDS = 0.5, 0.3
_PIECE = 1 << 20
_AHEAD = 8
"""Pieces that are on their way to the disk while the next ones are written, or from it, as a cache does it."""
_LEFT_OUT = 0.2
"""Part of the time whose pieces do not count: what comes first may go into a buffer."""


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


def measure_disk(folder: Path, nbytes: int = PROBE_BYTES) -> DiskRates:
    """Measure the disk of ``folder`` with a file that is removed again.

    A few megabytes are always on their way to the disk, as when a cache is filled: one at a time would measure how long
    the disk takes to answer. What is read back was dropped from the page cache before, where the system can be told.

    Args:
        folder: where to measure; the nearest folder above it that exists, if it does not.
        nbytes: most bytes that are written.

    Returns:
        The rates; None for what could not be measured.
    """
    folder = folder.absolute()
    nearest = next((path for path in (folder, *folder.parents) if path.is_dir()), folder)
    written, read = [(0, 0.0)], [(0, 0.0)]
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
        written = _write(file.fileno(), nbytes)
        read = _read(file.fileno(), written[-1][0])
    return DiskRates(_steady_rate(read), _steady_rate(written))


def _read(descriptor: int, nbytes: int) -> list[tuple[int, float]]:
    """Read for :data:`READ_SECONDS`, ``nbytes`` at most; return the bytes that had come by which time."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.monotonic()
    came, pieces = [(0, began)], [(descriptor, start, _PIECE) for start in range(0, nbytes, _PIECE)]
    for _, start, _ in announced(pieces, lambda piece: piece):
        if start and time.monotonic() >= began + READ_SECONDS:
            break
        came.append((came[-1][0] + len(os.pread(descriptor, _PIECE, start)), time.monotonic()))
    return came


def _write(descriptor: int, nbytes: int) -> list[tuple[int, float]]:
    """Write for :data:`WRITE_SECONDS`, ``nbytes`` at most; return the bytes that were on the disk by which time."""
    piece = os.urandom(min(_PIECE, max(1, nbytes)))  # a disk may shorten what repeats
    began = time.monotonic()
    arrived, done, waited = [(0, began)], 0, 0

    def wait(up_to: int) -> None:
        """Wait for bytes that were written."""
        nonlocal waited
        wait_written(descriptor, waited, up_to - waited)
        waited = up_to
        arrived.append((waited, time.monotonic()))

    while done < nbytes and (not done or time.monotonic() < began + WRITE_SECONDS):
        count = os.pwrite(descriptor, piece, done)
        begin_writing(descriptor, done, count)
        done += count
        if (
            done - waited > min(_AHEAD, len(arrived)) * _PIECE
        ):  # more and more: a slow disk is soon waited for
            wait(waited + _PIECE)
    while waited < done:
        wait(min(done, waited + _PIECE))
    ended = time.monotonic()
    os.fsync(descriptor)
    synchronized = time.monotonic()
    if (
        synchronized - ended > ended - began
    ):  # nothing was waited for before, as where a system has no call for it
        arrived = [(0, began), (done, synchronized)]
    return arrived


def _steady_rate(done: Sequence[tuple[int, float]]) -> float | None:
    """Bytes a second by (bytes, time) in order, without the first part of the time where enough is left."""
    began, ended = done[0][1], done[-1][1]
    start, last_start = began + _LEFT_OUT * (ended - began), ended - _LEAST_SECONDS
    first = next((one for one in done[:-1] if start <= one[1] <= last_start), done[0])
    seconds = ended - first[1]
    return (done[-1][0] - first[0]) / seconds if seconds >= _LEAST_SECONDS else None
