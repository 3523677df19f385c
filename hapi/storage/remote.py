"""Stores behind obstore: memory, S3, GCS and Azure.

Sharp edges of obstore that are dealt with here: its timeouts and retries (a dead store must fail within
about 30 s), ranges past the end that are silently shortened, buffers that must be bytes, and stores that
hang in a forked child.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore import exceptions
from obstore.store import MemoryStore, from_url

from hapi.errors import ConflictError, HapiError, NotFoundError, StoreError, UsageError
from hapi.storage.locks import LockOwner
from hapi.storage.objects import Names, ObjectInfo, ObjectStore, ReadPart, check_key, check_prefix

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_RETRY: RetryConfig = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
# No progress for 8 s fails a request; the total is generous: a large range on a slow link is no failure.
_CLIENT: ClientConfig = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=8),
    "timeout": timedelta(seconds=300),
}

COALESCE_GAP = 256 << 10
"""Ranges nearer than this are fetched as one: at about 3 ms a request the gap is cheaper to read."""
PIECE_BYTES = 16 << 20
"""Most bytes of one request; larger ranges are split and fetched in parallel."""
PARALLEL_REQUESTS = 8
_TAKEOVER = ".takeover"

_memory_stores: dict[str, MemoryStore] = {}
_memory_guard = threading.Lock()


@dataclass(frozen=True)
class _Fetch:
    """One request: bytes ``start..stop`` of ``key``, from which ``parts`` are cut."""

    key: str
    start: int
    stop: int
    parts: list[ReadPart]


class RemoteStore(ObjectStore):
    """A store at a URL of obstore's. ``memory://NAME`` is one store per name and process."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._store = _connect(self.url)
        self._process = os.getpid()
        self._workers = ThreadPoolExecutor(PARALLEL_REQUESTS, thread_name_prefix="hapi-store")

    def ping(self) -> None:
        with self._mapped(""):
            obstore.list_with_delimiter(self._store)

    def get(self, key: str) -> bytes:
        with self._mapped(key):
            return bytes(obstore.get(self._store, check_key(key)).bytes())

    def read_many(self, parts: Sequence[ReadPart]) -> None:
        fetches = _coalesced(parts)
        if len(fetches) == 1:
            self._fetch(fetches[0])
        else:
            for done in [self._workers.submit(self._fetch, fetch) for fetch in fetches]:
                done.result()

    def _fetch(self, fetch: _Fetch) -> None:
        with self._mapped(fetch.key):
            got = obstore.get_range(self._store, check_key(fetch.key), start=fetch.start, end=fetch.stop)
        data = memoryview(got).cast("B")
        if len(data) != fetch.stop - fetch.start:
            raise StoreError(
                f"{self.url}/{fetch.key}: {len(data)} bytes came for the range {fetch.start}..{fetch.stop}; "
                "the object is shorter than it should be"
            )
        for part in fetch.parts:
            first = part.start - fetch.start
            part.out[:] = data[first : first + len(part.out)]

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        with self._mapped(key):
            obstore.put(self._store, check_key(key), memoryview(data).cast("B"))

    def size(self, key: str) -> int:
        with self._mapped(key):
            return int(obstore.head(self._store, check_key(key))["size"])

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except NotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        found = []
        with self._mapped(prefix):
            for page in obstore.list(self._store, check_prefix(prefix) or None, chunk_size=1000):
                found += [ObjectInfo(str(meta["path"]), int(meta["size"])) for meta in page]
        return sorted(found, key=lambda info: info.key)

    def list_names(self, prefix: str) -> Names:
        with self._mapped(prefix):
            result = obstore.list_with_delimiter(self._store, check_prefix(prefix) or None)
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in result["common_prefixes"])

    def delete(self, key: str) -> None:
        try:
            with self._mapped(key):
                obstore.delete(self._store, check_key(key))
        except NotFoundError:
            return

    @contextmanager
    def lock(self, key: str, *, force: bool = False) -> Iterator[None]:
        """An object written with "create if absent"; a dead owner's lock is taken over.

        Taking over is guarded by a second such object, since not every S3 store can replace an object on the
        condition that it is unchanged (OpenStack Swift cannot).
        """
        mine = LockOwner.this_process()
        self._take(check_key(key), mine, force)
        try:
            yield
        finally:
            self._release(key, mine)

    def _take(self, key: str, mine: LockOwner, force: bool) -> None:
        if force:
            self.put(key, mine.to_bytes())
            self.delete(f"{key}{_TAKEOVER}")
            return
        while not self._create(key, mine):
            owner = self._owner(key)
            if owner is None:
                continue
            guard = f"{key}{_TAKEOVER}"
            if not owner.is_dead() or not self._create(guard, mine):
                raise ConflictError(
                    f"{self.url}/{key.rpartition('/')[0]} is being written by {owner}; wait until it is done, "
                    "or pass --force-lock when you know that it is dead"
                )
            try:
                # Another may have taken it over, and been done, between our look and our guard.
                if self._owner(key) == owner:
                    self.put(key, mine.to_bytes())
                    return
            finally:
                self.delete(guard)

    def _create(self, key: str, mine: LockOwner) -> bool:
        """Write the lock unless there is one."""
        with self._mapped(key):
            try:
                obstore.put(self._store, key, mine.to_bytes(), mode="create")
            except exceptions.AlreadyExistsError:
                return False
        return True

    def _owner(self, key: str) -> LockOwner | None:
        try:
            return LockOwner.from_bytes(self.get(key))
        except NotFoundError:
            return None

    def _release(self, key: str, mine: LockOwner) -> None:
        if self._owner(key) == mine:
            self.delete(key)

    @contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        """Obstore's errors as ours; and a clear word instead of a hang in a forked child."""
        if os.getpid() != self._process:
            raise StoreError(f"{self.url}: this store was opened before a fork; open it in the new process")
        try:
            yield
        except HapiError:
            raise
        except FileNotFoundError:
            raise NotFoundError(f"there is no object {self.url}/{key}") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise StoreError(
                f"{self.url}/{key}: access denied; check the credentials: {_line(error)}"
            ) from error
        except (exceptions.BaseError, OSError, ValueError, asyncio.CancelledError) as error:
            raise StoreError(f"{self.url}/{key}: {_line(error)}") from error


