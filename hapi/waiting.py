"""Waits that end when the work is given up.

A thread works in somebody's :class:`Interest`. It often waits for other threads: for a lock, a chunk that
another request loads, a read ahead. If a store does not answer one of them, all would wait for ever. So these
waits end with an error once the interest is given up. A call into the store itself cannot be ended; the
thread in it is lost (:mod:`hapi.process.threads`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

from hapi.errors import StoreUnavailableError

T = TypeVar("T")

LOOK_SECONDS = 0.25
"""Seconds between two checks of a waiting thread whether its work was given up."""

_current = threading.local()


class Interest(threading.Event):
    """An interest in a piece of work that several threads may carry out.

    When it is *set*, the result is not wanted any more: the work stops at its next step. When it is *given
    up*, the work is not waited for at all any more, not even until that step.
    """

    def __init__(self, subject: str = "", deadline: float = math.inf) -> None:
        """Begin an interest.

        Args:
            subject: Names what is worked on, in messages.
            deadline: When the work should be over (``time.monotonic`` seconds).
        """
        super().__init__()
        self.subject = subject
        self.deadline = deadline
        self.given_up_at = math.inf
        """Time at which it was given up (``time.monotonic`` seconds); None before."""
        self.moved_at = time.monotonic()
        """Time at which a step of the work last began or ended."""
        self._lock = threading.Lock()
        self._resting = 0
        self._at_giving_up: list[Callable[[], object]] = []

    @property
    def given_up(self) -> bool:
        """True when all waits in it are to end."""
        return self.given_up_at < math.inf

    def moved(self) -> None:
        """Record that a step of the work began or ended."""
        self.moved_at = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Mark a block in which a long wait is normal: for the reader, for memory, for a processor."""
        with self._lock:
            self._resting += 1
        try:
            yield
        finally:
            with self._lock:
                self._resting -= 1
            self.moved()

    def standing_still(self, now: float) -> float:
        """Seconds since the last step at ``now`` (``time.monotonic``); 0 while the work rests."""
        return 0.0 if self._resting else max(0.0, now - self.moved_at)

    @contextmanager
    def when_given_up(self, action: Callable[[], object]) -> Iterator[None]:
        """Call ``action`` if the work is given up during the block, or was before; it must neither wait nor raise."""
        with self._lock:
            late = self.given_up
            if not late:
                self._at_giving_up.append(action)
        if late:
            action()
        try:
            yield
        finally:
            with self._lock, suppress(ValueError):
                self._at_giving_up.remove(action)

    def give_up(self) -> None:
        """End all waits in this interest with an error."""
        self.set()
        with self._lock:
            self.given_up_at = min(self.given_up_at, time.monotonic())
            actions, self._at_giving_up = self._at_giving_up, []
        for action in actions:
            action()

    def error(self) -> StoreUnavailableError:
        """Return the error for those that wait for the work after it was given up."""
        still = time.monotonic() - self.moved_at
        return StoreUnavailableError(
            f"{self.subject or 'the request'}: the store has not answered for {still:.0f} s, and the request was "
            "given up; check the store, try later, or use another server"
        )


@contextmanager
def working_in(interest: Interest | None) -> Iterator[None]:
    """Run the block's work in ``interest``."""
    before = current()
    _current.interest = interest
    try:
        yield
    finally:
        _current.interest = before


def current() -> Interest | None:
    """Return the interest in which this thread works."""
    found: Interest | None = getattr(_current, "interest", None)
    return found


@contextmanager
def paused() -> Iterator[None]:
    """Do :meth:`Interest.paused` for this thread's work."""
    interest = current()
    if interest is None:
        yield
        return
    with interest.paused():
        yield


@contextmanager
def when_given_up(action: Callable[[], object]) -> Iterator[None]:
    """Do :meth:`Interest.when_given_up` for this thread's work."""
    interest = current()
    if interest is None:
        yield
        return
    with interest.when_given_up(action):
        yield


def moved() -> None:
    """Record that a step of this thread's work ended."""
    interest = current()
    if interest is not None:
        interest.moved()


def check() -> None:
    """Raise :class:`StoreUnavailableError` if this thread's work was given up."""
    interest = current()
    if interest is not None and interest.given_up:
        raise interest.error()


def wait(condition: threading.Condition) -> None:
    """Wait for ``condition``; the caller holds it and checks its state again afterwards.

    Raises:
        StoreUnavailableError: this thread's work was given up.
    """
    condition.wait(None if current() is None else LOOK_SECONDS)
    check()


@contextmanager
def holding(lock: threading.Lock) -> Iterator[None]:
    """Hold ``lock`` inside the block.

    Raises:
        StoreUnavailableError: This thread's work was given up before the lock was free.
    """
    interest = current()
    if interest is None:
        lock.acquire()
    else:
        while not lock.acquire(timeout=LOOK_SECONDS):
            if interest.given_up:
                raise interest.error()
    try:
        yield
    finally:
        lock.release()


def result(future: Future[T]) -> T:
    """Wait for ``future`` and return its result.

    Raises:
        StoreUnavailableError: this thread's work was given up first.
    """
    interest = current()
    while interest is not None:
        try:
            return future.result(LOOK_SECONDS)
        except TimeoutError:
            if future.done():
                break
            if interest.given_up:
                raise interest.error() from None
    return future.result()
