"""Two tiers on one machine: a network namespace and a processor core each, and a link of a chosen bandwidth.

The link is a veth pair with a token bucket (``tc tbf``) on both ends, so each direction has the bandwidth.
Needs Linux, root, iproute2 (``ip``, ``tc``) and util-linux (``taskset``). Everything it makes carries the
process id in its name, so that what a killed run left behind is found and removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence

from benchmarks.testbed.bed import SIDES, Bed, Cores, Side
from hapi.errors import UsageError

ADDRESS: Mapping[Side, str] = {"server": "10.200.0.1", "client": "10.200.0.2"}
"""Addresses of the two ends; the namespaces see nothing else, so they cannot collide with real networks."""

_NAME = re.compile(r"hapi-bed-(\d+)-(?:server|client)[a-z0-9-]*")
_COMMAND_SECONDS = 20.0
_BURST_SECONDS = 0.002
"""Traffic that may pass at line speed before the bucket is empty."""
PIECE_BYTES, _SMALLEST_BURST = 16 << 10, 20 << 10
"""Bytes that TCP hands down in one piece (64 KiB elsewhere), and the bucket's smallest capacity.

The bucket counts a piece with the headers of all its packets. One that holds less cuts it into packets of
1500 bytes with a timer for each, which takes 55 microseconds of the sender's core in a virtual machine. With
larger pieces the link would come in gusts.
"""
_QUEUE_SECONDS = 0.05
"""Longest wait in the bucket's queue; the buffer of an ordinary switch."""


def why_not() -> str | None:
    """Return the reason why a test bed cannot be made here; None when it can."""
    if not hasattr(os, "sched_getaffinity") or not os.path.exists("/proc/self/ns/net"):  # noqa: PTH110
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root; run it with sudo or in a privileged container"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is missing; install {package}"
    if len(os.sched_getaffinity(0)) < 2:
        return "two processor cores are needed, one for each tier"
    return None


class TestBed(Bed):
    """The two namespaces and their link. One bed per process at a time."""

    __test__ = False  # not a test class, whatever its name makes pytest think

    def __init__(self, bandwidth: float | None = None, cores: Cores | None = None) -> None:
        """``bandwidth`` in bits per second each way, None for as fast as the machine can."""
        super().__init__(bandwidth, cores)
        self._namespaces: dict[Side, str] = {side: bed_name(side) for side in SIDES}

    @property
    def address(self) -> str:
        """Address of the server's side."""
        return ADDRESS["server"]

    def set_bandwidth(self, bandwidth: float | None) -> None:
        """Change the bandwidth (bits per second, each way) at once, also under running transfers."""
        for side in SIDES:
            change = ("ip", "netns", "exec", self._namespaces[side], "tc", "qdisc")
            root = ("dev", _device(side), "root")
            if bandwidth is None:
                # A device that has no bucket answers with an error that means just that.
                tool(*change, "del", *root, check=False)
                continue
            tool(*change, "replace", *root, *bucket(bandwidth))
        self.bandwidth = bandwidth

    def _placed(self, side: Side, command: Sequence[str]) -> list[str]:
        if self.cores is None:
            raise UsageError("the test bed is not made yet; use it in a with block")
        cores = ",".join(str(core) for core in getattr(self.cores, side))
        # taskset and ip both exec, so the process that is returned is the command itself.
        return ["taskset", "-c", cores, "ip", "netns", "exec", self._namespaces[side], *command]

    def _started(self, side: Side, pid: int) -> None:
        """Adjust nothing: the process is pinned already."""

    def describe(self) -> str:
        """The bed in one line, for the conditions of a measurement; the bandwidth may change and is not in it."""
        cores = "" if self.cores is None else f"; {self.cores}"
        return f"two network namespaces, veth with tc tbf on both ends{cores}"

    def _build(self) -> None:
        reason = why_not()
        if reason is not None:
            raise UsageError(f"no test bed on this machine: {reason}")
        if self.cores is None:
            self.cores = Cores.split_machine()
        remove_stale_beds()
        for side in SIDES:
            tool("ip", "netns", "add", self._namespaces[side])
        ends = []
        for side in SIDES:
            ends.append([_device(side), "netns", self._namespaces[side]])
        tool("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for side in SIDES:
            inside = ("ip", "-n", self._namespaces[side])
            tool(*inside, "link", "set", _device(side), "gso_max_size", piece_size())
            tool(*inside, "addr", "add", f"{ADDRESS[side]}/24", "dev", _device(side))
            tool(*inside, "link", "set", _device(side), "up")
            tool(*inside, "link", "set", "lo", "up")
        if self.bandwidth is not None:
            self.set_bandwidth(self.bandwidth)

    def _remove(self) -> None:
        for name in self._namespaces.values():
            remove(name)


def bed_name(end: str) -> str:
    """Return the name of a namespace of this process's bed; ``end`` begins with ``server`` or ``client``."""
    return f"hapi-bed-{os.getpid()}-{end}"


def piece_size() -> str:
    """Return the bytes that TCP hands down in one piece, as ``ip`` reads them."""
    return str(PIECE_BYTES)


def bucket(bandwidth: float) -> tuple[str, ...]:
    """Return the words of ``tc`` for a token bucket of this rate, in bits per second."""
    burst, limit = bucket_sizes(bandwidth)
    return ("tbf", "rate", f"{int(bandwidth)}bit", "burst", str(burst), "limit", str(limit))


def bucket_sizes(bandwidth: float) -> tuple[int, int]:
    """Return the bytes that a bucket of this rate, in bits per second, holds, and those that its queue does."""
    burst = max(_SMALLEST_BURST, int(bandwidth / 8 * _BURST_SECONDS))
    return burst, burst + int(bandwidth / 8 * _QUEUE_SECONDS)


def beds() -> list[str]:
    """Names of all namespaces that test beds made and that still exist."""
    listed = tool("ip", "netns", "list").split("\n")
    return [line.split()[0] for line in listed if line and _NAME.fullmatch(line.split()[0])]


def remove_stale_beds() -> None:
    """Remove what beds of processes that no longer run left behind: their processes, links and namespaces."""
    for name in beds():
        match = _NAME.fullmatch(name)
        if match is not None and not _is_running(int(match[1])):
            remove(name)


def remove(namespace: str) -> None:
    """Stop what still runs in ``namespace`` and delete it; the veth pair goes with it."""
    if namespace not in beds():
        return
    for pid in tool("ip", "netns", "pids", namespace, check=False).split():
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(pid), signal.SIGKILL)
    tool("ip", "netns", "del", namespace, check=False)
    if namespace in beds():  # another process may have removed it at the same moment, which is as good
        raise UsageError(
            f"test bed: cannot remove the network namespace {namespace}; try: ip netns del {namespace}"
        )


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _device(side: Side) -> str:
    return f"hapi-{side}"


def tool(*command: str, check: bool = True, text: str | None = None) -> str:
    """Output of a short system command that reads ``text``; :class:`UsageError` with its own words when it fails."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"test bed: {' '.join(command)}: {error}") from error
    if check and done.returncode != 0:
        raise UsageError(f"test bed: {' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout
