"""Thread pools that survive threads which never come back.

A call into a store that does not answer holds its thread, and nothing in the process can end it. When such
work is given up (:class:`hapi.waiting.Interest`), the pool counts the thread as *lost*, informs those that
wait for the work, and starts another thread, as long as few are lost. If the call returns after all, the lost
thread finishes its work, releases all that it holds, and ends.

The threads are daemons: a process that ends does not wait for them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from hapi import waiting
from hapi.errors import DrainingError, ShortageError
from hapi.waiting import LOOK_SECONDS, Interest

log = logging.getLogger("hapi.process.threads")

_making = threading.Lock()

GRACE_SECONDS = 3 * LOOK_SECONDS
"""Seconds that a thread has to notice that its work was given up."""

T = TypeVar("T")
P = ParamSpec("P")


class Lost:
    """The lost threads of some pools; thread-safe."""

    def __init__(self, limit: int) -> None:
        """Allow at most ``limit`` lost threads at a time; beyond them no work is given up."""
        self.limit = limit
        self.ever = 0
        """Threads that were lost so far, including those that came back."""
        self._lock = threading.Lock()
        self._of: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Number of threads that are lost now."""
        with self._lock:
            return self._of.total()

    def of(self, subject: str) -> int:
        """Return the number of lost threads that work on ``subject``."""
        with self._lock:
            return self._of[subject]

    def take(self, subject: str) -> bool:
        """Count one more lost thread, if the limit allows it; return whether it does."""
        with self._lock:
            if self._of.total() >= self.limit:
                return False
            self._of[subject] += 1
            self.ever += 1
            return True

    def back(self, subject: str) -> None:
        """Count one lost thread as back."""
        with self._lock:
            self._of[subject] -= 1
            self._of += Counter()  # keys come from clients: those of nothing are forgotten


