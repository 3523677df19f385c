"""Watch over a server's work: what hangs is given up, and it is said when all of it does.

A request whose client is gone, or whose time is over, gets some patience for its thread to come back. Then it
is given up (:mod:`hapi.waiting`): its slot is free, and a thread that is in a call into the store is lost
(:mod:`hapi.process.threads`). So many may be lost, few of them to one dataset or model, so that one that
hangs leaves slots to the others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from hapi.errors import StoreUnavailableError
from hapi.process.threads import Lost, Threads, Work
from hapi.server.scheduling.costs import Request
from hapi.waiting import Interest
from hapi.wire.messages import ExtractRequest, SamplesRequest

log = logging.getLogger("hapi.server")

LOST_TO_ONE = 2
"""Threads that may be lost to one dataset and model; further requests for it are refused until one has come back."""
LOOKS = 4
"""Looks within the patience."""
LONGEST_LOOK = 1.0
"""Most seconds between two looks."""
RETRY_SECONDS = 5.0
"""Seconds after which a refused client may come back."""


class ProgressWatch:
    """The watch over a server's threads; thread-safe. A thread of its own looks at them."""

    def __init__(self, still_seconds: float, most_lost: int) -> None:
        """Begin to watch.

        Args:
            still_seconds: Seconds without a step of the work after which it counts as stuck.
            most_lost: Threads that may be lost at a time.
        """
        self.still_seconds = still_seconds
        self.lost = Lost(most_lost)
        self._slots: list[Threads] = []
        self._others: list[Threads] = []
        self._closed = threading.Event()
        self._interval = min(LONGEST_LOOK, still_seconds / LOOKS)
        threading.Thread(target=self._watch, name="hapi-watch", daemon=True).start()

    def threads(self, size: int, name: str, *, of_slots: bool = False) -> Threads:
        """A pool that is watched, its threads begun; ``of_slots``: it does the work of requests that hold a slot."""
        pool = Threads(size, name, self.lost).start()
        (self._slots if of_slots else self._others).append(pool)
        return pool

    def also(self, pools: Iterable[Threads]) -> None:
        """Watch these too; their work has the interests of other pools' work."""
        self._others += pools

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def check(self, subject: str) -> None:
        """:class:`StoreUnavailableError` when ``subject`` has hung too often to be tried again now."""
        count = self.lost.of(subject)
        if count >= LOST_TO_ONE:
            raise StoreUnavailableError(
                f"{subject}: {count} reads wait for a store that does not answer, and no more are begun until one of "
                "them is over; look at the store, try later, or ask another server",
                retry_after=RETRY_SECONDS,
            )

    def stuck(self) -> str:
        """Return the reason why the server makes no progress; empty while it does."""
        lost, now = self.lost.count, time.monotonic()
        if 0 < self.lost.limit <= lost:
            return f"{lost} threads wait for a store that does not answer, and no more may be given up"
        still = [seconds for i in self._interests(self._slots) if (seconds := i.standing_still(now)) > 0]
        moved = max((pool.moved_at for pool in self._slots), default=now)
        if still and max(still) >= self.still_seconds and now - moved >= self.still_seconds:
            hung = sum(seconds >= self.still_seconds for seconds in still)
            return f"nothing has moved for {min(max(still), now - moved):.0f} s; {hung} requests stand still"
        return ""

    def check_all(self) -> None:
        """Give up what is to be given up; a thread that does not hear of it until the next look is lost."""
        for pool in (*self._slots, *self._others):
            if pool.lose_given_up():
                log.warning("threads lost", extra={"lost": self.lost.count, "most": self.lost.limit})
        now = time.monotonic()
        for interest in self._interests((*self._slots, *self._others)):
            if self.lost.count >= self.lost.limit:
                return  # what is given up now would keep threads all the same
            if not interest.given_up and self._is_over(interest, now):
                extra = {"subject": interest.subject, "seconds": round(interest.standing_still(now), 1)}
                log.warning("given up: the store does not answer", extra=extra)
                interest.give_up()

    def _is_over(self, interest: Interest, now: float) -> bool:
        """Return whether nobody has patience with the work any more."""
        unwanted = interest.is_set() or now >= interest.deadline
        return unwanted and interest.standing_still(now) >= self.still_seconds

    def _interests(self, pools: Sequence[Threads]) -> set[Interest]:
        works: list[Work[Any]] = [work for pool in pools for work in pool.running()]
        return {work.interest for work in works if work.interest is not None}

    def _watch(self) -> None:
        while not self._closed.wait(self._interval):
            try:
                self.check_all()
            except Exception:  # the next look must come, whatever was wrong with this one
                with suppress(MemoryError):
                    log.exception("unexpected error while looking after threads")


def subject_of(request: Request) -> str:
    """Names what ``request`` reads of the store: a hang of one dataset is not another one's."""
    if isinstance(request, ExtractRequest):
        return f"dataset {request.dataset.name!r} and model {request.model.name!r}"
    if isinstance(request, SamplesRequest):
        return f"dataset {request.dataset.name!r}"
    return f"model {request.name!r}"
