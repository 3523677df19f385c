"""Ctrl-C, SIGTERM and a closed terminal that never tear a training step apart."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hapi.client.joint.ranks import ALONE, Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While installed, the signals raise KeyboardInterrupt, but inside :meth:`deferred` only at its end.

    A second signal inside a deferred block raises at once. Outside the main thread it does nothing. A signal that
    this process was started to ignore (nohup) stays ignored.

    With several ranks a signal only asks all of them to stop before the same step; one that comes seconds later raises.
    """

    GROUPED_SECONDS = 5.0
    """Seconds in which signals count as one: a terminal and torchrun both send them."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks, self._asked_at = ranks, 0.0
        self._deferring = False
        self._pending = False
        self._raised = False
        """True once a signal has raised; the code that it met may have swallowed that, as finalizers of objects do."""
        self._previous: dict[int, Any] = {}
        self._hook = sys.unraisablehook

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._swallowed
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if sys.unraisablehook == self._swallowed:
            sys.unraisablehook = self._hook

    def _swallowed(self, found: Any) -> None:
        """Tell of what a finalizer swallowed, unless it is a signal: :meth:`deferred` raises that again."""
        if found.exc_type is not KeyboardInterrupt:
            self._hook(found)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold signals back until the end of the block, which does not begin after one that was swallowed."""
        if self._raised:
            raise KeyboardInterrupt
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ranks.size > 1:
            now = time.monotonic()
            self._asked_at = self._asked_at or now
            if now - self._asked_at < self.GROUPED_SECONDS:
                self._ranks.want_stop()
                return
        if self._deferring and not self._pending:
            self._pending = True
            return
        self._raised = True
        raise KeyboardInterrupt
