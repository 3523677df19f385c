"""Parts of every command: one-line errors, exit codes, and the guard around ``main``."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hapi.cli.entry import EXIT_INTERRUPTED, Interruptible
from hapi.errors import DivergedError, HapiError, ModelChoiceError, UsageError
from hapi.process.memory_errors import is_out_of_memory
from hapi.process.output import standard_outputs
from hapi.text import MESSAGE_CHARACTERS, printable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DIVERGED = 3
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 130 interrupted (Ctrl-C)."
"""A line of every command's help."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, with the flag that was probably meant, instead of the whole
    usage.

    Flags must be written in full: an abbreviation of one today may fit two, or another one, tomorrow.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self._negative_number_matcher = re.compile(r"-\.?\d")  # as of Python 3.14: -5GB is a value, too

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the parsed arguments; exit with code 2 after one line when some are wrong.

        A parser of a sub-command is asked by this name too, so that its own flags are named.
        """
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            typed = unknown[0].partition("=")[0]
            begun = [flag for flag in flags if flag.startswith(typed) and len(typed) > 3]
            matches = sorted(begun, key=len) or difflib.get_close_matches(typed, flags, 1, 0.6)
            self.error(
                f"unknown argument {unknown[0]}" + (f"; did you mean {matches[0]}?" if matches else "")
            )
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr, and exit with code 2."""
        line = f"{self.prog}: error: {message} ({self.prog} --help lists everything)"
        self.exit(EXIT_USAGE, printable(" ".join(line.split()), MESSAGE_CHARACTERS) + "\n")


def run_command(program: str, body: Callable[[], int], *, goes_on: bool = False) -> int:
    """Run ``body``; turn its exceptions into one line on stderr and an exit code.

    Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 3 the training diverged, 130 interrupted. An
    error that is neither a :class:`HapiError` nor a lack of memory is a defect of Hapi and keeps its traceback
    (all do with ``HAPI_DEBUG=1``).

    Args:
        program: name of the command.
        body: the command; returns its exit code.
        goes_on: the work counts even without the output, so it goes on without stdout.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")  # an image that is wrong has a line of its own
    with standard_outputs(program, goes_on=goes_on):
        return _guarded(program, body, goes_on)


def _guarded(program: str, body: Callable[[], int], goes_on: bool) -> int:
    try:
        with Interruptible():
            code = body()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except SystemExit as ended:  # argparse's way to end after --help, and after wrong arguments
        return ended.code if isinstance(ended.code, int) else EXIT_OK if ended.code is None else EXIT_FAILED
    except HapiError as error:
        if os.environ.get("HAPI_DEBUG"):
            raise
        print(f"{program}: error: {printable(error, MESSAGE_CHARACTERS)}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return _interrupted(program)
    except BrokenPipeError:
        if goes_on:
            raise
        return EXIT_FAILED  # whoever read our output is gone
    except Exception as error:
        # Python 3.11 wraps what comes up in __set_name__, where most of the time of some imports is spent.
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt):
            return _interrupted(program)
        if os.environ.get("HAPI_DEBUG") or not is_out_of_memory(error):
            raise
        detail = printable(" ".join(str(error).split()), MESSAGE_CHARACTERS) or type(error).__name__
        print(
            f"{program}: error: the memory that this process may have is used up ({detail}); "
            f"end other programs, or raise its limit (ulimit {'-u or -v' if 'thread' in detail else '-v'})",
            file=sys.stderr,
        )
        return EXIT_FAILED


def _interrupted(program: str) -> int:
    print(f"{program}: interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


def say(line: str) -> None:
    """Print one line of a result on stdout; names in it are from stores and may be anything."""
    print(printable(line, MESSAGE_CHARACTERS))


def tell(program: str, line: str) -> None:
    """Print one line about the work of ``program`` on stderr, as :func:`say` does."""
    print(f"{program}: {printable(line, MESSAGE_CHARACTERS)}", file=sys.stderr)


def exit_code(error: HapiError) -> int:
    """Return the exit code of a command that ended with ``error``."""
    if isinstance(error, DivergedError):
        return EXIT_DIVERGED
    return EXIT_USAGE if isinstance(error, UsageError | ModelChoiceError) else EXIT_FAILED
