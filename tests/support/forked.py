"""Hapi's commands in processes of their own, without the seconds that importing torch takes each time.

One process per test process imports the commands and does nothing else (multiprocessing's fork server); each command
is forked from it, with arguments, environment and files of its own. It has its own memory, threads, signals and exit
code, as a new interpreter has; but it begins with the pages that imports filled, so what counts memory from the start
wants a new interpreter, and so does what comes before (the entry points, their imports, a signal during them).
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver, reduction
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "hapi.cli.pack",
    "hapi.client.transport.embedded_server",
    "hapi.client.job_context",
    "hapi.client.session",
    "hapi.train.trainer",
    "hapi.repository.built",
    "hapi.repository.push",
    "hapi.server.lifecycle.run",
    "hapi.ingest.pack",
    "hapi.ingest.sources.base",
    "torchvision",
    "sklearn.datasets",
    "torch._dynamo",  # an optimiser imports it in its first step
    __name__,
    "support.frozen",
)
"""What the commands import before they can do anything, and this module, which runs them."""


def environment(**more: str) -> dict[str, str]:
    """This environment without HAPI_ variables, with the checkout and the tests importable and one thread per process.

    Nothing is kept for later epochs, nor shared by requests, unless ``more`` says so: tests count what crosses and is
    computed.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HAPI_")}
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), clean.get("PYTHONPATH")]))
    alone = {"HAPI_TRAIN_CACHE": "off", "HAPI_SERVER_SHARE_MEMORY": "0", "HAPI_SHARED_WEIGHTS": "off"}
    return {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **alone, **more}


@cache
def fork_server() -> Any:
    """The fork server, with one thread and without what this environment says about Hapi: imports may read it."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment().keys():
            patch.delenv(name)
        for name, value in environment().items():
            patch.setenv(name, value)
        forkserver._forkserver.ensure_running()  # type: ignore[attr-defined]
    return context


class _Descriptor:
    """A file descriptor that a process is started with; over there it is a number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (reduction.DupFd(self._number),)


def _detached(handed_over: Any) -> int:
    number: int = handed_over.detach()
    return number


class ForkedProcess:
    """``python -m MODULE ARGUMENTS``, forked; what the tests and benchmarks need of :class:`subprocess.Popen`.

    ``command`` is the module and its arguments; ``stdin``, ``stdout`` and ``stderr`` are as there, always text.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        start_new_session: bool = False,
        cwd: Path | None = None,
    ) -> None:
        self.args, self.stdin, self.stdout, self.stderr = list(command), None, None, None
        ends = []
        for number, (name, wanted) in enumerate((("stdin", stdin), ("stdout", stdout), ("stderr", stderr))):
            if wanted == subprocess.PIPE:
                pipe = os.pipe()
                setattr(self, name, os.fdopen(pipe[number == 0], "r" if number else "w"))
                ends.append(pipe[number > 0])
            elif wanted == subprocess.DEVNULL:
                ends.append(os.open(os.devnull, os.O_RDWR))
            elif wanted == subprocess.STDOUT:
                ends.append(os.dup(ends[1]))
            else:
                ends.append(
                    os.dup(number if wanted is None else getattr(wanted, "fileno", lambda w=wanted: w)())
                )
        arguments = (
            self.args,
            dict(env or os.environ),
            [_Descriptor(end) for end in ends],
            start_new_session,
            cwd or Path.cwd(),
        )
        self._process = fork_server().Process(target=_run, args=arguments, daemon=True)
        try:
            self._process.start()
        finally:
            for end in ends:
                os.close(end)
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """As :attr:`returncode`."""
        return self.returncode

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal's number if one ended it; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or :class:`subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float = 600.0) -> tuple[str, str]:
        """All that is still to come of its output and errors, when it has ended."""
        deadline = time.monotonic() + timeout
        found: dict[str, str] = {}
        streams = {
            name: stream for name in ("stdout", "stderr") if (stream := getattr(self, name)) is not None
        }

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                found[name] = stream.read()

        readers = [threading.Thread(target=read, args=item, daemon=True) for item in streams.items()]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(deadline - time.monotonic(), 0.0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(max(deadline - time.monotonic(), 0.1))
        return found.get("stdout", ""), found.get("stderr", "")

    def send_signal(self, number: int) -> None:
        """Send it, if the process still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may end just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        self.send_signal(signal.SIGKILL)


OWN_SERVERS = "TESTS_OWN_SERVERS"
"""A variable of the environment: set where servers that a forked command starts are to be children of it."""


def fork_child_servers(patch: pytest.MonkeyPatch) -> None:
    """Have servers that this process starts for itself, such as embedded ones, forked as commands are."""
    shim = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    patch.setattr("hapi.process.child_server.subprocess", shim)


def popen(
    command: Sequence[str], *, text: bool = True, **options: Any
) -> ForkedProcess | subprocess.Popen[str]:
    """In place of :class:`subprocess.Popen`, for a benchmark's processes: those of Hapi are forked."""
    if list(command[:2]) == [sys.executable, "-m"] and command[2].startswith(("hapi.", "benchmarks.")):
        return ForkedProcess(command[2:], **options)
    return subprocess.Popen(command, text=text, **options)


def _share_fork_server() -> None:
    """Let this process, which was forked itself, have others forked from where it comes from."""
    mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    shared: Any = forkserver._forkserver  # type: ignore[attr-defined]
    shared.ensure_running = lambda: (
        None
    )  # multiprocessing has told it the address, and would start another one


def _run(command: list[str], env: dict[str, str], ends: list[int], new_session: bool, cwd: Path) -> None:
    """In the new process: what the interpreter does with ``-m``."""
    assert "support.frozen" in sys.modules, (
        "what is imported before a fork was not found, and would be done each time"
    )
    if new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, end in enumerate(ends):
        os.dup2(end, number)
        os.close(end)
    unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1 if unbuffered else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.path[:0] = [
        path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)
    ]
    if OWN_SERVERS not in env:
        _share_fork_server()
        fork_child_servers(pytest.MonkeyPatch())
    module, *arguments = command
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
