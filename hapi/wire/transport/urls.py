"""Connection settings from a person: a server's URL, a token, a certificate authority. Checked before any
request.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from hapi.errors import UsageError
from hapi.paths import open_file


@dataclass(frozen=True)
class Address:
    """The parts of a server's URL."""

    scheme: str
    host: str
    port: int
    base: str
    """Path in front of every request's own, without a slash at its end."""

    def at(self, host: str) -> str:
        """Return the URL with another host, or an address, in the form of :func:`canonical_url`."""
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}{self.base}"


def parse_url(url: str) -> Address:
    """Return the parts of ``url``; :class:`UsageError` when it is not a server's URL."""
    hint = UsageError(f"server URL {url!r}: expected http://HOST:PORT or https://HOST:PORT")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise hint
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode("ascii")
    except ValueError:  # a port that is no number, brackets that do not close, a label without letters
        raise hint from None
    if parts.username or parts.password:
        raise UsageError(f"server URL at {host!r}: no user or password in it; use a token (--token-file)")
    if parts.scheme not in ("http", "https") or not host or port == 0 or parts.query or parts.fragment:
        raise hint
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme, host, port, parts.path.rstrip("/"))


def canonical_url(url: str) -> str:
    """Return ``url`` as every side writes it: lower case, with its port, without a slash at its end.

    Raises:
        UsageError: it is not a server's URL.
    """
    address = parse_url(url)
    return address.at(address.host)


def is_loopback(url: str) -> bool:
    """Return whether ``url`` leads to this machine alone; False for what is no URL of a server."""
    try:
        host = parse_url(url).host
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except (UsageError, ValueError):
        return False


def bearer(token: str | None) -> dict[str, str]:
    """Return the header that carries ``token``, nothing without one; :class:`UsageError` when a header cannot
    hold it.
    """
    if not token:
        return {}
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("the token (--token-file or HAPI_TOKEN): expected printable ASCII without spaces")
    return {"Authorization": f"Bearer {token}"}


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, or the one in ``ca_file`` alone."""
    try:
        if ca_file is not None:
            open_file(ca_file).close()
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # also ssl.SSLError
        reason = error.strerror if not isinstance(error, ssl.SSLError) else "no certificate in it"
        raise UsageError(f"--ca-file {ca_file}: cannot be read: {reason or error}") from None


def pinned_context(certificate: str) -> ssl.SSLContext:
    """Return a context that trusts the servers with the certificates in a file alone, whoever has signed them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except OSError as error:  # also ssl.SSLError
        raise UsageError(f"certificate {certificate}: cannot be read: {error}") from None
    return context
