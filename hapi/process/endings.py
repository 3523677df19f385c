"""Whether a process ends in order, as an ``atexit`` hook needs to know it: Python tells hooks no exit code."""

from __future__ import annotations

import builtins
import dis
import multiprocessing
import sys
import threading
from _sitebuiltins import Quitter
from collections.abc import Callable
from functools import cache
from multiprocessing.util import Finalize
from types import FrameType
from typing import NoReturn

_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)
_RAISES_AGAIN = dis.opmap["RERAISE"]


class ProcessEnding:
    """Follows how the main program ends.

    It ends in order where it runs to its last line, or leaves with an exit code of 0 that no signal's handler gave.
    Its frame tells the first; ``sys.exit``, ``exit`` and ``quit``, which are wrapped for that, the second. An
    exception, a signal, another exit code, and an end that cannot be known, as ``raise SystemExit``, are out of order.
    """

    def __init__(self) -> None:
        """Begin to follow the main program; ``sys.exit`` is wrapped from now on."""
        self._main = _main_frame()  # of a module: it holds no values but the module's own
        self._good_exit_at = -1
        """Instruction of the main program within which ``sys.exit`` was called last; -1 for a code other than 0."""
        self._leave = sys.exit
        sys.exit = self._noting_exit
        for name in ("exit", "quit"):
            found = vars(builtins).get(name)
            if isinstance(found, Quitter):
                setattr(builtins, name, _NotingQuitter(found, self))

    def is_in_order(self) -> bool:
        """Return whether the main program, which has ended, did so in order. For ``atexit`` hooks."""
        main = self._main
        if main is None or main.f_lasti < 0 or getattr(sys, "last_value", None) is not None:
            return False
        last = main.f_code.co_code[main.f_lasti]
        is_passed_on = (
            last == _RAISES_AGAIN and self._good_exit_at >= 0
        )  # by "with", "finally" or another "except"
        return last in _RETURNS or main.f_lasti == self._good_exit_at or is_passed_on

    def note(self, status: object) -> None:
        """Note an exit code that the main thread is about to leave with."""
        if self._main is not None and threading.current_thread() is threading.main_thread():
            is_good = _is_zero(status) and not _is_in_handler(sys._getframe(2))
            self._good_exit_at = self._main.f_lasti if is_good else -1

    def _noting_exit(self, status: object = None, /) -> NoReturn:
        self.note(status)
        self._leave(status)  # type: ignore[arg-type]


class _NotingQuitter(Quitter):
    """``exit`` or ``quit``, which say their code."""

    def __init__(self, own: Quitter, ending: ProcessEnding) -> None:
        super().__init__(own.name, own.eof)
        self._own, self._ending = own, ending

    def __call__(self, code: object = None) -> NoReturn:
        """Leave."""
        self._ending.note(code)
        self._own(code)  # type: ignore[arg-type]


def _is_zero(status: object) -> bool:
    return status is None or (isinstance(status, int) and not status)


@cache
def process_ending() -> ProcessEnding:
    """Return the only one of this process."""
    return ProcessEnding()


def at_child_end(act: Callable[[bool], None]) -> Callable[[], object]:
    """Call ``act`` when a child of :mod:`multiprocessing` ends, which runs no ``atexit`` hook where it was forked.

    Args:
        act: gets whether the child's function returned.

    Returns:
        A function that cancels it.
    """
    if multiprocessing.parent_process() is None:
        return lambda: None
    found = Finalize(None, lambda: act(sys.exc_info()[0] is None), exitpriority=0)
    return found.cancel


def _main_frame() -> FrameType | None:
    """Return the outermost frame of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_in_handler(frame: FrameType | None) -> bool:
    """Return whether a signal's handler is among the callers: Python gives it the frame that it interrupts."""
    while frame is not None and frame.f_back is not None:
        interrupted = frame.f_back
        for value in frame.f_locals.values():
            if value is interrupted or (
                isinstance(value, tuple) and any(one is interrupted for one in value)
            ):
                return True
        frame = interrupted
    return False
