"""Tenants by their tokens, from a file of ``--tenants`` and the one token of ``HAPI_TOKEN``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hapi.config.settings import load_each, setting
from hapi.errors import BadRequestError, ConfigError, UnauthorizedError, UsageError
from hapi.server.scheduling.fair_queue import Tenant
from hapi.wire.references import check_name

DEFAULT = Tenant(name="default")
"""Tenant of the server's one token, or of everybody where no token is wanted."""
LEAST_TOKEN = 8
"""Fewest characters of a token in a file, and of one that other machines may try: anything shorter can be guessed."""
GOOD_TOKEN = 16
"""Fewest characters of a token that nobody guesses."""
MAX_TENANTS = 10_000


@dataclass(frozen=True, kw_only=True)
class TenantSettings:
    """One tenant in the file."""

    token: str | None = setting("its bearer token", default=None)
    token_sha256: str | None = setting("or the SHA-256 of it, in hexadecimal digits", default=None)
    weight: float = setting("share of the work beside that of others", default=1.0, low=0.001, high=1000)
    in_flight: int | None = setting("requests worked on at a time", default=None, low=1, high=1 << 20)
    bytes_per_second: int | None = setting("of answers, on average", default=None, low=1, unit="bytes")


class Tenants:
    """Finds a request's tenant by its token."""

    def __init__(self, by_digest: dict[bytes, Tenant] | None = None, token: str | None = None) -> None:
        """``by_digest``: tenants by the SHA-256 of their tokens; ``token``: the default tenant's."""
        self._by_digest = dict(by_digest or {})
        self.shortest = len(token) if token is not None else None
        """Characters of the default tenant's token; None without one."""
        if token is not None:
            self._by_digest[_digest(token.encode())] = DEFAULT
        self.all: Sequence[Tenant] = tuple(self._by_digest.values()) or (DEFAULT,)

    @property
    def open(self) -> bool:
        """True when no token is wanted."""
        return not self._by_digest

    def of(self, authorization: str) -> Tenant:
        """The tenant of a request with this ``Authorization`` header; :class:`UnauthorizedError` for nobody's."""
        if self.open:
            return DEFAULT
        scheme, _, given = authorization.encode("utf-8", "surrogateescape").partition(b" ")
        given = given.lstrip(b" ")
        # How long a look-up of digests takes says nothing about a token: nobody can choose a digest's bytes.
        tenant = self._by_digest.get(_digest(given)) if scheme.lower() == b"bearer" else None
        if tenant is None:
            raise UnauthorizedError(
                "the token is wrong: this server knows no such one; set HAPI_TOKEN or --token-file to the right one"
                if given
                else "no token was sent, and this server wants one; set HAPI_TOKEN or --token-file"
            )
        return tenant


def read_tenants(path: str | None, token: str | None) -> Tenants:
    """The tenants of the file at ``path`` (None: no file), and the default one with ``token`` (None: none).

    :class:`ConfigError` names file and tenant for what is wrong.
    """
    if path is None:
        return Tenants(token=token)
    entries = load_each(TenantSettings, Path(path))
    if not 1 <= len(entries) <= MAX_TENANTS:
        raise ConfigError(f"{path}: has {len(entries)} tenants; expected from 1 to {MAX_TENANTS}")
    found = {_digest(token.encode()): DEFAULT} if token is not None else {}
    for name, entry in entries.items():
        try:
            tenant, digest = _tenant(name, entry)
        except BadRequestError as error:
            raise ConfigError(f"{path}: {error}") from None
        if digest in found:
            raise ConfigError(
                f"{path}: {name} has the same token as {found[digest].name}; give each its own "
                "(the one of HAPI_TOKEN or --token-file is the default tenant's)"
            )
        found[digest] = tenant
    return Tenants(found, token)


def _tenant(name: str, entry: TenantSettings) -> tuple[Tenant, bytes]:
    check_name(name, "tenant")
    if name == DEFAULT.name:
        raise UsageError(f"the tenant {name!r} is the one of HAPI_TOKEN or --token-file; choose another name")
    if (entry.token is None) == (entry.token_sha256 is None):
        raise UsageError(f"{name}: give either token or token_sha256")
    if entry.token is not None:
        text = entry.token
        if len(text) < LEAST_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
            raise UsageError(
                f"{name}: token: expected at least {LEAST_TOKEN} printable ASCII characters without spaces"
            )
        digest = _digest(text.encode())
    else:
        if re.fullmatch("[0-9a-fA-F]{64}", entry.token_sha256 or "") is None:
            raise UsageError(f"{name}: token_sha256: expected 64 hexadecimal digits")
        digest = bytes.fromhex(entry.token_sha256 or "")
    tenant = Tenant(
        name=name,
        weight=entry.weight,
        in_flight=entry.in_flight,
        bytes_per_second=entry.bytes_per_second,
    )
    return tenant, digest


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
