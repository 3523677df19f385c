"""A test bed of several servers: a network namespace and a link for each, one more for all trainers, and a switch.

Every server sends over a link of its own, and the switch sends to the trainers over another one, which all answers
share. Connections share each of them fairly (:mod:`benchmarks.fleet.fair_link`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.fleet.fair_link import PORTS, fair_link
from benchmarks.testbed.bed import Bed, Side
from benchmarks.testbed.testbed import bed_name, piece_size, remove, remove_stale_beds, tool, why_not
from hapi.errors import UsageError

_NETWORK = "10.201.0"
_TRAINERS = 250
"""Last part of the trainers' address; servers have 1 and up."""
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


class FleetBed(Bed):
    """Namespaces for ``servers``; :attr:`number` says which one is started next."""

    def __init__(self, servers: int) -> None:
        """Links have no limit before :meth:`set_link`."""
        super().__init__(None, None)
        self.number = 0
        self._switch = bed_name("client-switch")
        self._trainers = bed_name("client")
        self._servers = [bed_name(f"server-{number}") for number in range(servers)]

    @property
    def address(self) -> str:
        """Address of the server that is started next."""
        return f"{_NETWORK}.{self.number + 1}"

    def set_bandwidth(self, bandwidth: float | None) -> None:
        """Set the rate, in bits per second, of the link that all answers share; None for no limit."""
        self._limit(self._switch, "trainers", bandwidth, 1 << (len(self._servers) - 1).bit_length())
        self.bandwidth = bandwidth

    def set_link(self, number: int, bandwidth: float | None) -> None:
        """Set the rate of the link of server ``number``, in bits per second; None for no limit."""
        self._limit(self._servers[number], "hapi", bandwidth, 1)

    def sent_bytes(self) -> list[int]:
        """Bytes that each server's link has carried so far, headers included; at the end those of the shared link."""
        ends = [*((name, "hapi") for name in self._servers), (self._switch, "trainers")]
        counter = "/sys/class/net/{}/statistics/tx_bytes"
        return [
            int(tool("ip", "netns", "exec", name, "cat", counter.format(device))) for name, device in ends
        ]

    @staticmethod
    def _limit(namespace: str, device: str, bandwidth: float | None, servers: int) -> None:
        change = ("ip", "netns", "exec", namespace, "tc")
        # A device that has no queue answers with an error that means just that.
        tool(*change, "qdisc", "del", "dev", device, "root", check=False)
        if bandwidth is not None:
            tool(*change, "-batch", "-", text=fair_link(device, bandwidth, servers))

    def describe(self) -> str:
        """The bed in one line, for the conditions of a measurement."""
        return (
            f"{len(self._servers)} servers' network namespaces and one of all trainers, a bridge between them, tc htb "
            "with a queue for each connection behind each server and before the trainers, "
            f"{_CONGESTION.read_text().strip()}; all processes share the machine's cores"
        )

    def _placed(self, side: Side, command: Sequence[str]) -> list[str]:
        namespace = self._servers[self.number] if side == "server" else self._trainers
        return ["ip", "netns", "exec", namespace, *command]

    def _started(self, side: Side, pid: int) -> None:
        """Adjust nothing."""

    def _build(self) -> None:
        reason = why_not()
        if reason is not None:
            raise UsageError(f"no test bed on this machine: {reason}")
        remove_stale_beds()
        for name in (self._switch, self._trainers, *self._servers):
            tool("ip", "netns", "add", name)
        tool("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        tool("ip", "-n", self._switch, "link", "set", "bridge", "up")
        self._connect(self._trainers, "trainers", _TRAINERS)
        ports = f"{PORTS.start} {PORTS.stop - 1}\n"
        tool("ip", "netns", "exec", self._trainers, "tee", _PORT_RANGE, text=ports)
        for number, name in enumerate(self._servers):
            self._connect(name, f"server{number}", number + 1)

    def _connect(self, namespace: str, port: str, number: int) -> None:
        """Join a namespace to the switch."""
        switch = ("ip", "-n", self._switch)
        inside = ("ip", "-n", namespace)
        ends = (["hapi", "netns", namespace], [port, "netns", self._switch])
        tool("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        tool(*switch, "link", "set", port, "gso_max_size", piece_size(), "master", "bridge")
        tool(*switch, "link", "set", port, "up")
        tool(*inside, "link", "set", "hapi", "gso_max_size", piece_size())
        tool(*inside, "addr", "add", f"{_NETWORK}.{number}/24", "dev", "hapi")
        tool(*inside, "link", "set", "hapi", "up")
        tool(*inside, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in (*self._servers, self._trainers, self._switch):
            remove(name)
