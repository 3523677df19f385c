"""The share of its time in which a training loop waits for batches, told to the servers with its requests.

A server that has a long queue may still be fast enough: trainers that find their next batch there when they want it
would not go faster with more servers.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from hapi.wire.messages import STALL_HEADER

FORGETTING_SECONDS, FORGETTING_BATCHES = 5.0, 4.0
"""Age at which a second of training counts 1/e of a new one: so many seconds, or so many batches where these last
longer, as the share within a batch says nothing."""
_MARKS = 256
"""Times that are noted until they are counted: a batch takes less time so."""
ENOUGH_SECONDS = 1.0
"""Seconds of training from which on the share is told."""


class StallShare:
    """Exponential mean over the seconds of a training loop. Thread-safe.

        begin -> goes_on -> waits -> goes_on -> ... -> end

    The wait for the first batch of a pass is left out: nothing could have come before it was asked for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._marks: deque[tuple[float, bool | None]] = deque()
        """Times that were not counted yet, with what began then: a wait, training, or (None) nothing."""
        self._stalled = self._seconds = 0.0
        self._since: float | None = None
        """Time up to which seconds are counted; None outside of a pass, and before its first batch."""
        self._waiting = False
        self._began: float | None = None
        """Time at which the batch that the loop has came."""
        self._age = FORGETTING_SECONDS

    def goes_on(self) -> None:
        """Note that the loop has its batch."""
        self._marks.append((self._clock(), False))
        if len(self._marks) > _MARKS:
            self.share()

    def waits(self) -> None:
        """Note that the loop waits for its next batch from now on."""
        self._marks.append((self._clock(), True))

    def end(self) -> None:
        """Note the end of a pass: what follows is no wait for a server."""
        self._marks.append((self._clock(), None))

    def share(self) -> float | None:
        """Return the share, 0 to 1, a wait that still lasts included; None: too little is known."""
        with self._lock:
            while self._marks:
                self._count(*self._marks.popleft())
            stalled, seconds = self._until(self._clock())
        return None if seconds < ENOUGH_SECONDS else min(1.0, stalled / seconds)

    def headers(self) -> Mapping[str, str]:
        """Return the header that tells the share; none as long as it is not known."""
        share = self.share()
        return {} if share is None else {STALL_HEADER: f"{share:.3f}"}

    def _count(self, now: float, waiting: bool | None) -> None:
        """Count up to a mark."""
        self._stalled, self._seconds = self._until(now)
        if waiting is None:
            self._since = self._began = None
            return
        if not waiting:
            if self._began is not None:
                lasted = FORGETTING_BATCHES * (now - self._began)
                self._age = max(FORGETTING_SECONDS, 0.5 * self._age + 0.5 * lasted)
            self._began = now
        self._since, self._waiting = now, waiting

    def _until(self, now: float) -> tuple[float, float]:
        """Seconds of waiting and in all, as they count at ``now``."""
        if self._since is None:
            return self._stalled, self._seconds
        kept = math.exp(-max(0.0, now - self._since) / self._age)
        new = self._age * (1 - kept)
        return self._stalled * kept + (new if self._waiting else 0.0), self._seconds * kept + new
