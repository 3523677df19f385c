"""Clients of a server that wants no token: programs of this machine, and pages that it served itself.

A web page from anywhere can make a browser on this machine send requests to loopback addresses, also under a
name of its own that it lets point there later (DNS rebinding). The browser then sends that name in ``Host``,
and the page's own origin in ``Origin``. A tunnel (``ssh -L``) keeps ``localhost`` in both.
"""

from __future__ import annotations

import ipaddress
import re

from hapi.errors import ForbiddenError

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/@\[\]]+))(?::[0-9]*)?")
_REMEDY = "ask it as localhost or 127.0.0.1, or give the server a token (HAPI_TOKEN, --token-file)"


def check_origin(host: str | None, origin: str | None) -> None:
    """Refuse a request by its headers ``Host`` and ``Origin``, where there is one.

    Raises:
        ForbiddenError: the host is not this machine's loopback, or the origin is another than the host.
    """
    if host is not None and not is_loopback(host):
        raise ForbiddenError(
            f"a server without a token answers to loopback addresses only, not to the host {host[:80]!r}; {_REMEDY}"
        )
    if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
        raise ForbiddenError(
            f"a server without a token answers to its own pages only, not to those of {origin[:80]!r}; {_REMEDY}"
        )


def is_loopback(host: str) -> bool:
    """Return whether a ``Host`` header (with or without a port) names this machine's loopback."""
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match.group(1) or match.group(2)
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
