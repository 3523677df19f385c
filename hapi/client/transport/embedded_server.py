"""A private server process for a store on this machine, without any setup."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hapi.errors import HapiError, TransportError, UsageError
from hapi.store.open import open_store
from hapi.text import printable

START_SECONDS = 120.0
"""Longest time until an embedded server listens; importing torch from a cold disk takes most of it."""
STOP_SECONDS = 10.0


class EmbeddedServer:
    """``hapi-server`` on a free loopback port, ended with this process whatever happens to it.

    The server holds the other end of a pipe as its standard input and stops when that closes. Another user of
    this machine cannot use it: it wants a token made for it.
    """

    def __init__(
        self,
        store: str,
        *,
        allow_models: Sequence[str] = (),
        threads: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the server, and wait until it listens.

        Args:
            store: a store's URL.
            allow_models: factories of models that it may call.
            threads: of its forward passes; None for its own choice.
            meanwhile: called while it starts, which takes seconds of another processor.

        Raises:
            UsageError: the store cannot be used by two processes, or there is no room for the server's log.
            TransportError: the server did not start.
        """
        if store.startswith("memory:"):
            raise UsageError("--store memory: lives in one process; give a folder or an object store's URL")
        # A URL that cannot be is said so before anything is started.
        self.on_local_disk = open_store(store).local_path("any") is not None
        """True where the store is a folder, so that its samples are on this machine already."""
        self.token = secrets.token_hex(16)
        try:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process below
        except OSError as error:
            raise UsageError(
                f"no room for the embedded server's log: {error.strerror or error}; free some, or set TMPDIR"
            ) from None
        command = [
            sys.executable,
            "-m",
            "hapi.cli.server",
            "--store",
            store,
            "--port",
            "0",
            "--exit-with-stdin",
            "--tell-store",
            "--log-level",
            "warning",  # a line for each request would fill the disk: the file has no name and no end
        ]
        if threads is not None:
            command += ["--threads", str(threads)]
        for name in allow_models:
            command += ["--allow-model", name]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**_environment(), "HAPI_TOKEN": self.token, "PYTHONPATH": _search_path()},
            start_new_session=True,  # Ctrl-C is for the trainer, which then ends the server in order
        )
        try:
            self.url = self._await_url(meanwhile)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def check(self) -> None:
        """Raise :class:`HapiError` with the server's last output when it has ended."""
        status = self._process.poll()
        if status is None:
            return
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        more = "; the system does that when memory runs out" if status == -signal.SIGKILL else ""
        raise HapiError(f"the embedded server {how}{more} (its last words: {self._last_output()})")

    def _await_url(self, meanwhile: Callable[[], None]) -> str:
        lines: list[str] = []
        stdout = self._process.stdout
        if stdout is None:
            raise TransportError("the embedded server has no output")
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        meanwhile()
        deadline = time.monotonic() + START_SECONDS
        while reader.is_alive() and time.monotonic() < deadline:
            reader.join(0.2)
        prefix = "listening on "
        if lines and lines[0].startswith(prefix):
            return lines[0].removeprefix(prefix).strip()
        raise TransportError(f"the embedded server did not start: {self._last_output()}")

    def _last_output(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        last = text.splitlines()[-1][:500] if text else "it said nothing"
        return printable(last, 500)

    def close(self) -> None:
        """End the server and wait for it."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._log.close()


def _environment() -> dict[str, str]:
    """This process's variables without the settings of other servers, such as one that listens to the network."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HAPI_SERVER_")}


def _search_path() -> str:
    """The server finds the same modules as this process, a user's own model factory included."""
    return os.pathsep.join(dict.fromkeys(str(Path(p).absolute()) if p else str(Path.cwd()) for p in sys.path))
