"""Who may work now: a bounded number of requests runs, a bounded number waits, the rest is told when to return."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hapi.errors import BusyError


class Admission:
    """First come, first served. Lives on the event loop's thread.

    ``max_running`` requests hold a slot, ``max_queued`` wait for one; beyond that :class:`BusyError` carries
    a Retry-After made from the queue's length and the recent seconds per request.
    """

    def __init__(self, max_running: int, max_queued: int) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._mean_seconds = 1.0
        self.running = 0

    @property
    def queued(self) -> int:
        """Requests that wait now."""
        return len(self._waiting)

    def expected_wait(self) -> float:
        """Seconds until a request that arrives now would get a slot, from recent requests."""
        ahead = self.running + self.queued - self._max_running + 1
        return max(0.0, ahead / self._max_running * self._mean_seconds)

    def _retry_after(self) -> float:
        return float(min(60, max(1, math.ceil(self.expected_wait()))))

    @asynccontextmanager
    async def slot(self, patience: float) -> AsyncIterator[float]:
        """Hold a slot inside the block; yields the seconds waited for it.

        :class:`BusyError` when the queue is full, or no slot came free within ``patience`` seconds.
        """
        asked = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                await self._acquire()
        except TimeoutError:
            raise BusyError(
                f"no slot came free within {patience:g} s", retry_after=self._retry_after()
            ) from None
        started = time.monotonic()
        try:
            yield started - asked
        finally:
            self._mean_seconds += 0.2 * (time.monotonic() - started - self._mean_seconds)
            self._release()

    async def _acquire(self) -> None:
        if self.running < self._max_running:
            self.running += 1
            return
        if self.queued >= self._max_queued:
            wait = self._retry_after()
            raise BusyError(
                f"{self.running} requests run and {self.queued} wait; come back in {wait:.0f} s",
                retry_after=wait,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn  # whoever releases hands its slot over, so that running stays as it is
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # the slot was handed over in the same moment
            else:
                self._waiting.remove(turn)
            raise

    def _release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
