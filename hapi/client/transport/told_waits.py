"""Waits that servers tell a job when it connects: how crowded they are before it has asked for anything."""

from __future__ import annotations

from typing import Any

from hapi.client.transport.server_pool import ServerPool
from hapi.errors import HapiError
from hapi.process.threads import Threads
from hapi.wire.messages import VERSION_PATH
from hapi.wire.transport.base import Transport

MOST_ASKED = 16
"""Servers that are asked at once: they tell enough of a larger fleet."""
_LONGEST = 3600.0
"""Seconds that a server may tell."""


def told_waits(servers: ServerPool) -> list[float]:
    """Return the seconds that each request of a new job would wait, of each server that tells them.

    Servers of the version before tell nothing, and one that does not answer has no part in the first plan.
    """
    urls = servers.urls[:MOST_ASKED]
    threads = Threads(len(urls), "hapi-told-waits")
    try:
        asked = [threads.submit(_reported, servers, url) for url in urls]
        return [wait for work in asked if (wait := work.result()) is not None]
    finally:
        threads.close()


def _reported(servers: ServerPool, url: str) -> float | None:
    try:
        answer = servers.run(_version, only=url, once=True)
    except HapiError:
        return None
    wait = answer.get("wait") if isinstance(answer, dict) else None
    if isinstance(wait, bool) or not isinstance(wait, int | float):
        return None
    return float(min(max(wait, 0.0), _LONGEST))


def _version(server: Transport) -> Any:
    return server.call("GET", VERSION_PATH)
