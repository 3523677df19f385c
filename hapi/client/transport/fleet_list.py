"""The list of a fleet's servers, asked for by its address: ``fleet+http://HEAD:8000`` stands for all of them.

:mod:`hapi.cluster.ray_serve` answers with it, and so may anything that answers GET with ``{"servers": [URL, ...]}``.
"""

from __future__ import annotations

from itertools import islice

from hapi.errors import BadRequestError, HapiError, NotFoundError
from hapi.wire.transport.http import HttpTransport
from hapi.wire.transport.slow_server import AnswerLimits
from hapi.wire.transport.urls import canonical_url

MOST_SERVERS = 4096
_LONGEST_URL = 2048
_PREFIX = "fleet+"


def list_address(server: str) -> str | None:
    """Return the address of the list that ``server`` stands for; None for a server's own URL."""
    return server.removeprefix(_PREFIX) if server.startswith(_PREFIX) else None


def listed_servers(url: str, *, ca_file: str | None = None, timeout: float = 10.0) -> list[str]:
    """Return the URLs of the servers that take work, asked from the fleet at ``url``.

    Args:
        url: address of the list.
        ca_file: authority to trust if that is https; the servers may be where it is not.
        timeout: seconds for the answer.

    Raises:
        NotFoundError: there is none now.
        HapiError: nothing answers, or something else than a list of servers.
    """
    trusted = ca_file if url.startswith("https:") else None
    transport = HttpTransport(
        url, ca_file=trusted, timeout=timeout, answer_limits=AnswerLimits.within(timeout, " (--timeout)")
    )
    try:
        document = transport.call("GET", "/")
        found = [_url(one) for one in islice(document["servers"], MOST_SERVERS)]
    except (HapiError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, HapiError) and error.retryable:
            raise
        raise BadRequestError(
            f"{url}: answers with no list of servers; is it the address of a fleet?"
        ) from None
    finally:
        transport.close()
    if not found:
        raise NotFoundError(
            f"{url}: no server of the fleet takes work now (under Ray 'serve status' tells why)"
        )
    return found


def _url(listed: str) -> str:
    if len(listed) > _LONGEST_URL:
        raise BadRequestError("a URL is too long")
    return canonical_url(listed)
