"""Processes of the benchmark ``offload`` as their parent sees them, and the control group that bounds one."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.offload.program import TrainTask
from benchmarks.testbed.bed import stop_all
from benchmarks.testbed.tiers import environment, last_line, read_line
from hapi.errors import TransportError

_VERSION_1, _VERSION_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_ENDING_SECONDS = 2.0
ADDRESS_SPACE = "RLIMIT_AS, which counts addresses: models are smaller than memory would allow"


class TrainingClient:
    """A process of :mod:`benchmarks.offload.program`."""

    def __init__(
        self, task: TrainTask, log: Path, limit: float, threads: int, cap: Cap | None = None
    ) -> None:
        """Start it.

        Args:
            task: what it trains.
            log: file for what it complains of.
            limit: longest time of an answer, in seconds.
            threads: of torch.
            cap: bound of its memory.
        """
        self._limit, self._log = limit, log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.offload.program", json.dumps(asdict(task))],
                env=environment("") | {"OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                preexec_fn=None if cap is None else cap.enter,
            )  # fmt: skip

    def call(self, **order: Any) -> dict[str, Any]:
        """Return the answer to an order.

        Raises:
            TransportError: the process ended, or took too long; it is stopped.
        """
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
        line = read_line(self._process, self._limit)
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        try:
            ended = self._process.wait(_ENDING_SECONDS)  # its output closes before it is gone
        except subprocess.TimeoutExpired:
            self._kill()
            raise TransportError(f"it took longer than {self._limit:g} s") from None
        if ended == -signal.SIGKILL:
            raise TransportError("it was killed, as the system does where memory ends")
        raise TransportError(f"it ended: {last_line(self._log.read_text(errors='replace'))}")

    def stop(self) -> None:
        """Let it remove its files, and end it."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _kill(self) -> None:
        stop_all([self._process])


class Cap:
    """A bound of the memory of processes."""

    def __init__(self, folder: Path | None, nbytes: int) -> None:
        """Bound by the control group at ``folder``; by the address space without one."""
        self._folder, self._bytes = folder, nbytes

    @property
    def how(self) -> str:
        """Name of what bounds the memory."""
        return ADDRESS_SPACE if self._folder is None else "a control group of memory"

    def enter(self) -> None:
        """Put this process under the bound; called between fork and exec."""
        if self._folder is None:
            resource.setrlimit(resource.RLIMIT_AS, (self._bytes, self._bytes))
        else:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


@contextlib.contextmanager
def memory_cap(nbytes: int) -> Iterator[Cap]:
    """Yield a bound of ``nbytes``: a control group (version 1 or 2) where this user may make one."""
    name = f"hapi-offload-{os.getpid()}"
    for root, limit in ((_VERSION_1, "memory.limit_in_bytes"), (_VERSION_2, "memory.max")):
        folder = root / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if not _bounded(folder / limit, nbytes):
                continue
            yield Cap(folder, nbytes)
            return
        finally:
            _remove(folder)
    yield Cap(None, nbytes)


def _bounded(file: Path, nbytes: int) -> bool:
    try:
        if not file.exists():
            return False
        file.write_text(str(nbytes), encoding="ascii")
    except OSError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Remove a control group once its processes are gone."""
    for _ in range(100):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
