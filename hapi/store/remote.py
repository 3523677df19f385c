"""Stores behind obstore: memory, S3, GCS and Azure.

It deals with three traps of obstore: ranges past the end that are silently shortened, buffers that must be
bytes, and stores that hang in a forked child. ``connect.py`` has its timeouts, ``error_mapping.py`` its
errors.
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from queue import Full, Queue
from typing import Any, TypeVar

import obstore
from obstore import exceptions

from hapi.errors import ConflictError, HapiError, NotFoundError, StoreError
from hapi.process.threads import Lost, Threads, Work
from hapi.store.base import (
    DOCUMENT_BYTES,
    Names,
    ObjectInfo,
    ObjectStore,
    ReadPart,
    Then,
    check_document,
    check_key,
    check_prefix,
    nothing,
)
from hapi.store.coalesce import Fetch, coalesced, fetch_all, report
from hapi.store.connect import connect
from hapi.store.error_mapping import FOREIGN, is_other_range, store_error
from hapi.store.locking.lock_objects import StoreLockObjects
from hapi.store.locking.locks import LockObjects
from hapi.store.remote_listing import Listing
from hapi.waiting import moved

PARALLEL_REQUESTS = 8
MOST_LOST = 8 * PARALLEL_REQUESTS
"""Most threads in hung requests whose caller was given up."""
UPLOAD_BYTES, MOST_CHUNKS = 8 << 20, 5_000
"""Bytes of a part of an upload, and most parts, of which stores allow 10,000."""
RECEIVED_BYTES = 256 << 10
"""Bytes of an answer copied at a time. All 8 MB at once took a quarter more CPU, and held Python's lock
meanwhile.
"""
RANGE_TRIES = 3
"""Tries of a range when fewer bytes come than it has."""
_LOOK_SECONDS = 0.1
"""Time between two looks whether an upload has failed, while it takes no more pieces."""
_ANY_COPY_SECONDS = 60.0
"""Time for which any copy of a document will do, once the comparison of all copies has failed."""
T = TypeVar("T")
_MARKS = ("e_tag", "version")
"""Fields that identify one state of an object; each store compares those that it has."""


class RemoteStore(ObjectStore):
    """A store at a URL of obstore's. ``memory://NAME`` is one store per name and process."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._connection = connect(self.url)
        self._store = self._connection.store
        self._process = os.getpid()
        self._any_copy_until = 0.0
        self._workers = Threads(PARALLEL_REQUESTS, "hapi-store", Lost(MOST_LOST))
        weakref.finalize(self, self._workers.close)

    def pools(self) -> Sequence[Threads]:
        """Pool of the threads in which requests run."""
        return (self._workers,)

    def ping(self) -> None:
        """Check that the bucket answers."""
        with self._mapped(""):
            next(Listing(self._store, "datasets", self.url).pages(), None)

    def get(self, key: str, max_bytes: int = DOCUMENT_BYTES) -> bytes:
        """Return the whole object, read in bounded pieces."""

        def whole(store: Any) -> bytes:
            found = bytearray()
            answer = obstore.get(store, check_key(key))
            check_document(f"{self.url}/{key}", int(answer.meta["size"]), max_bytes)
            for data in answer.stream(min_chunk_size=RECEIVED_BYTES):
                found += memoryview(data)
                check_document(f"{self.url}/{key}", len(found), max_bytes)
            return bytes(found)

        with self._mapped(key):
            return self._newest(whole)

    def _newest(self, call: Callable[[Any], T]) -> T:
        """Make a call about the newest copy of an object: a node of the store that was away has older ones.

        A node that hangs holds up the comparison of all copies, but not a call about any of them.
        """
        newest = self._connection.newest
        if newest is not None and time.monotonic() >= self._any_copy_until:
            try:
                return call(newest)
            except exceptions.GenericError:
                self._any_copy_until = time.monotonic() + _ANY_COPY_SECONDS
        return call(self._store)

    def _head(self, key: str) -> Any:
        """Size and marks of the newest copy of an object."""
        return self._newest(lambda store: obstore.head(store, check_key(key)))

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        """Fill every part; nearby ranges are fetched as one, large ones in pieces side by side."""
        fetch_all(parts, coalesced(parts), self._fetch, self._workers, then)

    def _fetch(self, fetch: Fetch, then: Then) -> None:
        """Send one request. It is repeated when the wrong bytes come, since something on the way may be at
        fault.
        """
        got = 0
        with self._mapped(fetch.key):
            for tries_left in reversed(range(RANGE_TRIES)):
                try:
                    got = self._receive(fetch)
                except exceptions.BaseError as error:
                    if tries_left and is_other_range(error):
                        continue
                    raise
                if got == fetch.stop - fetch.start:
                    break
        if got < fetch.stop - fetch.start:
            raise StoreError(
                f"{self.url}/{fetch.key}: {got} bytes came for the range {fetch.start}..{fetch.stop}; "
                "the object is shorter than it should be"
            )
        report(fetch, then)

    def _receive(self, fetch: Fetch) -> int:
        """Bytes that came for a fetch: each stretch is put where it belongs while the processor has it in its cache."""
        answer = obstore.get(self._store, check_key(fetch.key), options={"range": (fetch.start, fetch.stop)})
        at, first, parts = fetch.start, 0, fetch.parts
        for data in answer.stream(min_chunk_size=RECEIVED_BYTES):
            moved()
            stretch = memoryview(data).cast("B")
            stop = at + len(stretch)
            if stop > fetch.stop:
                raise StoreError(
                    f"{self.url}/{fetch.key}: more bytes came than the range {fetch.start}..{fetch.stop} has; "
                    "the store, or something on the way, is broken"
                )
            while first < len(parts) and parts[first].stop <= at:
                first += 1
            number = first
            while number < len(parts) and (part_slice := parts[number]).start < stop:
                low, high = max(at, part_slice.start), min(stop, part_slice.stop)
                if low < high:
                    part_slice.out[low - part_slice.start : high - part_slice.start] = stretch[
                        low - at : high - at
                    ]
                number += 1
            at = stop
        return at - fetch.start

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Write an object in one request."""
        with self._mapped(key):
            obstore.put(self._store, check_key(key), memoryview(data).cast("B"))

    def put_pieces(self, key: str, size: int, pieces: Iterable[memoryview]) -> None:
        """Write an object as a multipart upload; one of few bytes in one request."""
        if size <= UPLOAD_BYTES:
            self.put(key, b"".join(pieces))
            return
        handed = _HandedOver()
        threads = Threads(1, "hapi-upload")  # obstore cannot be called while it asks for a piece
        upload = threads.submit(self._upload, key, handed, max(UPLOAD_BYTES, -(-size // MOST_CHUNKS)))
        try:
            for piece in pieces:
                if not handed.give(bytes(piece), upload):  # memory that may be read later
                    break
            handed.give(None, upload)
        except BaseException as error:
            handed.give(error, upload)
            wait([upload])
            raise
        finally:
            threads.close()
        upload.result()

    def _upload(self, key: str, pieces: Iterable[bytes], chunk: int) -> None:
        with self._mapped(key):
            obstore.put(
                self._store, check_key(key), iter(pieces), chunk_size=chunk, max_concurrency=PARALLEL_REQUESTS
            )

    def put_new(self, key: str, data: bytes) -> bool:
        """Write a small object unless it exists; see :meth:`hapi.store.base.ObjectStore.put_new`.

        A store may write it and fail to say so. It is asked again then, and reports an existing object: our
        own.
        """
        with self._mapped(key):
            try:
                obstore.put(self._store, check_key(key), data, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError:
                return self._is(key, data)
        return True

    def mark(self, key: str) -> str | None:
        """Return the object's ETag or version; None without an object."""
        try:
            with self._mapped(key):
                meta = self._head(key)
        except NotFoundError:
            return None
        return json.dumps({name: meta.get(name) for name in _MARKS if meta.get(name)})

    def put_over(self, key: str, data: bytes, mark: str | None) -> None:
        """Write the object with the condition that its mark is unchanged, if the store has conditions."""
        done = self.put_new(key, data) if mark is None else self._put_unchanged(key, data, mark)
        if not done:
            raise ConflictError(
                f"{self.url}/{key} was written by another process meanwhile; check what it wrote"
            )

    def _put_unchanged(self, key: str, data: bytes, mark: str) -> bool:
        try:
            with self._mapped(key):
                obstore.put(self._store, check_key(key), data, mode=json.loads(mark), use_multipart=False)
            return True
        except HapiError as error:
            if isinstance(error.__cause__, exceptions.PreconditionError | FileNotFoundError):
                return self._is(key, data)
        # OpenStack Swift, for one, cannot do it in one step.
        if self.mark(key) != mark:
            return self._is(key, data)
        self.put(key, data)
        return True

    def _is(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except NotFoundError:
            return False

    def size(self, key: str) -> int:
        """Return the object's size in bytes."""
        with self._mapped(key):
            return int(self._head(key)["size"])

    def exists(self, key: str) -> bool:
        """Return whether there is an object of this key."""
        try:
            self.size(key)
        except NotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return all objects under ``prefix`` at any depth, sorted by key."""
        found = []
        with self._mapped(prefix):
            for page in Listing(self._store, check_prefix(prefix), f"{self.url}/{prefix}").pages():
                found += [
                    ObjectInfo(
                        str(meta["path"]),
                        int(meta["size"]),
                        changed=str(meta.get("e_tag") or meta["last_modified"]),
                    )
                    for meta in page
                ]
        return sorted(found, key=lambda info: info.key)

    def list_keys(self, prefix: str) -> Names:
        """Return the keys of the objects directly below ``prefix``, sorted."""
        with self._mapped(prefix):
            return Listing(self._store, check_prefix(prefix), f"{self.url}/{prefix}").level()[1]

    def list_names(self, prefix: str) -> Names:
        """Return the names of the folders directly below ``prefix``, sorted."""
        with self._mapped(prefix):
            return Listing(self._store, check_prefix(prefix), f"{self.url}/{prefix}").level()[0]

    def delete(self, key: str) -> None:
        """Remove the object, if it exists."""
        try:
            with self._mapped(key):
                obstore.delete(self._store, check_key(key))
        except NotFoundError:
            return

    def _lock_objects(self, key: str) -> LockObjects:
        return StoreLockObjects(self, key)

    @contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        """Obstore's errors as ours; and a clear word instead of a hang in a forked child."""
        if os.getpid() != self._process:
            raise StoreError(f"{self.url}: this store was opened before a fork; open it in the new process")
        try:
            yield
        except HapiError:
            raise
        except FOREIGN as error:
            raise store_error(error, self.url, key, self._connection) from error


class _HandedOver:
    """Pieces on their way from the thread that makes them, maybe of bytes of the same store, to that of an upload."""

    def __init__(self) -> None:
        self._queue: Queue[bytes | BaseException | None] = Queue(1)
        """None after the last piece; an error ends the upload, and no object is there."""

    def __iter__(self) -> Iterator[bytes]:
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def give(self, piece: bytes | BaseException | None, upload: Work[None]) -> bool:
        """Hand a piece over once there is room for it; return False if the upload has failed."""
        while not upload.done():
            with suppress(Full):
                self._queue.put(piece, timeout=_LOOK_SECONDS)
                return True
        return False
