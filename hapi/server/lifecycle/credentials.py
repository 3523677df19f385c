"""Tokens, tenants and certificate of a server, read from their files: who may ask, and how it proves who it is."""

from __future__ import annotations

import logging
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass

from hapi.config.token import read_token
from hapi.errors import UsageError
from hapi.paths import open_file
from hapi.server.http.same_origin import is_loopback
from hapi.server.lifecycle.certificate import Validity, validity_of
from hapi.server.settings import ListenSettings
from hapi.server.tenants.by_token import GOOD_TOKEN, LEAST_TOKEN, Tenants, read_tenants

log = logging.getLogger("hapi.server")

_MOST_BYTES = 1 << 20
"""Longest part of a file with certificates that is read for their validity."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """The content of the files that the settings name, at the time of reading."""

    token: str | None
    """The server's one token, which it also shows other servers; None for none."""
    tenants: Tenants
    tls: ssl.SSLContext | None
    """Certificate and key; None for plain HTTP."""
    validity: Validity | None
    """The time in which the certificate is good; None where there is none, or it does not tell."""


def read_credentials(listen: ListenSettings) -> Credentials:
    """Read the files that ``listen`` names.

    Raises:
        UsageError: one of them cannot be read or used, or everybody beyond loopback might ask.
    """
    token = read_token(listen.token_file)
    tenants = read_tenants(listen.tenants, token)
    check_exposure(listen, tenants)
    if expired := tenants.without_token:
        log.warning("tenants whose tokens have all expired", extra={"tenants": expired[:100]})
    tls = _tls(listen)
    validity = None if tls is None else _validity(str(listen.tls_cert))
    if validity is not None and (problem := validity.problem(time.time())):
        log.warning("certificate: renew it", extra={"file": listen.tls_cert, "problem": problem})
    return Credentials(token=token, tenants=tenants, tls=tls, validity=validity)


def check_exposure(listen: ListenSettings, tenants: Tenants) -> None:
    """Refuse to listen beyond loopback when everybody may ask, or guess the token; warn where others may read it."""
    loopback = is_loopback(f"[{listen.host}]" if ":" in listen.host else listen.host)
    shortest = tenants.shortest
    if not loopback and tenants.open:
        raise UsageError(
            f"--host {listen.host} is reachable from other machines: give a token (HAPI_TOKEN, --token-file or "
            "--tenants), or listen on 127.0.0.1"
        )
    if not loopback and shortest is not None and shortest < LEAST_TOKEN:
        raise UsageError(
            f"--host {listen.host} is reachable from other machines, and the token of HAPI_TOKEN or --token-file can "
            f"be guessed: it has {shortest} characters; give at least {LEAST_TOKEN}, better {GOOD_TOKEN} random ones"
        )
    if not loopback and shortest is not None and shortest < GOOD_TOKEN:
        log.warning("the token is short: %d random characters or more are better", GOOD_TOKEN)
    if not loopback and not listen.tls_cert:
        log.warning(
            "tokens and data cross the network readable by others: give --tls-cert and --tls-key, "
            "or let a proxy on this machine speak TLS"
        )
    if bool(listen.tls_cert) != bool(listen.tls_key):
        raise UsageError("--tls-cert and --tls-key belong together: give both")


def _tls(listen: ListenSettings) -> ssl.SSLContext | None:
    if not listen.tls_cert or not listen.tls_key:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        for path in (listen.tls_cert, listen.tls_key):
            open_file(path).close()  # OpenSSL would wait for a named pipe, and read a device without end
        # With a password a key that wants one fails at once, instead of asking on the terminal.
        context.load_cert_chain(listen.tls_cert, listen.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        # OpenSSL's word for a file without a certificate or key in it says nothing.
        why = "no PEM certificate and key without a password" if "PEM lib" in str(error) else error
        raise UsageError(f"--tls-cert {listen.tls_cert} / --tls-key {listen.tls_key}: {why}") from None
    return context


def _validity(path: str) -> Validity | None:
    """The validity of the certificates in a file that OpenSSL could read just now."""
    with suppress(OSError), open_file(path) as file:
        return validity_of(file.read(_MOST_BYTES).decode("ascii", "replace"))
    return None