class Work(Future[T], Generic[T]):
    """A call that a pool's thread makes, and its result."""

    def __init__(self, call: Callable[[], T], interest: Interest | None) -> None:
        super().__init__()
        self.interest = interest
        self.call: Callable[[], T] | None = call
        self.lost = False
        """True once the thread that makes the call was given up."""
        self._over: Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the work is done or its thread is lost, also where there was no memory to tell the waiters."""
        return self.lost or self.done()

    @property
    def over(self) -> Future[None]:
        """Done when the work is done or its thread is lost."""
        with _making:
            over = self._over or Future[None]()
            made, self._over = self._over is None, over
        if made:
            self.add_done_callback(_end)
            if self.lost:
                self.end()
        return over

    def end(self) -> None:
        """End the wait of everything that waits for :attr:`over`."""
        if self._over is not None:
            with contextlib.suppress(InvalidStateError):  # lost before
                self._over.set_result(None)

    def outcome(self) -> T:
        """Return the result of work that is :attr:`over`, or raise its error.

        Raises:
            StoreUnavailableError: its thread is lost.
            DrainingError: the pool was closed before it began.
        """
        if self.cancelled():
            raise DrainingError("the server is shutting down; ask another one")
        if self.interest is not None and self.lost and not self.done():
            raise self.interest.error()
        return self.result()


def _end(work: Future[Any]) -> None:
    if isinstance(work, Work):  # no bound method: the work, which knows it, would be freed much later
        work.end()


class Threads:
    """A pool of at most ``size`` threads, not counting lost ones. They start when they are needed."""

    def __init__(self, size: int, name: str, lost: Lost | None = None) -> None:
        """Make a pool.

        Args:
            size: most threads at a time.
            name: prefix of the threads' names.
            lost: counter of lost threads; None: no thread is ever given up.
        """
        self._size = size
        self._name = name
        self._lost = lost or Lost(0)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Work[Any] | None] = SimpleQueue()
        """Calls to make; None ends a thread."""
        self._queued = 0
        self._running: set[Work[Any]] = set()
        self._threads = 0
        self._idle = 0
        self._closed = False
        self.moved_at = time.monotonic()
        """Time of the last end of a call (``time.monotonic`` seconds), lost ones not counted."""

    def start(self) -> Threads:
        """Start all threads now, for a process that must have them when memory runs out; return self."""
        with self._lock:
            while self._threads < self._size:
                self._start_one()
        return self

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        """Submit ``call(*args)`` in the calling thread's interest."""
        return self.submit_in(waiting.current(), call, *args, **kwargs)

    def submit_in(
        self, interest: Interest | None, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Work[T]:
        """Submit ``call(*args)`` in ``interest``."""
        work: Work[T] = Work(partial(call, *args, **kwargs), interest)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} were closed")
            if self._idle <= self._queued and self._threads < self._size:
                try:
                    self._start_one()
                except (
                    RuntimeError
                ):  # the system has no more: those that there are do the work, if there are any
                    if not self._threads:
                        raise ShortageError(
                            "the server is short of threads for now; come back in 1 s", retry_after=1.0
                        ) from None
            self._queued += 1
            self._queue.put(work)
        return work

    def running(self) -> Sequence[Work[Any]]:
        """Return the calls under way, without those of lost threads."""
        with self._lock:
            return [work for work in self._running if not work.lost]

    def lose_given_up(self, grace: float = GRACE_SECONDS) -> int:
        """Count the threads as lost whose work was given up ``grace`` seconds ago; return their number."""
        lost, given_up_before = [], time.monotonic() - grace
        with self._lock:
            for work in self._running:
                interest = work.interest
                if interest is None or interest.given_up_at > given_up_before or work.lost:
                    continue
                if not self._lost.take(interest.subject):
                    break
                work.lost = True
                lost.append(work)
                self._threads -= 1
                if not self._closed:
                    with contextlib.suppress(RuntimeError):  # the next work tries it again
                        self._start_one()
        for work in lost:
            work.end()
        return len(lost)

    def close(self) -> None:
        """End idle threads now and busy ones after their call; cancel calls that have not begun."""
        left = []
        with self._lock:
            self._closed = True
            with contextlib.suppress(Empty):
                while True:
                    left.append(self._queue.get_nowait())
            self._queued = 0
            for _ in range(self._threads):
                self._queue.put(None)
        for work in left:
            if work is not None:
                work.cancel()

    def _start_one(self) -> None:
        name = f"{self._name}_{next(self._numbers)}"
        threading.Thread(target=self._work, name=name, daemon=True).start()
        self._threads += 1
        self._idle += 1

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            with self._lock:
                self._idle -= 1
                self._queued -= 1
            try:
                with self._lock:
                    self._running.add(work)
                _carry_out(work)
            except MemoryError as error:  # not of the call itself: the thread must outlive it
                _fail(work, error)
            with self._lock:
                self._running.discard(work)
                self._idle += not work.lost
            if work.lost:
                self._came_back(work)
                return
            self.moved_at = time.monotonic()
            del work  # what it holds must not stay until the next one comes

    def _came_back(self, work: Work[Any]) -> None:
        subject = work.interest.subject if work.interest is not None else ""
        self._lost.back(subject)
        log.info("a lost thread came back", extra={"subject": subject, "lost": self._lost.count})


def _fail(work: Work[Any], error: BaseException) -> None:
    """End work whose call could not be made, or whose waiters could not be told."""
    with contextlib.suppress(InvalidStateError, MemoryError):
        work.set_exception(error)


def _carry_out(work: Work[T]) -> None:
    if not work.set_running_or_notify_cancel():
        return
    call, work.call = work.call, None
    interest = work.interest
    if interest is not None:
        interest.moved()
    try:
        if call is None:
            raise RuntimeError("work is carried out once")
        with waiting.working_in(interest):
            result = call()
    except BaseException as error:
        work.set_exception(error)
        del work, call  # the error's traceback knows this frame, which must not know the error
    else:
        work.set_result(result)
    if interest is not None:
        interest.moved()
