"""Common parts of both kinds of test bed: processes on the cores of their tier, which end with the bed.

They end also after Ctrl-C, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal, Self

from benchmarks.testbed.signals import ended_in_order, no_interrupts
from hapi.errors import UsageError

Side = Literal["server", "client"]
SIDES: tuple[Side, Side] = ("server", "client")
_STOP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The processor cores that each tier may use."""

    server: tuple[int, ...] = (0,)
    client: tuple[int, ...] = (1,)

    @classmethod
    def split_machine(cls) -> Self:
        """The first and the second half of the cores that this process may use; one each on two cores."""
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            raise UsageError(
                "the test bed needs two processor cores, one for each tier; this machine lends one"
            )
        half = len(usable) // 2
        return cls(server=tuple(usable[:half]), client=tuple(usable[half : 2 * half]))

    def __str__(self) -> str:
        return f"server on cores {self.server}, client on {self.client}"


class Bed(ABC):
    """Two tiers for the length of a ``with`` block."""

    def __init__(self, bandwidth: float | None, cores: Cores | None) -> None:
        """``bandwidth`` in bits per second, None for no limit; ``cores``: None where both tiers share all."""
        self.bandwidth = bandwidth
        self.cores = cores
        self._processes: list[subprocess.Popen[Any]] = []
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Make the bed; :class:`UsageError` when this machine cannot."""
        self._signals.enter_context(ended_in_order())
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    @property
    @abstractmethod
    def address(self) -> str:
        """The address of the server's side."""

    @abstractmethod
    def set_bandwidth(self, bandwidth: float | None) -> None:
        """Change the bandwidth (bits per second) at once, also under running transfers; None for no limit."""

    @abstractmethod
    def describe(self) -> str:
        """The bed in one line, for the conditions of a measurement; the bandwidth may change and is not in it."""

    @abstractmethod
    def _build(self) -> None:
        """Make what processes are placed in."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove it, after all processes have ended."""

    def _placed(self, side: Side, command: Sequence[str]) -> list[str]:
        """``command`` as it is run on ``side``."""
        return list(command)

    @abstractmethod
    def _started(self, side: Side, pid: int) -> None:
        """A process of ``side`` has begun."""

    def start(
        self,
        side: Side,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Start ``command`` on its place of ``side`` and on its cores; it is stopped with the bed."""
        process = subprocess.Popen(
            self._placed(side, command),
            env=None if env is None else dict(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the others in order
        )
        self._processes.append(process)
        self._started(side, process.pid)
        return process

    def _tear_down(self) -> None:
        with no_interrupts():
            stop_all(self._processes)
            self._processes.clear()
            self._remove()
        self._signals.close()


def stop_all(processes: Sequence[subprocess.Popen[Any]]) -> None:
    """Ask these processes to stop (SIGTERM), and after a few seconds make them; pipes are closed."""
    running = [p for p in processes if p.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for process in processes:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
