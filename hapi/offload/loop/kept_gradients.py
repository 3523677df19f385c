"""Gradients in a store until the step: written at once, and read ahead of their use by a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from hapi.arrays import Bytes
from hapi.offload.states.base import StateStore


class GradientSpan(NamedTuple):
    """Bytes of the gradients' room."""

    at: int
    nbytes: int


class KeptGradients:
    """Keeps gradients in a store. What :meth:`expect` names is read ahead, as far as there is room in memory."""

    def __init__(self, store: StateStore, room: int) -> None:
        """Begin without gradients.

        Args:
            store: has room for all of them.
            room: bytes that are read ahead, unless one span has more.
        """
        self._store, self._room = store, room
        self._condition = threading.Condition()
        self._expected: dict[int, int] = {}
        """Bytes of the spans to be read, by their places, in order."""
        self._ready: dict[int, Bytes] = {}
        self._reading: int | None = None
        self._is_outdated = False
        """Whether the span that is being read is not wanted any more."""
        self.held = 0
        """Bytes in memory that were read ahead and not used yet."""
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def expect(self, spans: Iterable[GradientSpan]) -> None:
        """Read these ahead, in this order, in the place of what was expected before."""
        with self._condition:
            wanted = {span.at: span.nbytes for span in spans}
            for at in [at for at in self._ready if at not in wanted]:
                self._drop(at)
            self._is_outdated |= self._reading not in wanted
            self._expected = {
                at: nbytes for at, nbytes in wanted.items() if at not in self._ready and at != self._reading
            }
            if self._expected and self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="hapi-gradients")
                self._thread.start()
            self._condition.notify_all()

    def read(self, span: GradientSpan) -> Bytes:
        """Return a span's bytes, which are the caller's: those read ahead, or read now. Raises OSError."""
        with self._condition:
            self._condition.wait_for(lambda: self._reading != span.at or self._error is not None)
            if self._error is not None:
                raise self._error
            self._expected.pop(span.at, None)
            found = self._ready.pop(span.at, None)
            if found is not None:
                self.held -= len(found)
                self._condition.notify_all()
                return found
        found = np.empty(span.nbytes, np.uint8)
        self._store.read_gradient(span.at, found)
        return found

    def write(self, at: int, values: Bytes) -> None:
        """Keep bytes in the place of those before. Raises OSError."""
        self.forget(at, len(values))
        self._store.write_gradient(at, values)

    def forget(self, at: int, nbytes: int) -> None:
        """Drop what was read ahead of these bytes, and expect none of them."""
        with self._condition:
            for start in [start for start in self._ready if at <= start < at + nbytes]:
                self._drop(start)
            for start in [start for start in self._expected if at <= start < at + nbytes]:
                del self._expected[start]
            if self._reading is not None and at <= self._reading < at + nbytes:
                self._is_outdated = True
            self._condition.notify_all()

    def note_lacking(self) -> None:
        """Let the next process keep the gradients, one of which this one lacks."""
        with suppress(OSError):
            self._store.note_lacking_gradient()

    def close(self) -> None:
        """End the thread."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _drop(self, at: int) -> None:
        self.held -= len(self._ready.pop(at))

    def _next(self) -> int | None:
        """Place to read now; None without one, or without room."""
        found = next(iter(self._expected), None)
        if found is None or (self.held and self.held + self._expected[found] > self._room):
            return None
        return found

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_closing or self._next() is not None)
                at = self._next()
                if self._is_closing or at is None:
                    return
                buffer = np.empty(self._expected.pop(at), np.uint8)
                self._reading, self._is_outdated = at, False
                self.held += len(buffer)
            error: BaseException | None = None
            try:
                self._store.read_gradient(at, buffer)
            except OSError as raised:  # raised in the training's thread
                error = raised
            with self._condition:
                if error is not None or self._is_outdated:
                    self.held -= len(buffer)
                else:
                    self._ready[at] = buffer
                self._reading, self._error = None, error
                self._condition.notify_all()
                if error is not None:
                    return
