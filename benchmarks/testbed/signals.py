"""Signals that end a measurement, so that what it started ends with it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals beside Ctrl-C, which Python turns into an exception by itself."""


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM, and the SIGHUP of a terminal that closes, unwind this process inside the block instead of ending it.

    An ignored SIGHUP (``nohup``) stays ignored. Only the main thread can have handlers; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.getsignal(number) for number in ENDING}
    if old[signal.SIGHUP] is signal.SIG_IGN:
        del old[signal.SIGHUP]
    for number in old:
        signal.signal(number, _terminated)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """No signal breaks the block off: a second one must not leave half of what is being put away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ENDING)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
