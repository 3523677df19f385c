"""Tenants by their tokens, from a file of ``--tenants`` and the one token of ``HAPI_TOKEN``."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hapi.config.settings import load_each, setting
from hapi.errors import BadRequestError, ConfigError, UnauthorizedError, UsageError
from hapi.server.scheduling.fair_queue import Tenant
from hapi.server.tenants.access import ALL, Access, check_patterns
from hapi.wire.references import check_name

DEFAULT = Tenant(name="default")
"""Tenant of the server's one token, or of everybody where no token is wanted."""
LEAST_TOKEN = 8
"""Fewest characters of a token in a file, and of one that other machines may try: anything shorter can be guessed."""
GOOD_TOKEN = 16
"""Fewest characters of a token that nobody guesses."""
MAX_TENANTS = 10_000
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class TokenSettings:
    """One token in the file."""

    token: str | None = setting("a bearer token", default=None)
    token_sha256: str | None = setting("or the SHA-256 of it, in hexadecimal digits", default=None)
    expires: str | None = setting("time from which on it is refused (RFC 3339)", default=None)


@dataclass(frozen=True, kw_only=True)
class TenantSettings(TokenSettings):
    """One tenant in the file, and its token."""

    more_tokens: tuple[TokenSettings, ...] = setting("others that are valid too", default=())
    weight: float = setting("share of the work beside that of others", default=1.0, low=0.001, high=1000)
    in_flight: int | None = setting("requests worked on at a time", default=None, low=1, high=1 << 20)
    bytes_per_second: int | None = setting("of answers, on average", default=None, low=1, unit="bytes")
    datasets: tuple[str, ...] = setting("names of those that it may see, * for any text", default=ALL)
    models: tuple[str, ...] = setting("names of pushed models that it may see, * for any text", default=ALL)
    status: bool = setting("it may ask for the server's state", default=True)
    metrics: bool = setting("it may ask for the server's metrics", default=True)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Tenant that a token stands for."""

    tenant: Tenant
    expires: float = math.inf
    """Seconds since 1970 from which on the token is refused."""


class Tenants:
    """Finds a request's tenant by its token."""

    def __init__(
        self,
        by_digest: Mapping[bytes, Holder] | None = None,
        token: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Know the tokens.

        Args:
            by_digest: whose they are, by their SHA-256.
            token: the default tenant's; None: it has none.
            clock: seconds since 1970.
        """
        self._by_digest = dict(by_digest or {})
        self._clock = clock
        self.shortest = len(token) if token is not None else None
        """Characters of the default tenant's token; None without one."""
        if token is not None:
            self._by_digest[_digest(token.encode())] = Holder(tenant=DEFAULT)
        holders = self._by_digest.values()
        self.all: Sequence[Tenant] = tuple(dict.fromkeys(h.tenant for h in holders)) or (DEFAULT,)

    @property
    def open(self) -> bool:
        """True when no token is wanted."""
        return not self._by_digest

    @property
    def without_token(self) -> list[str]:
        """Names of tenants whose tokens have all expired."""
        holders, now = self._by_digest.values(), self._clock()
        valid = {h.tenant.name for h in holders if now < h.expires}
        return [] if self.open else [tenant.name for tenant in self.all if tenant.name not in valid]

    def of(self, authorization: str) -> Tenant:
        """The tenant of a request with this ``Authorization`` header; :class:`UnauthorizedError` for nobody's."""
        if self.open:
            return DEFAULT
        scheme, _, given = authorization.encode("utf-8", "surrogateescape").partition(b" ")
        given = given.lstrip(b" ")
        # How long a look-up of digests takes says nothing about a token: nobody can choose a digest's bytes.
        holder = self._by_digest.get(_digest(given)) if scheme.lower() == b"bearer" else None
        if holder is None:
            raise UnauthorizedError(
                "the token is wrong: this server knows no such one; set HAPI_TOKEN or --token-file to the right one"
                if given
                else "no token was sent, and this server wants one; set HAPI_TOKEN or --token-file"
            )
        if self._clock() >= holder.expires:
            raise UnauthorizedError(
                f"the token expired at {_shown(holder.expires)}; set HAPI_TOKEN or --token-file to a newer one"
            )
        return holder.tenant


def read_tenants(path: str | None, token: str | None) -> Tenants:
    """The tenants of the file at ``path`` (None: no file), and the default one with ``token`` (None: none).

    :class:`ConfigError` names file and tenant for what is wrong.
    """
    if path is None:
        return Tenants(token=token)
    entries = load_each(TenantSettings, Path(path))
    if not 1 <= len(entries) <= MAX_TENANTS:
        raise ConfigError(f"{path}: has {len(entries)} tenants; expected from 1 to {MAX_TENANTS}")
    found = {_digest(token.encode()): Holder(tenant=DEFAULT)} if token is not None else {}
    for name, entry in entries.items():
        try:
            tenant = _tenant(name, entry)
            tokens = [_token(name, one) for one in (entry, *entry.more_tokens)]
        except BadRequestError as error:
            raise ConfigError(f"{path}: {error}") from None
        for digest, expires in tokens:
            if digest in found:
                raise ConfigError(_twice(path, name, found[digest].tenant.name))
            found[digest] = Holder(tenant=tenant, expires=expires)
    return Tenants(found, token)


def _twice(path: str, name: str, other: str) -> str:
    if name == other:
        return f"{path}: {name} has the same token twice; leave one out"
    return (
        f"{path}: {name} has the same token as {other}; give each its own "
        "(the one of HAPI_TOKEN or --token-file is the default tenant's)"
    )


def _tenant(name: str, entry: TenantSettings) -> Tenant:
    check_name(name, "tenant")
    if name == DEFAULT.name:
        raise UsageError(f"the tenant {name!r} is the one of HAPI_TOKEN or --token-file; choose another name")
    for what, patterns in (("datasets", entry.datasets), ("models", entry.models)):
        check_patterns(patterns, f"{name}: {what}")
    access = Access(datasets=entry.datasets, models=entry.models, status=entry.status, metrics=entry.metrics)
    return Tenant(
        access=access,
        name=name,
        weight=entry.weight,
        in_flight=entry.in_flight,
        bytes_per_second=entry.bytes_per_second,
    )


def _token(name: str, entry: TokenSettings) -> tuple[bytes, float]:
    """Digest of a token of the tenant ``name``, and the time at which it expires."""
    expires = math.inf if entry.expires is None else _time(name, entry.expires)
    if (entry.token is None) == (entry.token_sha256 is None):
        raise UsageError(f"{name}: give either token or token_sha256")
    if entry.token is not None:
        text = entry.token
        if len(text) < LEAST_TOKEN or not text.isascii() or not text.isprintable() or " " in text:
            raise UsageError(
                f"{name}: token: expected at least {LEAST_TOKEN} printable ASCII characters without spaces"
            )
        return _digest(text.encode()), expires
    if re.fullmatch("[0-9a-fA-F]{64}", entry.token_sha256 or "") is None:
        raise UsageError(f"{name}: token_sha256: expected 64 hexadecimal digits")
    return bytes.fromhex(entry.token_sha256 or ""), expires


def _time(name: str, text: str) -> float:
    """Seconds since 1970 of a time as RFC 3339 writes it."""
    try:
        if _RFC_3339.fullmatch(text) is None:
            raise ValueError
        return datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"{name}: expires: expected a time of RFC 3339 such as 2030-01-31T12:00:00Z, got {text[:80]!r}"
        ) from None


def _shown(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
