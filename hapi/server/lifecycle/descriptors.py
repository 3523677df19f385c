"""File descriptors: as many as the system lets this process have, shared out between connections and the rest."""

from __future__ import annotations

import contextlib
import resource

from hapi.errors import UsageError
from hapi.server.http.connections import HEALTH_RESERVE, ConnectionLimits
from hapi.server.settings import ServiceSettings

MOST_CONNECTIONS = 4096
"""Connections by default, however many descriptors there are: each takes some 20 KB of memory."""
LEAST_CONNECTIONS = 16
KEPT = 64
"""Descriptors that connections never take: the store, the log, libraries, the event loop."""
KEPT_FOR_A_SLOT = 8
"""Descriptors of a request at work: the duplicate of its socket, and files or connections of the store."""
KEPT_FOR_A_DECODER = 4
"""Pipes of a decoding process."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one, as far as the system lets us; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems refuse an unlimited one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """The soft limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def connection_limits(settings: ServiceSettings, slots: int, descriptors: int) -> ConnectionLimits:
    """Return the limits of a server's connections.

    Args:
        settings: what the operator asks for, if anything.
        slots: requests that may be at work at a time.
        descriptors: the limit of open files.

    Raises:
        UsageError: more connections are asked for than there are descriptors.
    """
    kept = (
        KEPT + KEPT_FOR_A_SLOT * (slots + 1) + KEPT_FOR_A_DECODER * settings.decode_processes + HEALTH_RESERVE
    )
    total = settings.max_connections
    if total is None:
        total = max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, descriptors - kept))
    elif total + kept > descriptors:
        raise UsageError(
            f"--max-connections {total} needs {total + kept} file descriptors, and {descriptors} are allowed; "
            "raise the limit (ulimit -n, LimitNOFILE=), or give fewer connections"
        )
    per_address = settings.max_connections_per_address or max(1, total // 2)
    return ConnectionLimits(total=total, per_address=min(per_address, total))
