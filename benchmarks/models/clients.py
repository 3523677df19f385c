"""Clients of the benchmark ``models``, as their parent sees them: fresh processes with a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.models.program import Task
from benchmarks.models.settings import LOCAL, Way
from benchmarks.testbed.bed import Bed, stop_all
from benchmarks.testbed.tiers import environment, last_line, read_line
from hapi.errors import HapiError, TransportError


class ModelClient:
    """A process of :mod:`benchmarks.models.program`. It ends with the bed, or by :meth:`stop`."""

    def __init__(
        self, bed: Bed, way: Way, task: Task, peers: Sequence[Path], limit: float, log: Path
    ) -> None:
        """Start it; :meth:`await_ready` says when it is ready.

        Args:
            bed: where it runs: on its client's side, but with all cores if its model lies on the local disk.
            way: its way of keeping models.
            task: what it does.
            peers: folders with packages of other ways.
            limit: longest time of one step, in seconds.
            log: file for what it complains of.
        """
        self._limit, self._log = limit, log
        self._what = f"{way.title}, {task.part} of {task.shape}"
        cores = sorted(os.sched_getaffinity(0)) if task.site["place"] == LOCAL else None
        document = asdict(task) | {"cores": cores}
        with log.open("wb") as stderr:
            self._process = bed.start(
                "client",
                [sys.executable, "-m", "benchmarks.models.program", json.dumps(document)],
                env=way_environment(way, peers, task.site["token"], len(cores or (0,))),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    def await_ready(self) -> None:
        """Wait until it is ready.

        Raises:
            TransportError: it ended, or took too long.
        """
        self.answer()

    def begin(self, **step: Any) -> None:
        """Begin a step."""
        stdin = self._process.stdin
        if stdin is None:
            raise TransportError(f"{self._what}: the client has no pipes; this is a defect of hapi")
        try:
            stdin.write(json.dumps(step) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why

    def answer(self) -> dict[str, Any]:
        """Return the answer to a step.

        Raises:
            TransportError: the process ended, or took too long; it is stopped.
        """
        line = read_line(self._process, self._limit)
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        late = self._process.poll() is None
        self.stop()
        why = (
            f"took longer than {self._limit:g} s"
            if late
            else last_line(self._log.read_text(errors="replace"))
        )
        raise TransportError(f"{self._what}: {why}")

    def stop(self) -> None:
        """End the process."""
        stop_all([self._process])


def way_environment(way: Way, peers: Sequence[Path], token: str = "", threads: int = 1) -> Mapping[str, str]:
    """Return the environment of a process of ``way``.

    Args:
        way: whose packages it imports.
        peers: folders with packages of other ways.
        token: of the server.
        threads: that PyTorch may use.
    """
    found = environment(token) | {"OMP_NUM_THREADS": str(threads)}
    if way.peer:
        found["PYTHONPATH"] = os.pathsep.join([*map(str, peers), found["PYTHONPATH"]])
    return found


def why_missing(way: Way, peers: Sequence[Path]) -> str | None:
    """Return why ``way`` cannot be used here; None if it can."""
    if not way.needs:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", way.needs],
            capture_output=True, text=True, check=False, timeout=120, env=way_environment(way, peers),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HapiError(f"{way.title}: Python does not answer: {error}") from error
    return last_line(done.stderr) if done.returncode else None
