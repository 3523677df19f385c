"""Entry points of the installed commands. Ctrl-C ends them in one line from here on, while the rest is imported."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:  # as few imports as can be come before the first handler
    from collections.abc import Callable
    from types import FrameType, TracebackType
    from typing import Any

    Handler = Callable[[int, FrameType | None], Any] | int | None
    """Handlers that :func:`signal.signal` accepts."""

EXIT_INTERRUPTED = 130


class Leaving:
    """A block in which Ctrl-C ends the process at once, with a line: nothing must be cleaned up yet.

    An exception would be swallowed by some library's import, or break it halfway. Outside the main thread,
    and where the signal is ignored (nohup), it does nothing.
    """

    def __init__(self, program: str) -> None:
        self._line = f"{program}: interrupted\n".encode()
        self._previous: Handler = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        try:
            os.write(2, self._line)
        finally:
            os._exit(EXIT_INTERRUPTED)

    def __enter__(self) -> None:
        self._previous = signal.getsignal(signal.SIGINT)
        if self._previous not in (signal.SIG_IGN, None):
            _handle(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now: object = signal.getsignal(signal.SIGINT)
        if now is self:
            _handle(self._previous)


class HangUpWaits:
    """A block in which SIGHUP does nothing, unless a handler is set within: a server that starts has yet to read what
    the signal would have it read again. It does not end the process either, also if the terminal goes.
    """

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            _handle(self, signal.SIGHUP)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now: object = signal.getsignal(signal.SIGHUP)
        if now is self:
            _handle(signal.SIG_DFL, signal.SIGHUP)


class Interruptible:
    """A block in which Ctrl-C raises KeyboardInterrupt again, if it was to end the process at once."""

    def __init__(self) -> None:
        self._previous: Handler = None

    def __enter__(self) -> None:
        self._previous = signal.getsignal(signal.SIGINT)
        if isinstance(self._previous, Leaving):
            _handle(signal.default_int_handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._previous, Leaving):
            _handle(self._previous)


def _handle(handler: Handler, number: int = signal.SIGINT) -> None:
    try:  # noqa: SIM105  contextlib is not imported here
        signal.signal(number, handler)
    except ValueError:  # not in the main thread
        pass


def hapi() -> int:
    """Entry point of ``hapi``; returns the exit code."""
    with Leaving("hapi"):
        from hapi.cli.main import main

        return main()


def server() -> int:
    """Entry point of ``hapi-server``; returns the exit code."""
    with HangUpWaits(), Leaving("hapi-server"):
        from hapi.cli.server import main

        return main()


def train() -> int:
    """Entry point of ``hapi-train``; returns the exit code."""
    with Leaving("hapi-train"):
        from hapi.cli.train import main

        return main()
