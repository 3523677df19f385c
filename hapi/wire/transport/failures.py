"""Mapping of a connection's failures to one line with its remedy. Errors of sockets, TLS and HTTP end here."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl

from hapi.errors import HapiError, TransportError, UsageError, WireError
from hapi.text import printable
from hapi.wire.transport.slow_server import SlowAnswerError
from hapi.wire.transport.urls import Address

PROBE_SECONDS = 2.0
"""Longest time for finding out whether a port speaks TLS."""
_EXPIRED, _NOT_YET, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 62, 64
"""Some of OpenSSL's ``X509_V_ERR`` codes."""
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
"""OpenSSL's reasons when what answers is no TLS."""
_TLS_ALERT = "\x15\x03"
"""Begin of a server's complaint about a request without TLS."""


def connection_error(error: Exception, url: str, address: Address, *, new: bool) -> HapiError:
    """Return the error to raise for ``error``, which an exchange at ``url`` met.

    Args:
        error: of a socket, of TLS or of HTTP.
        url: the request's, for the message.
        address: of the server.
        new: no answer there has been HTTP yet, so the server may speak TLS.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return UsageError(f"{url}: {_certificate(error, address.host)}")
    if isinstance(error, ssl.SSLError) and error.reason in _PLAIN:
        return UsageError(f"{url}: speaks no TLS there; write http:// if it is a server without TLS")
    if new and address.scheme == "http" and _answers_tls(error, address):
        return UsageError(
            f"{url}: speaks TLS there; write https://, and give --ca-file for an authority of your own"
        )
    if isinstance(error, http.client.HTTPException) and not isinstance(
        error, http.client.IncompleteRead | http.client.RemoteDisconnected
    ):
        reason = f"{type(error).__name__} {error}".strip()
        return WireError(
            f"{url}: what answers there does not speak HTTP/1.1 ({printable(reason)}); is this a hapi-server?"
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return TransportError(
            f"{url}: no connection, as too many files are open on this side; raise its limit (ulimit -n), or lower "
            "--in-flight"
        )
    if isinstance(error, SlowAnswerError):
        return TransportError(f"{url}: {error}; is the server or the link overloaded?")
    return TransportError(f"{url}: {_reason(error)}; is the server running and reachable?")


def _certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        return (
            f"its certificate is for another name than {host!r}; write the URL with the name in it, or give the "
            "server a certificate for this one"
        )
    if error.verify_code == _EXPIRED:
        return "its certificate has expired; renew it on the server, or set this machine's clock if that is wrong"
    if error.verify_code == _NOT_YET:
        return "its certificate is not valid yet; compare the clocks of both machines"
    return f"its certificate is not trusted ({error.verify_message}); give its authority with --ca-file"


def _answers_tls(error: Exception, address: Address) -> bool:
    """Return whether who broke off a request without TLS, or answered it by a TLS alert, speaks TLS."""
    if isinstance(error, http.client.BadStatusLine) and str(error).startswith(_TLS_ALERT):
        return True
    if not isinstance(error, ConnectionError):  # also RemoteDisconnected
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((address.host, address.port), PROBE_SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=address.host).close()
    except (OSError, ValueError):  # also ssl.SSLError; a name that TLS cannot ask for
        return False
    return True


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection broke in the middle of an answer"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return printable(text)
