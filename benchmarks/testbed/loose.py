"""Two tiers where no test bed can be made: processes on cores of their own, and a link that the clients keep to.

Without root there are no network namespaces. The two tiers then talk over the loopback, and the client's transport
reads no faster than the chosen bandwidth (:mod:`benchmarks.testbed.limited`). Good for trying things out; what was
measured this way says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.testbed.bed import Bed, Cores, Side
from benchmarks.testbed.testbed import TestBed, why_not
from hapi.errors import UsageError


class LooseBed(Bed):
    """A :class:`benchmarks.testbed.testbed.TestBed` without its link, for the length of a ``with`` block.

    Its processes are stopped on the way out as there, also after SIGTERM and SIGHUP.
    """

    address = "127.0.0.1"

    def __init__(self, reason: str) -> None:
        """``reason``: why it is not a test bed, for the conditions."""
        super().__init__(None, _cores())
        self._reason = reason
        self._links: list[Callable[[float | None], None]] = []

    def limit_with(self, link: Callable[[float | None], None]) -> None:
        """``link`` sets the rate of a client's transport; it is told the present one, and each that follows."""
        self._links.append(link)
        link(self.bandwidth)

    def set_bandwidth(self, bandwidth: float | None) -> None:
        """Change the bandwidth (bits per second, from server to client) of every client; None for no limit."""
        self.bandwidth = bandwidth
        for link in self._links:
            link(bandwidth)

    def describe(self) -> str:
        """Describe it in one line, for the conditions of a measurement."""
        cores = "" if self.cores is None else f"; {self.cores}"
        return f"no test bed ({self._reason}): loopback, the client's transport limits the rate{cores}"

    def _started(self, side: Side, pid: int) -> None:
        if self.cores is not None:
            os.sched_setaffinity(pid, getattr(self.cores, side))  # its threads come later and inherit it

    def _build(self) -> None:
        """Do nothing: nothing is needed."""

    def _remove(self) -> None:
        self._links.clear()


def _cores() -> Cores | None:
    """Each tier's half of the machine; None where both share what there is."""
    try:
        return Cores.split_machine() if hasattr(os, "sched_setaffinity") else None
    except UsageError:  # one core
        return None


def choose_bed(no_bed: bool = False) -> Bed:
    """The test bed, or without one (``no_bed``, or where it cannot be made) the loose one; to be entered."""
    reason = "not wanted" if no_bed else why_not()
    return TestBed(cores=Cores.split_machine()) if reason is None else LooseBed(reason)
