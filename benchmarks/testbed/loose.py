"""Two tiers where no test bed can be made: processes on cores of their own, and a link that the clients keep to.

Without root there are no network namespaces. The two tiers then talk over the loopback, and the client's transport
reads no faster than the chosen bandwidth (:mod:`benchmarks.testbed.limited`). Good for trying things out; what was
measured this way says so.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.testbed.signals import ended_in_order, no_interrupts
from benchmarks.testbed.testbed import Cores, Side, TestBed, stop_all, why_not
from hapi.errors import UsageError


class LooseBed:
    """What :class:`benchmarks.testbed.testbed.TestBed` is, without its link, for the length of a ``with`` block.

    Its processes are stopped on the way out as there, also after SIGTERM and SIGHUP.
    """

    address = "127.0.0.1"

    def __init__(self, reason: str) -> None:
        """``reason``: why it is not a test bed, for the conditions."""
        self.bandwidth: float | None = None
        self._reason = reason
        self._cores = _cores()
        self._processes: list[subprocess.Popen[Any]] = []
        self._links: list[Callable[[float | None], None]] = []
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._signals.enter_context(ended_in_order())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with no_interrupts():
            stop_all(self._processes)
            self._processes.clear()
            self._links.clear()
        self._signals.close()

    def limit_with(self, link: Callable[[float | None], None]) -> None:
        """``link`` sets the rate of a client's transport; it is told the present one, and each that follows."""
        self._links.append(link)
        link(self.bandwidth)

    def set_bandwidth(self, bandwidth: float | None) -> None:
        """Change the bandwidth (bits per second, from server to client) of every client; None for no limit."""
        self.bandwidth = bandwidth
        for link in self._links:
            link(bandwidth)

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
        """Start ``command`` on the cores of ``side``; it is stopped with the bed."""
        process = subprocess.Popen(
            list(command),
            env=None if env is None else dict(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the others in order
        )
        self._processes.append(process)
        if self._cores is not None:
            os.sched_setaffinity(
                process.pid, getattr(self._cores, side)
            )  # its threads come later and inherit it
        return process

    def describe(self) -> str:
        """In one line, for the conditions of a measurement."""
        cores = (
            ""
            if self._cores is None
            else f"; server on cores {self._cores.server}, client on {self._cores.client}"
        )
        return f"no test bed ({self._reason}): loopback, the client's transport limits the rate{cores}"


def _cores() -> Cores | None:
    """Each tier's half of the machine; None where both share what there is."""
    try:
        return Cores.split_machine() if hasattr(os, "sched_setaffinity") else None
    except UsageError:  # one core
        return None


Bed = TestBed | LooseBed


def choose_bed(no_bed: bool = False) -> Bed:
    """The test bed, or without one (``no_bed``, or where it cannot be made) the loose one; to be entered."""
    reason = "not wanted" if no_bed else why_not()
    return TestBed(cores=Cores.split_machine()) if reason is None else LooseBed(reason)
