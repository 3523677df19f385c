"""Ctrl-C from the first line of a command on, and flags that are written in full."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading

import pytest
from support.harness import environment

from hapi.cli.entry import Interruptible, Leaving
from hapi.cli.shared.common import OneLineParser, run_command


def outcome(program: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=240
    )
    return done.returncode, done.stdout, done.stderr


INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"


def test_ctrl_c_in_an_import_ends_at_once() -> None:
    """Also in one that would swallow the exception."""
    program = (
        "import sys; from hapi.cli.entry import Leaving\n"
        "print('begun', flush=True)\n"
        f"with Leaving('hapi-train'):\n    try:\n        {INTERRUPT}\n    except BaseException: pass\n"
        "print('went on')"
    )
    assert outcome(program) == (130, "begun\n", "hapi-train: interrupted\n")


def test_ctrl_c_in_the_work_is_an_exception() -> None:
    program = (
        "import sys; from hapi.cli.entry import Leaving; from hapi.cli.shared.common import run_command\n"
        f"def body():\n    try:\n        {INTERRUPT}\n    finally: print('cleaned up')\n"
        "with Leaving('prog'): sys.exit(run_command('prog', body))"
    )
    assert outcome(program) == (130, "cleaned up\n", "prog: interrupted\n")


def test_ctrl_c_where_python_wraps_it() -> None:
    """While a class is made, as in torch's imports: Python 3.11 raises a RuntimeError from the interrupt."""
    program = (
        "import sys; from hapi.cli.shared.common import run_command\n"
        f"class Name:\n    def __set_name__(self, owner, name): {INTERRUPT}; sum(range(10**6))\n"
        "def body(): type('Owner', (), {'name': Name()})\n"
        "sys.exit(run_command('prog', body))"
    )
    assert outcome(program) == (130, "", "prog: interrupted\n")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),  # under ulimit -v
        RuntimeError("DefaultCPUAllocator: can't allocate memory:\nyou tried to allocate 9 bytes"),
        MemoryError(),
    ],
    ids=["import", "torch", "python"],
)
def test_lack_of_memory_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> int:
        raise error

    assert run_command("prog", body) == 1
    line = capsys.readouterr().err
    assert line.startswith("prog: error: the memory that this process may have is used up (")
    assert line.endswith("raise its limit (ulimit -v)\n") and line.count("\n") == 1


def test_a_defect_keeps_its_traceback() -> None:
    def body() -> int:
        raise ImportError("no module named x")

    with pytest.raises(ImportError):
        run_command("prog", body)


def test_ignored_interrupts_stay_ignored() -> None:
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from hapi.cli.entry import Leaving\n"
        f"with Leaving('prog'):\n    {INTERRUPT}\nprint('went on')"
    )
    assert outcome(program) == (0, "went on\n", "")


def test_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    leaving = Leaving("prog")
    with leaving:
        assert signal.getsignal(signal.SIGINT) is leaving
        with Interruptible():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is leaving
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_have_no_handlers() -> None:
    def enter() -> None:
        with Leaving("prog"), Interruptible():
            entered.append(os.getpid())

    entered: list[int] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered


def test_flags_are_written_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """``--save FILE`` once wrote a profile there, since no other flag began so."""
    parser = OneLineParser(prog="prog")
    parser.add_argument("--save-profile")
    parser.add_argument("file", nargs="?")
    for arguments in (["--save", "x"], ["--save=x"]):
        code = run_command("prog", lambda a=arguments: int(bool(parser.parse_args(a))))  # type: ignore[misc]
        assert code == 2
        assert "prog: error: unknown argument --save" in capsys.readouterr().err


def test_every_parser_is_of_this_kind() -> None:
    from hapi.cli import main, server, train

    def all_of(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
        below = [a.choices.values() for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        return [parser, *(p for group in below for child in group for p in all_of(child))]

    tops = [server.parser(), train.parser(), *(main.parser_with(name) for name in main.COMMANDS)]
    found = [p for top in tops for p in all_of(top)]
    assert len(found) > 40
    assert all(isinstance(p, OneLineParser) and not p.allow_abbrev for p in found)
