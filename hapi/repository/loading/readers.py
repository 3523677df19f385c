"""Readers of one load: threads that share its ranges, and the caller, who reads with them while it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Protocol

from hapi import waiting
from hapi.errors import HapiError
from hapi.process.threads import Threads, Work
from hapi.repository.loading.checks import ContentCheck
from hapi.repository.loading.landing import Landing, Room
from hapi.repository.loading.plan import ContentSlice, ReadPlan, ReadRange
from hapi.store.base import ReadPart, Then

STEP_BYTES = 1 << 20
"""Bytes that are read and then checked: they are still in the processor's cache."""
AHEAD_BYTES = 256 << 20
"""Bytes that are read behind the tensor that the caller waits for or has."""


class RangeSource(Protocol):
    """Anything that ranges of objects can be read from; every object store is one."""

    url: str

    def read_many(self, parts: Sequence[ReadPart], then: Then = ...) -> None:
        """See :meth:`hapi.store.base.ObjectStore.read_many`."""


class _StoppedError(Exception):
    """Ends a reader whose load is over."""


class Readers:
    """One load under way.

    Ranges are taken in their order, each by whichever reader is free. A content is ready once its last slice has
    landed and its bytes were checked. The first error ends all readers.
    """

    def __init__(
        self,
        source: RangeSource,
        plan: ReadPlan,
        landing: Landing,
        checks: Sequence[ContentCheck],
        damaged: Callable[[int], HapiError],
    ) -> None:
        """Begin; nothing is read yet.

        Args:
            source: where the ranges are read.
            plan: the ranges.
            landing: where they go.
            checks: of the contents.
            damaged: makes the error for a content whose bytes are not those that were stored.
        """
        self._source = source
        self._plan = plan
        self._landing = landing
        self._checks = checks
        self._damaged = damaged
        self._changed = threading.Condition()
        self._next = 0
        """Range that is taken next."""
        self._missing = [0] * len(plan.contents)
        """Slices of each content that have not landed, and its check."""
        for found in plan.ranges:
            for part in found.slices:
                self._missing[part.content] += 1
        self._missing = [count + 1 if count else 0 for count in self._missing]
        self._begins = list(accumulate((c.nbytes for c in plan.contents), initial=0))
        """Bytes of the contents before each one, in the order of need."""
        self._range_begins = [self._begins[found.first] for found in plan.ranges]
        self._wanted = 0
        """Bytes of contents up to the one that the caller waits for or has, this one included."""
        self._failure: BaseException | None = None
        self._over = False

    def ready(self, readers: int) -> Generator[int, None, None]:
        """Yield the number of each content, in their order, once it is ready.

        When the iterator is closed, or an error leaves it, all readers end first.

        Args:
            readers: calls to the source side by side, the caller's own included.
        """
        threads = Threads(readers - 1, "hapi-loading") if readers > 1 else None
        running: list[Work[None]] = []
        try:
            if threads is not None:
                running += [threads.submit(self._read_on) for _ in range(readers - 1)]
            for number in range(len(self._plan.contents)):
                with self._changed:
                    self._wanted = self._begins[number + 1]
                    self._changed.notify_all()
                self._await(number)
                yield number
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            for work in running:
                with suppress(HapiError):  # given up: what a hung call still writes to is its own
                    waiting.result(work)
            if threads is not None:
                threads.close()

    def _await(self, number: int) -> None:
        """Read until content ``number`` is ready; raises the error of any reader."""
        while True:
            with self._changed:
                while self._missing[number] and self._failure is None and not self._may_take():
                    waiting.wait(self._changed)
                if self._failure is not None:
                    raise self._failure
                if not self._missing[number]:
                    return
            with self._landing.room() as room:
                self._read_next(room)

    def _read_on(self) -> None:
        """Read until nothing is left."""
        while True:
            with self._changed:
                while not self._is_over() and not self._may_take():
                    waiting.wait(self._changed)
                if self._is_over():
                    return
            try:
                with (
                    self._landing.room() as room
                ):  # before a range is taken: no reader waits for one without room
                    self._read_next(room)
            except BaseException as error:
                self._fail(error)
                return

    def _is_over(self) -> bool:
        return self._over or self._failure is not None or self._next >= len(self._plan.ranges)

    def _may_take(self) -> bool:
        """Whether the next range is not too far ahead of the caller."""
        if self._next >= len(self._plan.ranges):
            return False
        return self._range_begins[self._next] - self._wanted <= AHEAD_BYTES

    def _read_next(self, room: Room) -> None:
        """Read one range, unless others have taken it meanwhile."""
        with self._changed:
            if self._is_over() or not self._may_take():
                return
            taken = self._plan.ranges[self._next]
            self._next += 1
        try:
            self._read(taken, room)
        except _StoppedError:
            return
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _read(self, taken: ReadRange, room: Room) -> None:
        steps: list[tuple[ContentSlice, memoryview]] = []
        parts: list[ReadPart] = []
        for part, out in zip(taken.slices, room.outs(taken.slices), strict=True):
            begin = self._plan.contents[part.content].start + part.start
            for start in range(0, part.nbytes, STEP_BYTES):
                view = out[start : start + STEP_BYTES]
                steps.append((ContentSlice(part.content, part.start + start, len(view)), view))
                parts.append(ReadPart(taken.pack, begin + start, view))
        self._source.read_many(parts, lambda number: self._arrived(*steps[number]))
        if self._landing.is_staged:
            self._await_checks(taken.slices)
        room.land(taken.slices)
        with self._changed:
            for part in taken.slices:
                self._landed(part.content)

    def _arrived(self, part: ContentSlice, view: memoryview) -> None:
        if self._over or self._failure is not None:
            raise _StoppedError
        check = self._checks[part.content]
        if check.add(part.start, view):
            if not check.is_sound:
                raise self._damaged(part.content)
            with self._changed:
                self._landed(part.content)
        if self._landing.is_staged:
            with self._changed:
                self._changed.notify_all()  # those that wait until their bytes were hashed

    def _landed(self, content: int) -> None:
        """Count a slice that landed, or the check; the lock is held."""
        self._missing[content] -= 1
        if not self._missing[content]:
            self._changed.notify_all()

    def _await_checks(self, slices: Sequence[ContentSlice]) -> None:
        """Wait until ``slices`` were hashed: earlier ranges, whose readers have room, bring what is before them."""
        for part in slices:
            check, stop = self._checks[part.content], part.start + part.nbytes
            with self._changed:
                while not check.is_hashed(part.start, stop):
                    if self._over or self._failure is not None:
                        raise _StoppedError
                    waiting.wait(self._changed)
