"""Ctrl-C and SIGTERM that never tear a training step apart."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """While installed, SIGINT and SIGTERM raise KeyboardInterrupt, but inside :meth:`deferred` only at its end.

    A second signal inside a deferred block raises at once. Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self._deferring = False
        self._pending = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """The block runs to its end before a signal takes effect."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deferring and not self._pending:
            self._pending = True
            return
        raise KeyboardInterrupt