def _connect(url: str) -> Any:
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        with _memory_guard:
            return _memory_stores.setdefault(rest, MemoryStore())
    client = _CLIENT.copy()
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    if scheme in ("s3", "s3a") and endpoint.startswith("http://"):
        client["allow_http"] = True
    try:
        return from_url(url, client_options=client, retry_config=_RETRY)
    except (exceptions.BaseError, ValueError, TypeError, OSError) as error:
        raise UsageError(f"store {url[:200]!r} cannot be opened: {_line(error)}") from error


def _coalesced(parts: Sequence[ReadPart]) -> list[_Fetch]:
    """Requests that cover ``parts``: near ranges joined, large ones split."""
    fetches: list[_Fetch] = []
    for part in sorted(_split(parts), key=lambda p: (p.key, p.start)):
        stop = part.start + len(part.out)
        last = fetches[-1] if fetches else None
        if (
            last is not None
            and last.key == part.key
            and part.start - last.stop <= COALESCE_GAP
            and max(stop, last.stop) - last.start <= PIECE_BYTES
        ):
            last.parts.append(part)
            fetches[-1] = _Fetch(last.key, last.start, max(stop, last.stop), last.parts)
        else:
            fetches.append(_Fetch(part.key, part.start, stop, [part]))
    return fetches


def _split(parts: Sequence[ReadPart]) -> Iterator[ReadPart]:
    for part in parts:
        out = part.out.cast("B")
        for first in range(0, len(out), PIECE_BYTES):
            yield ReadPart(part.key, part.start + first, out[first : first + PIECE_BYTES])


def _line(error: BaseException) -> str:
    """The gist of obstore's many-line messages."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + "..."
