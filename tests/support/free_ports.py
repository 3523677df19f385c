"""Ports for processes that are started a while later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A free port of the loopback that the system gives to nobody: it is not of those for outgoing connections."""
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    chance = random.Random()
    while True:
        port = chance.randrange(20_000, max(first, 30_000))  # below are those of Ray
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
