"""Work on a list of items, one ahead of whoever takes the results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Self, TypeVar

from hapi.errors import BadRequestError
from hapi.process.threads import Threads, Work
from hapi.waiting import result

I = TypeVar("I")  # noqa: E741 - an item
R = TypeVar("R")


class Prefetcher(Generic[I, R]):
    """``work`` of each item in order: while one result is used, the next is being made. Use it in a ``with`` block."""

    def __init__(
        self,
        pool: Threads,
        work: Callable[[I], R],
        items: Iterable[I],
        cancelled: threading.Event,
    ) -> None:
        """Prefetch the results of ``items``, at least one; the next item is taken when its work begins.

        Once ``cancelled`` is set there are no more results; once the calling thread's work is given up, waits
        end.
        """
        self._pool = pool
        self._work = work
        self._items = iter(items)
        self._cancelled = cancelled
        self._pending: Work[R] | None = pool.submit(work, next(self._items))

    def ready(self) -> bool:
        """Return whether the next result is there already."""
        return self._pending is None or self._pending.done()

    def next(self) -> R:
        """The next result; StopIteration after the last, :class:`BadRequestError` once it was cancelled."""
        if self._pending is None:
            raise StopIteration
        found = result(self._pending)
        self._pending = None
        if self._cancelled.is_set():
            raise BadRequestError("the client went away")
        for item in self._items:
            self._pending = self._pool.submit(self._work, item)
            break
        return found

    def __iter__(self) -> Iterator[R]:
        while self._pending is not None:
            yield self.next()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pending is not None:
            self._pending.cancel()
