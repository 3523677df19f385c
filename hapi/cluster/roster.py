"""List of a fleet's servers, as they report themselves. Told the time."""

from __future__ import annotations

KEPT_SECONDS = 10.0
"""Seconds after its last report in which a server is listed."""


class Roster:
    """URLs by server; those that report no more, or that they leave, are left out."""

    def __init__(self) -> None:
        self._servers: dict[str, tuple[str, float]] = {}

    def report(self, server: str, url: str | None, now: float) -> None:
        """Note that ``server`` takes work at ``url``; None: it leaves."""
        self._servers.pop(server, None)
        if url is not None:
            self._servers[server] = url, now

    def urls(self, now: float) -> list[str]:
        """Return the URLs in the order of their names, each once."""
        self._servers = {s: (u, at) for s, (u, at) in self._servers.items() if now - at < KEPT_SECONDS}
        return sorted({url for url, _ in self._servers.values()})
