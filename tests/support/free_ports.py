"""A port that nothing listens on."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A free port of the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
