"""Bytes that this process reads, as the kernel counts them, whoever asks for them."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` in Linux's ``struct tcp_info`` (since 4.1)."""


@dataclass(frozen=True)
class Counted:
    """Bytes that were read so far."""

    read: int
    """From files by system calls (``rchar``); pages of mapped files do not count."""
    disk: int
    """From disks (``read_bytes``)."""
    received: dict[int, int] = field(default_factory=dict)
    """Over each open TCP connection, by its inode."""

    @classmethod
    def now(cls) -> Counted:
        """Return the counts of this moment."""
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        found = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        return cls(found["rchar"], found["read_bytes"], _received())

    def since(self, before: Counted) -> dict[str, int]:
        """Return the bytes that came after ``before``; those of connections that were closed meanwhile are lost."""
        network = sum(count - before.received.get(inode, 0) for inode, count in self.received.items())
        return {"read": self.read - before.read, "disk": self.disk - before.disk, "network": network}


def _received() -> dict[int, int]:
    """Bytes that came over each open TCP connection, by its inode."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with (
            suppress(OSError),
            _socket_of(int(link.name)) as held,
        ):  # closed since the listing, no socket, or not TCP
            info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
            if len(info) == _BYTES_RECEIVED + 8:
                (found[os.fstat(held.fileno()).st_ino],) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
    return found


def _socket_of(number: int) -> socket.socket:
    """A second descriptor of socket ``number``; OSError if it is none."""
    descriptor = os.dup(number)
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
