"""Rates of a cache's puts: those that the page cache takes at once, and those that wait for the disk."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hapi.cache.disk_rates import RateMeter
from hapi.cache.writing.fast_part import WriteLog
from hapi.cache.writing.line import LINE_BYTES
from hapi.process.write_back import wait_written

_AT_WORK = 0.5
"""Part of a segment's seconds for which the disk is waited for, from which on it counts as at work in all of them."""
WAITED_BYTES = 4 << 20
"""Bytes that are waited for at once: between them a wait can be left."""
_WRITE_SECONDS, _WRITE_RATE = 0.1, 250e6
"""Longest time of a write that the page cache takes, and its bytes per second: the kernel holds a longer one up until
the disk has written some of what there is."""


class PutRates:
    """Rates of one cache's puts and of its disk. Not thread-safe, but for :meth:`hurried`, :meth:`on_its_way` and
    :attr:`held_up_seconds`."""

    def __init__(self, behind: bool, log: WriteLog | None = None) -> None:
        """Begin without a measurement; ``behind``: the disk is waited for when a segment is full; ``log`` is told what
        has reached it."""
        self._log = log or WriteLog()
        self._behind, self._waited = behind, False
        self._written = RateMeter()
        self.waits = RateMeter()
        """Waits for the disk alone, with the bytes of segments."""
        self.at_work = RateMeter()
        """Segments that the disk was at work on all the time."""
        self.at_least = RateMeter()
        """Segments that have reached the disk in the time since their first put, in which it may have had nothing to
        do: it is no slower."""
        self.waited_seconds = 0.0
        """Seconds of all waits for it."""
        self._bytes, self._seconds, self._since = 0, 0.0, 0.0
        """Bytes and seconds of the open segment's puts, and the time of the first one."""
        self._hurried = threading.Event()
        self._most_on_its_way = LINE_BYTES
        self.waits_now = False
        """True while a put waits for the disk."""
        self._held_up, self._held_up_before = 0.0, 0.0
        """Seconds for which puts waited for the disk, also in writes; and those before the open segment."""
        self._held_up_since: float | None = None
        """Time since which one does; may be to come."""
        self._closed_bytes, self._closed_since = 0, 0.0
        """Bytes of segments that were closed since the last wait, and the time of their first put."""

    @property
    def rate(self) -> float | None:
        """Bytes a second of the last stretch; None before there was anything to measure."""
        return self._written.rate

    @contextmanager
    def writing(self, nbytes: int) -> Iterator[None]:
        """Write that many bytes in the block: if that takes long, the kernel lets the writer wait for the disk."""
        self._held_up_since = time.monotonic() + _WRITE_SECONDS + nbytes / _WRITE_RATE
        try:
            yield
        finally:
            self.waited_seconds += self._go_on()

    def _go_on(self) -> float:
        """Note that the put goes on; return the seconds for which it was held up."""
        since, self._held_up_since = self._held_up_since, None
        seconds = 0.0 if since is None else max(0.0, time.monotonic() - since)
        self._held_up += seconds
        return seconds

    @property
    def held_up_seconds(self) -> float:
        """Seconds for which puts have waited for the disk by now, also in writes; for any thread."""
        since = self._held_up_since
        return self._held_up + (0.0 if since is None else max(0.0, time.monotonic() - since))

    def put(self, nbytes: int, began: float) -> None:
        """Count a put that is over.

        Once the disk was waited for, a segment counts when it has reached it: in its middle the rate would be that of
        the page cache in part.

        Args:
            nbytes: of its contents.
            began: time of its beginning (``time.monotonic``).
        """
        seconds = time.monotonic() - began
        if self._behind:
            self._since = self._since if self._bytes else began
            self._bytes, self._seconds = self._bytes + nbytes, self._seconds + seconds
        if not self._waited:
            self._written.add(nbytes, seconds)

    def on_its_way(self, rate: float) -> float:
        """Return the bytes that the disk has not yet at ``rate``: of those that were put since it was waited for."""
        since = self._closed_since if self._closed_bytes else self._since
        return max(0.0, self._bytes + self._closed_bytes - rate * (time.monotonic() - since))

    @contextmanager
    def hurried(self, on_its_way: int = LINE_BYTES) -> Iterator[None]:
        """Let no put wait for the disk in the block, of any thread, unless more bytes are on their way there."""
        self._most_on_its_way = on_its_way
        self._hurried.set()
        try:
            yield
        finally:
            self._hurried.clear()
            self._most_on_its_way = LINE_BYTES

    def wait(self, descriptor: int, nbytes: int) -> None:
        """Let a full segment reach the disk: else the page cache takes all for a while, and then nothing.

        The disk is at work from the first put on. Where it is waited for half of the time since then, here or in
        writes, it was so in all of it, and its rate is at least that of this segment, and that of this one and those
        that were closed before.

        Args:
            descriptor: of the segment's file.
            nbytes: that it has.

        Raises:
            OSError: the file's.
        """
        began = time.monotonic()
        in_writes = self._held_up - self._held_up_before
        self.waits_now, self._held_up_since = True, began
        try:
            for start in range(0, nbytes, WAITED_BYTES):
                if self._hurried.is_set() and self._closed_bytes <= self._most_on_its_way:
                    self.waited_seconds += time.monotonic() - began
                    return
                wait_written(descriptor, start, min(WAITED_BYTES, nbytes - start))
            os.fsync(descriptor)
        finally:
            self.waits_now = False
            self._go_on()
            self._held_up_before = self._held_up
        ended = time.monotonic()
        waited = ended - began
        whole, rate = self._seconds + waited, None
        self.at_least.add(self._bytes, ended - self._since)
        if waited + in_writes > 0 and waited + in_writes >= _AT_WORK * (ended - self._since):
            rates = [self._bytes / (ended - self._since)]
            if self._closed_bytes:
                rates.append((self._bytes + self._closed_bytes) / (ended - self._closed_since))
            rate = max(rates)
            whole = self._bytes / rate
            self.at_work.add(self._bytes, whole)
        on_disk = self._bytes + self._closed_bytes
        self._log.add(on_disk, None if not rate else on_disk / rate)
        if not self._waited:
            self._written = RateMeter()
        self._written.add(self._bytes, whole)
        self.waits.add(self._bytes, waited)
        self.waited_seconds += waited
        self._waited, self._bytes, self._seconds, self._closed_bytes = True, 0, 0.0, 0

    def close(self) -> None:
        """Note that the open segment is closed; nobody waits for one that is not full."""
        if self._bytes:
            self._closed_since = self._closed_since if self._closed_bytes else self._since
        self._closed_bytes, self._bytes, self._seconds = self._closed_bytes + self._bytes, 0, 0.0
        self._held_up_before = self._held_up
