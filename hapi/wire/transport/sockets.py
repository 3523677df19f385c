"""Questions and commands to the sockets of connections that another thread uses."""

from __future__ import annotations

import contextlib
import socket
import struct

_BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` in Linux's ``struct tcp_info`` (since 4.1)."""


def received_bytes(sock: socket.socket) -> int | None:
    """Bytes that the kernel has received for a connection, read or not; None where it does not say."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    except (OSError, AttributeError):  # not Linux
        return None
    if len(info) < _BYTES_RECEIVED + 8:
        return None
    (count,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED)
    return int(count)


def shut(sock: socket.socket | None) -> None:
    """End the talk under a thread that may be blocked in it; that thread wakes up and closes the connection."""
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
