"""Opening the stores behind obstore: timeouts, retries and settings."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore import exceptions
from obstore.store import MemoryStore, from_url

from hapi.errors import UsageError
from hapi.store.s3 import credential_provider, s3_settings
from hapi.units import environment_number

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_NEWEST = {"X-Newest": "true"}
"""OpenStack Swift compares all copies of an object then, and answers with the newest. Other stores take no notice."""
_memory_stores: dict[str, MemoryStore] = {}
_memory_guard = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class StoreTimeouts:
    """Limits, in seconds, after which a store counts as out of reach.

    With the defaults a store that refuses connections is given up within 2 s and a silent one within 30 s;
    the trainer then asks again for as long as its own ``--patience`` says.
    """

    connect: float = 5.0
    read: float = 8.0
    """Seconds without a single byte."""
    request: float = 300.0
    """Seconds from a request's beginning to the last byte of its answer, which is 16 MiB at most.

    Generous: a slow link is no failure, but a store that sends drop by drop must not hold a reader for ever.
    """
    retries: int = 3
    retry_within: float = 20.0
    """Seconds after which no further try begins."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> StoreTimeouts:
        """Read ``HAPI_STORE_CONNECT_TIMEOUT``, ``_READ_TIMEOUT``, ``_REQUEST_TIMEOUT``, ``_RETRIES``,
        ``_RETRY_SECONDS``.
        """
        retries = environment_number(environment, "HAPI_STORE_RETRIES", cls.retries, 0, 100)
        return cls(
            connect=environment_number(environment, "HAPI_STORE_CONNECT_TIMEOUT", cls.connect, 0.01, 3600),
            read=environment_number(environment, "HAPI_STORE_READ_TIMEOUT", cls.read, 0.01, 3600),
            request=environment_number(environment, "HAPI_STORE_REQUEST_TIMEOUT", cls.request, 0.01, 86400),
            retries=int(retries),
            # Requests are signed once, and a signature holds five minutes.
            retry_within=environment_number(
                environment, "HAPI_STORE_RETRY_SECONDS", cls.retry_within, 0, 290
            ),
        )

    def client(self) -> ClientConfig:
        """Return the options of obstore's HTTP client."""
        return {
            "connect_timeout": timedelta(seconds=self.connect),
            "read_timeout": timedelta(seconds=self.read),
            "timeout": timedelta(seconds=max(self.request, self.read)),
        }

    def retry(self) -> RetryConfig:
        """Return obstore's options for retries."""
        return {
            "max_retries": self.retries,
            "retry_timeout": timedelta(seconds=self.retry_within),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        }


@dataclass(frozen=True)
class Connection:
    """An open store, with facts for messages about it."""

    store: Any
    address: str = ""
    """The endpoint; empty where the URL says it all."""
    origin: str = "credentials of this machine"
    """Origin of the credentials, in words."""
    region: str = ""
    renews: bool = False
    """Its credentials may be renewed while it is open, so that a refusal of them is not final."""
    newest: Any = None
    """The same store, which compares all copies of what it gives, and tries each request once; None where a store has
    no older copies, or does not say which one it gives."""


def connect(url: str) -> Connection:
    """Open the store at ``url`` without contacting it; :class:`UsageError` for a store that cannot be opened."""
    scheme, _, name = url.partition("://")
    if scheme == "memory":
        with _memory_guard:
            return Connection(_memory_stores.setdefault(name, MemoryStore()))
    if scheme != "file" and not urlsplit(url).netloc:
        raise UsageError(f"store {url[:200]!r}: names no bucket or container; write {scheme}://BUCKET/PREFIX")
    timeouts = StoreTimeouts.from_environment(os.environ)
    client, retry = timeouts.client(), timeouts.retry()
    try:
        if scheme not in ("s3", "s3a"):
            return Connection(from_url(url, client_options=client, retry_config=retry))
        if "@" in urlsplit(url).netloc:
            raise UsageError(
                "a store's URL has credentials in it, which messages and process lists would show: write "
                "s3://BUCKET/PREFIX, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        settings = s3_settings(os.environ)
        client["allow_http"] = settings.allow_http
        config: Any = settings.config(urlsplit(url).netloc)
        provider = credential_provider(settings, os.environ)
        store = from_url(
            url, config=config, client_options=client, retry_config=retry, credential_provider=provider
        )
        address = settings.endpoint or f"Amazon's S3 in {settings.region}"
        newest = None
        if settings.endpoint is not None:
            client["default_headers"], retry["max_retries"] = _NEWEST, 0
            newest = from_url(
                url, config=config, client_options=client, retry_config=retry, credential_provider=provider
            )
        return Connection(
            store, address, settings.origin, settings.region, renews=provider is not None, newest=newest
        )
    except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
        text = " ".join(str(error).split())[:300]
        raise UsageError(f"store {url[:200]!r} cannot be opened: {text}") from error
