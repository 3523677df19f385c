"""Real processes for the integration tests: servers on free loopback ports, trainers, and their reports."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from support.forked import ROOT as ROOT
from support.forked import ForkedProcess, environment
from support.thin_resnet import THIN_LAYERS, THIN_RESNET
from support.waiting import PATIENCE, until

THIN = (
    "--model", THIN_RESNET, *(flag for name in THIN_LAYERS for flag in ("--blocks", name)), "--freeze", "11",
)  # fmt: skip
"""Flags of ``hapi-train`` for a network with ResNet18's layers and frozen part at a fraction of its work."""
_DIGITS = ("--weights", "random", "--image-size", "32", "--lr", "0.002", "--no-progress")
DIGITS_JOB = (*THIN, *_DIGITS)
"""Flags of ``hapi-train`` for :func:`packed_digits`."""
RESNET_JOB = ("--model", "resnet18", *_DIGITS)
"""The same where a network of a library is the point."""


class ServerProcess:
    """A ``hapi-server``; ``port`` 0 takes a free one, another restarts on the same.

    ``fresh``: a new interpreter, where what it holds in memory or how it begins is the point. ``open_files``: how many
    it may have, then always in a new interpreter (``ulimit -n``, the soft and the hard limit). ``module``: what runs.
    """

    def __init__(
        self,
        store: Path | str,
        *arguments: str,
        port: int = 0,
        log: Path | None = None,
        fresh: bool = False,
        open_files: int | None = None,
        module: str = "hapi.cli.server",
        **env: str,
    ) -> None:
        self.store, self.arguments, self.env, self.log, self.fresh = store, arguments, env, log, fresh
        self.open_files = open_files
        command = [
            module,
            "--store",
            str(store),
            "--port",
            str(port),
            "--threads",
            "1",
            "--allow-model",
            THIN_RESNET,
            *arguments,
        ]
        self._stderr = (log or Path(os.devnull)).open("ab")
        self.process: Any = (
            subprocess.Popen(
                [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=self._stderr, text=True,
                env=environment(**env), preexec_fn=open_files and partial(_limit_open_files, open_files),
            )
            if fresh or open_files
            else ForkedProcess(command, env=environment(**env), stdout=subprocess.PIPE, stderr=self._stderr)
        )  # fmt: skip
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: lines.put(self.process.stdout.readline()), daemon=True).start()
        try:
            line = lines.get(timeout=PATIENCE)
        except queue.Empty:
            self.kill()
            raise AssertionError("the server did not say that it listens") from None
        if not line.startswith("listening on "):
            self.kill()
            raise AssertionError(f"the server said {line!r}" + (log.read_text() if log else ""))
        self.url = line.removeprefix("listening on ").strip()
        self.port = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.process.kill()
        self.process.wait()
        self._close()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code: int = self.process.wait(PATIENCE)
        self._close()
        return code

    def restarted(self) -> ServerProcess:
        """A new process on the same port, of hapi-server as it is here."""
        return ServerProcess(
            self.store,
            *self.arguments,
            port=self.port,
            log=self.log,
            fresh=self.fresh,
            open_files=self.open_files,
            **self.env,
        )

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._stderr.close()


def _limit_open_files(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@contextlib.contextmanager
def server(store: Path | str, *arguments: str, **options: Any) -> Iterator[ServerProcess]:
    """A server that is ended whatever happens."""
    running = ServerProcess(store, *arguments, **options)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.kill()


def hapi(
    *arguments: str, code: int | None = 0, seconds: float = PATIENCE, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``hapi ...`` and check its exit code."""
    return _forked(["hapi.cli.main", *arguments], code, seconds, env)


def packed_digits(folder: Path, count: int) -> Path:
    """A store in ``folder`` with ``count`` of scikit-learn's digits, 32 pixels wide, as ``digits``."""
    hapi("pack", "sklearn:digits", f"{folder}/digits", "--image-size", "32", "--limit", str(count))
    return folder


def train(
    *arguments: str, code: int | None = 0, seconds: float = PATIENCE, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``hapi-train ...``, without a run folder unless ``--output`` is given, and check its exit code."""
    return _forked(["hapi.cli.train", "--no-output", "--threads", "1", *arguments], code, seconds, env)


def new_train(
    *arguments: str, code: int | None = 0, seconds: float = PATIENCE, **env: str
) -> subprocess.CompletedProcess[str]:
    """As :func:`train`, in a new interpreter: where what it holds in memory is the point."""
    return run(
        [sys.executable, "-m", "hapi.cli.train", "--no-output", "--threads", "1", *arguments],
        code,
        seconds,
        env,
    )


def start_train(*arguments: str, **env: str) -> ForkedProcess:
    """Start ``hapi-train ...`` as :func:`train` does and leave it running; its errors come with its output."""
    return ForkedProcess(
        ["hapi.cli.train", "--no-output", "--threads", "1", *arguments],
        env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def start_new_train(*arguments: str, **env: str) -> subprocess.Popen[str]:
    """As :func:`start_train`, in a new interpreter: where how it begins is the point."""
    return subprocess.Popen(
        [sys.executable, "-m", "hapi", "train", "--no-output", "--threads", "1", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**env),
    )  # fmt: skip


def _forked(
    command: Sequence[str], code: int | None, seconds: float, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    process = ForkedProcess(command, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate(seconds)
    finally:
        process.kill()
    return _checked(subprocess.CompletedProcess(command, process.wait(), output, errors), code)


def run(
    command: Sequence[str], code: int | None, seconds: float, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run any command in this environment and check its exit code."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment(**env), check=False
    )
    return _checked(done, code)


def _checked(done: subprocess.CompletedProcess[str], code: int | None) -> subprocess.CompletedProcess[str]:
    if code is not None and done.returncode != code:
        raise AssertionError(f"{done.args} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def report_of(path: Path) -> dict[str, Any]:
    """A report file's document."""
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def of_epochs(report: dict[str, Any], name: str) -> list[Any]:
    """A figure of each epoch."""
    return [e[name] for e in report["epochs"]]


def losses(report: dict[str, Any]) -> list[float]:
    """The loss of each epoch."""
    return of_epochs(report, "loss")


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE, what: str = "the condition") -> None:
    """As :func:`until`."""
    until(condition, seconds, what)
