"""A ``hapi-server`` of its own process, that ends with this one whatever happens to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from hapi.errors import HapiError, TransportError
from hapi.text import printable

START_SECONDS = 600.0
"""Longest time until it listens; importing torch from a cold disk takes most of it, and longer on a busy machine."""
STOP_SECONDS = 10.0
MAX_WORDS = 500
"""Most characters of its last output in a message."""
_LISTENING = "listening on "


class ChildServer:
    """``hapi-server`` that holds the other end of a pipe as its standard input, and stops when that closes."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        title: str,
        environment: Mapping[str, str],
        stderr: IO[bytes] | int,
        last_output: Callable[[], str],
        port: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Start it, and return when it listens.

        Args:
            arguments: of ``hapi-server``, beside the port.
            title: what messages call it, such as ``embedded server``.
            environment: further variables, beside this process's own but for the settings of other servers.
            stderr: takes its log.
            last_output: returns its last words out of ``stderr``.
            port: that it listens on; 0: any free one.
            meanwhile: called while it starts.

        Raises:
            TransportError: it did not start; with its last words.
        """
        self._title, self._words = title, last_output
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hapi.cli.server", "--port", str(port), "--exit-with-stdin", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**_environment(), "PYTHONPATH": _search_path(), **environment},
            start_new_session=True,  # Ctrl-C is for this process, which then ends the server in order
        )
        try:
            self.url = self._await_url(meanwhile)
        except BaseException:
            self._process.kill()  # nobody was served yet, and it would first load all that it needs
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
        raise HapiError(f"the {self._title} {how}{more} (its last words: {self._last_output()})")

    def drain(self, seconds: float) -> None:
        """Let it finish what it works on and end, at most ``seconds``; then :meth:`close`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

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

    def _await_url(self, meanwhile: Callable[[], None]) -> str:
        lines: list[str] = []
        stdout = self._process.stdout
        if stdout is None:
            raise TransportError(f"the {self._title} has no output")
        reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
        reader.start()
        meanwhile()
        deadline = time.monotonic() + START_SECONDS
        while reader.is_alive() and time.monotonic() < deadline:
            reader.join(0.2)
        late = f" within {START_SECONDS:g} s" if reader.is_alive() else ""
        if lines and lines[0].startswith(_LISTENING):
            return lines[0].removeprefix(_LISTENING).strip()
        raise TransportError(f"the {self._title} did not start{late}: {self._last_output()}")

    def _last_output(self) -> str:
        lines = self._words().strip().splitlines()
        return printable(lines[-1][:MAX_WORDS] if lines else "it said nothing", MAX_WORDS)


def _environment() -> dict[str, str]:
    """This process's variables without the settings of other servers, such as one that listens to the network."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HAPI_SERVER_")}


def _search_path() -> str:
    """The server finds the same modules as this process, a user's own model factory included."""
    return os.pathsep.join(dict.fromkeys(str(Path(p).absolute()) if p else str(Path.cwd()) for p in sys.path))
