"""An append-only file of named records, shared by processes without synchronisation of its readers.

    checksum (8 bytes, xxh3-64) | bytes of the name (4) | bytes of the data (4) | name | data

A record is written by one call, under a lock of the writers. What a kill left of one, or damage, ends what is read; the
next writer cuts it off. Beyond a bound the file begins anew. No failure of the disk is an error: what is not there is
read from the store.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Self

import xxhash

from hapi.paths import user_cache_folder
from hapi.store.base import ObjectStore

MAX_BYTES = 32 << 20
"""Bytes beyond which a file begins anew; 10,000 fine-tunes of one backbone have 8 MB of headers."""
MAX_FILES = 64
"""Files of one kind that are kept, those of the stores that were used last."""
_HEAD = Struct("<8sII")


class RecordLog:
    """Records by name in a file; the last one of a name counts."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Use the file at ``path``, which need not exist."""
        self._path = path
        self._max_bytes = max_bytes

    @classmethod
    def of(cls, store: ObjectStore, kind: str) -> Self | None:
        """Return the file of ``kind`` for a store.

        None for a local one, which is read as fast as the file, and for a user without a home.
        """
        home = user_cache_folder()
        if home is None or store.local_path("packs") is not None:
            return None
        return cls(home / kind / f"{hashlib.sha256(store.url.encode()).hexdigest()[:32]}.log")

    def read(self) -> dict[str, bytes]:
        """Return all sound records."""
        try:
            if self._path.stat().st_size > self._max_bytes:
                return {}
            found, _ = _parsed(self._path.read_bytes())
            os.utime(self._path)  # the longest unused is removed first
        except OSError:
            return {}
        return found

    def append(self, records: Mapping[str, bytes]) -> None:
        """Add records, and cut off what is no whole one before them."""
        data = encoded(records)
        if not data or len(data) > self._max_bytes:
            return
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                size = os.fstat(descriptor).st_size
                fits = size + len(data) <= self._max_bytes
                end = _parsed(file.read(size))[1] if fits else 0
                if end < size:
                    file.truncate(end)
                file.seek(end)
                file.write(data)
            if is_new:
                self._trim()

    def clear(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self._path.unlink()

    def _trim(self) -> None:
        """Remove the files of the stores that were not used for longest."""
        found = sorted((path.stat().st_mtime_ns, path) for path in self._path.parent.glob("*.log"))
        for _, path in found[:-MAX_FILES]:
            path.unlink(missing_ok=True)


class KnownRecords:
    """Records that this machine has read of a store, by name; a context manager, which keeps what was added.

    Without a file (``log`` is None) nothing is known, and nothing is kept.
    """

    def __init__(self, log: RecordLog | None) -> None:
        """Read ``log``."""
        self._log = log
        self._known = {} if log is None else log.read()
        self._new: dict[str, bytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.append(self._new)


def encoded(records: Mapping[str, bytes]) -> bytes:
    """Return records one after another, as a file has them."""
    return b"".join(_record(name.encode(), value) for name, value in records.items())


def decoded(data: bytes) -> dict[str, bytes]:
    """Return the records up to the first one that is not sound."""
    return _parsed(data)[0]


def _record(name: bytes, value: bytes) -> bytes:
    body = name + value
    lengths = len(name), len(value)
    return _HEAD.pack(_checksum(*lengths, body), *lengths) + body


def _checksum(name_bytes: int, value_bytes: int, body: bytes | memoryview) -> bytes:
    found = xxhash.xxh3_64(name_bytes.to_bytes(4, "little") + value_bytes.to_bytes(4, "little"))
    found.update(body)
    return found.digest()


def _parsed(data: bytes) -> tuple[dict[str, bytes], int]:
    """The records up to the first one that is not sound, and the byte at which that begins."""
    found: dict[str, bytes] = {}
    view, at = memoryview(data), 0
    while at + _HEAD.size <= len(data):
        checksum, name_bytes, value_bytes = _HEAD.unpack_from(data, at)
        begin, stop = at + _HEAD.size, at + _HEAD.size + name_bytes + value_bytes
        if stop > len(data) or _checksum(name_bytes, value_bytes, view[begin:stop]) != checksum:
            break
        try:
            name = data[begin : begin + name_bytes].decode()
        except UnicodeDecodeError:
            break
        found[name] = data[begin + name_bytes : stop]
        at = stop
    return found, at
