"""Real processes for the integration tests: servers on free loopback ports, trainers, and their reports."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment(**more: str) -> dict[str, str]:
    """This environment without HAPI_ variables, with the checkout importable and one thread per process."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HAPI_")}
    path = os.pathsep.join(filter(None, [str(ROOT), clean.get("PYTHONPATH")]))
    return {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


class ServerProcess:
    """A ``hapi-server``; ``port`` 0 takes a free one, another restarts on the same."""

    def __init__(
        self, store: Path | str, *arguments: str, port: int = 0, log: Path | None = None, **env: str
    ) -> None:
        self.store, self.arguments, self.env, self.log = store, arguments, env, log
        command = [
            sys.executable, "-m", "hapi.cli.server", "--store", str(store), "--port", str(port),
            "--threads", "1", *arguments,
        ]  # fmt: skip
        self._stderr = (log or Path(os.devnull)).open("ab")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env=environment(**env)
        )
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: lines.put(self.process.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
        try:
            line = lines.get(timeout=90)
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

    def stop(self, seconds: float = 30.0) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        self._close()
        return code

    def restarted(self) -> ServerProcess:
        """A new process on the same port."""
        return ServerProcess(self.store, *self.arguments, port=self.port, log=self.log, **self.env)

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._stderr.close()


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
    *arguments: str, code: int | None = 0, seconds: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``hapi ...`` and check its exit code."""
    return run([sys.executable, "-m", "hapi.cli.main", *arguments], code, seconds, env)


def train(
    *arguments: str, code: int | None = 0, seconds: float = 240, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``hapi-train ...`` and check its exit code."""
    return run([sys.executable, "-m", "hapi.cli.train", "--threads", "1", *arguments], code, seconds, env)


def start_train(*arguments: str, **env: str) -> subprocess.Popen[str]:
    """Start ``hapi-train ...`` and leave it running."""
    return subprocess.Popen(
        [sys.executable, "-m", "hapi.cli.train", "--threads", "1", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(**env),
    )  # fmt: skip


def run(
    command: Sequence[str], code: int | None, seconds: float, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment(**env), check=False
    )
    if code is not None and done.returncode != code:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def report_of(path: Path) -> dict[str, Any]:
    """A report file's document."""
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def losses(report: dict[str, Any]) -> list[float]:
    """The loss of each epoch."""
    return [e["loss"] for e in report["epochs"]]


def wait_for(condition: Any, seconds: float = 30.0, what: str = "condition") -> None:
    """Poll until ``condition()`` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {seconds} s")
        time.sleep(0.02)
