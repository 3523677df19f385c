"""Whether a process ends in order, as an ``atexit`` hook needs to know it: Python tells hooks no exit code."""

from __future__ import annotations

import ast
import builtins
import dis
import multiprocessing
import sys
import threading
from _sitebuiltins import Quitter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)
_NOT_PLAIN = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_RAISES_AGAIN, _RAISES = dis.opmap["RERAISE"], dis.opmap["RAISE_VARARGS"]


class ProcessEnding:
    """Follows how the main program ends.

    It ends in order where it runs to its last line, or leaves with an exit code of 0 that no signal's handler gave.
    Its frame tells the first; the exception of ``sys.exit`` and ``exit``, which are wrapped for that, the second, and
    its source a ``raise SystemExit``. An exception, a signal, another exit code, and an end that cannot be known, as
    ``raise SystemExit`` within a function, are out of order.
    """

    def __init__(self) -> None:
        """Begin to follow the main program; ``sys.exit`` is wrapped from now on."""
        frames = _main_frames()  # of modules: they hold no values but the modules' own
        self._main = frames[0] if frames else None
        self._script = next((one for one in frames if one.f_globals.get("__name__") == "__main__"), None)
        """Frame of the user's module: another one runs it with ``python -m``."""
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
        if last in _RETURNS or main.f_lasti == self._good_exit_at:
            return True
        is_passed_on = (
            last == _RAISES_AGAIN and self._good_exit_at >= 0
        )  # by "with", "finally" or another "except"
        return is_passed_on or (self._script is not None and raises_zero(self._script))

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


def raises_zero(script: FrameType) -> bool:
    """Return whether a module ended by a ``raise SystemExit`` of its own, whose code its source says to be 0.

    The exception is gone by then: a code that is computed is known only where it is a variable of the module, or
    comes from a function of it all of whose returns are 0 or nothing.
    """
    code, at = script.f_code, script.f_lasti
    if code.co_code[at] != _RAISES or "SystemExit" in script.f_globals:
        return False
    place = next(islice(code.co_positions(), at // 2, None))
    try:
        tree = ast.parse(Path(code.co_filename).read_bytes())
        is_same = compile(tree, code.co_filename, "exec", dont_inherit=True).co_code == code.co_code
    except (OSError, ValueError, SyntaxError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and place == (
            node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
        ):  # fmt: skip
            return is_same and _is_exit_with_zero(node.exc, tree, script.f_globals)
    return False


def _is_exit_with_zero(raised: ast.expr | None, tree: ast.Module, names: Mapping[str, object]) -> bool:
    given: list[ast.expr] = []
    if isinstance(raised, ast.Call) and not raised.keywords:
        given, raised = raised.args, raised.func
    if not isinstance(raised, ast.Name) or raised.id != "SystemExit" or len(given) > 1:
        return False
    value = given[0] if given else None
    if isinstance(value, ast.Name):
        return _is_zero(names.get(value.id, 1))
    if not isinstance(value, ast.Call):
        return _is_zero_literal(value)
    function = value.func.id if isinstance(value.func, ast.Name) else None
    defined = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == function]
    found = getattr(names.get(str(function)), "__code__", None)
    if len(defined) != 1 or not isinstance(found, CodeType) or found.co_flags & _NOT_PLAIN:
        return False
    is_same = (found.co_name, found.co_firstlineno) == (function, defined[0].lineno)
    return is_same and all(_is_zero_literal(one.value) for one in _returns_of(defined[0]))


def _returns_of(function: ast.FunctionDef) -> Iterator[ast.Return]:
    """Yield the returns of a function, not those of functions in it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _is_zero_literal(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and _is_zero(value.value))


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


def _main_frames() -> list[FrameType]:
    """Return the frames of modules in the main thread, the outermost first."""
    found: list[FrameType] = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_back is None or frame.f_code.co_name == "<module>":
            found.insert(0, frame)
        frame = frame.f_back
    return found


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
