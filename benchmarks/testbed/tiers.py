"""Processes of the two tiers, for benchmarks: started from this checkout, told a token, read line by line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.testbed.bed import Bed, Side, stop_all
from benchmarks.testbed.loose import LooseBed
from hapi.errors import TransportError

START_SECONDS = 900.0
"""Longest time until a process of Hapi's is ready: beside other work imports have taken minutes. One that ends is
noticed at once."""


def start_server(
    bed: Bed, store: Path | str, token: str, folder: Path, flags: Sequence[str] = (), **options: str
) -> str:
    """Start ``hapi-server`` on its side of the bed; returns its URL once it listens. Its log is ``folder/NAME.log``."""
    return start_server_process(bed, store, token, folder, flags, **options)[1]


def start_server_process(
    bed: Bed,
    store: Path | str,
    token: str,
    folder: Path,
    flags: Sequence[str] = (),
    *,
    device: str = "cpu",
    name: str = "server",
) -> tuple[subprocess.Popen[str], str]:
    """Start a server as :func:`start_server` does, but return its process too; it ends before the bed does."""
    log = folder / f"{name}.log"
    options = {
        "--store": str(store),
        "--host": bed.address,
        "--port": "0",
        "--threads": "1",
        "--device": device,
        "--log-level": "warning",
        "--share-memory": "0",  # what is measured is computed each time
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
    """A process on its side of the bed that does what it is told, line by line. One caller at a time."""

    def __init__(
        self,
        bed: Bed,
        token: str,
        folder: Path,
        name: str = "client",
        side: Side = "client",
        module: str = "benchmarks.split.sweep_client",
    ) -> None:
        """``side``: on whose cores it runs; between a server and its own side there is no link to limit."""
        self._log = folder / f"{name}.log"
        self.freeze = 0
        """Freeze of the open session."""
        limited = ["--limited"] if isinstance(bed, LooseBed) and side == "client" else []
        with self._log.open("wb") as stderr:
            self._process = bed.start(
                side,
                [sys.executable, "-m", module, *limited],
                env=environment(token),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        if isinstance(bed, LooseBed) and side == "client":
            bed.limit_with(lambda bits: self.tell("limit", bits=bits))

    def stop(self) -> None:
        """End the process."""
        stop_all([self._process])

    def memory(self, what: str) -> int:
        """Bytes of the process, by their name in Linux's process status, such as ``RssAnon``; 0 where there is none."""
        return process_bytes(self._process.pid, what)

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command."""
        self.call(do, **arguments)

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return the answer; ``ok`` is false when that did not fit its memory.

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
        self.freeze = answer.get("freeze", self.freeze)
        if not answer["ok"] and not answer["memory"]:
            raise TransportError(f"the benchmark's client: {answer['error']}")
        return answer


def process_bytes(pid: int, what: str) -> int:
    """A size from a process's status; 0 where there is none, or no such process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(what + ":"):
                return int(line.split()[1]) * 1024
    return 0


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process so far; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return sum(int(ticks) for ticks in stat.rpartition(")")[2].split()[11:13]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def environment(token: str) -> dict[str, str]:
    # The paths of this process, so that a checkout that is not installed is found too.
    """Return the environment of a tier's process; a trainer keeps nothing for later epochs unless a flag says so."""
    paths = os.pathsep.join(dict.fromkeys(str(Path(p).absolute()) for p in sys.path))
    alone = {"OMP_NUM_THREADS": "1", "HAPI_TRAIN_CACHE": "off"}
    return {**os.environ, "HAPI_TOKEN": token, "PYTHONPATH": paths, **alone}


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
    """Return the last line of a process's output."""
    lines: Sequence[str] = text.strip().splitlines()
    return lines[-1][:500] if lines else "it said nothing"
