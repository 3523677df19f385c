"""Processes of the two tiers, for benchmarks: started from this checkout, told a token, read line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hapi.bench.loose import Bed, LooseBed
from hapi.errors import TransportError

START_SECONDS = 120.0
"""Longest time until a process of Hapi's is ready on a slow machine."""


def start_server(
    bed: Bed,
    store: Path,
    token: str,
    folder: Path,
    flags: Sequence[str] = (),
    *,
    device: str = "cpu",
    name: str = "server",
) -> str:
    """Start ``hapi-server`` on its side of the bed; returns its URL once it listens. Its log is ``folder/NAME.log``."""
    return server_process(bed, store, token, folder, flags, device=device, name=name)[1]


def server_process(
    bed: Bed,
    store: Path,
    token: str,
    folder: Path,
    flags: Sequence[str] = (),
    *,
    device: str = "cpu",
    name: str = "server",
) -> tuple[subprocess.Popen[str], str]:
    """What :func:`start_server` does; the process and its URL."""
    log = folder / f"{name}.log"
    options = {
        "--store": str(store),
        "--host": bed.address,
        "--port": "0",
        "--threads": "1",
        "--device": device,
        "--log-level": "warning",
    }
    command = [sys.executable, "-m", "hapi.cli.server", "--exit-with-stdin"]
    command += [word for option in options.items() for word in option]
    with log.open("wb") as stderr:
        process = bed.start(
            "server",
            [*command, *flags],
            env=environment(token),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    line = read_line(process, START_SECONDS)
    prefix = "listening on "
    if not line.startswith(prefix):
        raise TransportError(f"hapi-server did not start on the test bed: {last_line(log.read_text())}")
    return process, line.removeprefix(prefix).strip()


class BenchClient:
    """A process of :mod:`hapi.bench.sweep_client` on its side of the bed. One caller at a time."""

    def __init__(self, bed: Bed, token: str, folder: Path, name: str = "client") -> None:
        self._log = folder / f"{name}.log"
        limited = ["--limited"] if isinstance(bed, LooseBed) else []
        with self._log.open("wb") as stderr:
            self._process = bed.start(
                "client",
                [sys.executable, "-m", "hapi.bench.sweep_client", *limited],
                env=environment(token),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        if isinstance(bed, LooseBed):
            bed.limit_with(lambda bits: self.tell("limit", bits=bits))

    def tell(self, do: str, **arguments: Any) -> None:
        """Have it do a command."""
        self.ask(do, **arguments)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have it do a command; the answer. ``ok`` is false when that did not fit its memory.

        Raises :class:`TransportError` for every other error.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise TransportError("the benchmark's client has no pipes; this is a defect of hapi")
        try:
            stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise TransportError(f"the benchmark's client ended: {last_line(self._log.read_text())}")
        answer: dict[str, Any] = json.loads(line)
        if not answer["ok"] and not answer["memory"]:
            raise TransportError(f"the benchmark's client: {answer['error']}")
        return answer


def environment(token: str) -> dict[str, str]:
    # The paths of this process, so that a checkout that is not installed is found too.
    paths = os.pathsep.join(dict.fromkeys(str(Path(p).absolute()) for p in sys.path))
    return {**os.environ, "HAPI_TOKEN": token, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def read_line(process: subprocess.Popen[str], seconds: float) -> str:
    """The first line of a process's output; empty when it ended or took longer than ``seconds``."""
    lines: list[str] = []
    stdout = process.stdout
    if stdout is None:
        return ""
    reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
    reader.start()
    reader.join(seconds)
    return lines[0] if lines else ""


def last_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"
