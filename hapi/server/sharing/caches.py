"""The operator's feature cache beside the store: features of all jobs, on the server's disk.

Files of a key are open while requests use it, and of a bounded number of keys longer than that. What is computed is
written by a thread of its own, as far as it keeps up; neither a full disk nor damage fails a request.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hapi.arrays import Bytes, IntArray, LabelArray
from hapi.cache.disk_rates import DiskRates
from hapi.cache.feature_key import FeatureKey
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.cache.writing.line import WriterLine
from hapi.closing import Closing
from hapi.codecs.names import CacheCodec
from hapi.errors import HapiError
from hapi.wire.cache_room import MOST_RATE, CacheRoom
from hapi.wire.labels import LabelForm

log = logging.getLogger("hapi.server")

OPEN_KEYS = 16
"""Keys whose files stay open when no request uses them."""
CLOSE_SECONDS = 10.0
"""Longest time for what waits to be written when the server ends."""


@dataclass
class _Open:
    """An open key."""

    cache: FeatureCache
    users: int = 0
    changed: bool = False
    """True when something was written since the last flush."""


class FeatureCaches(Closing):
    """Feature caches by key, in one folder. Thread-safe."""

    def __init__(
        self,
        folder: CacheFolder,
        memory_bytes: int = 0,
        codec: CacheCodec = "auto",
        made_with: str = "",
    ) -> None:
        """Keep features in ``folder``.

        Args:
            folder: the cache's folder.
            memory_bytes: most bytes of memory of all open keys together.
            codec: encoding of what is kept.
            made_with: as in :class:`FeatureCache`.
        """
        self.folder = folder
        self._memory_bytes = memory_bytes
        self._codec = codec
        self._made_with = made_with
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._rates: DiskRates | None = None
        """Rates of the disk as the key has them that was used last."""
        self._line = WriterLine("hapi-keep", flush=self._flush)

    @contextmanager
    def of(self, key: FeatureKey, count: int, form: LabelForm) -> Iterator[FeatureCache | None]:
        """Lend the cache of ``key`` for the block; None when it cannot be used, which is logged.

        Args:
            key: identity of the features.
            count: samples of the dataset.
            form: of their labels.
        """
        with self._used(key, count, form) as entry:
            yield None if entry is None else entry.cache

    @property
    def room(self) -> CacheRoom:
        """Room of the folder, and the rates of its disk: of the key that was used last, or of a probe."""
        rates = self._rates or self.folder.probed_rates()  # without the lock, under which keys are opened
        read, write = (None if rate is None else max(1, round(min(rate, MOST_RATE))) for rate in rates)
        return CacheRoom(bytes=self.folder.budget, read=read, write=write)

    def put(
        self, key: FeatureKey, count: int, form: LabelForm, ids: IntArray, features: Bytes, labels: LabelArray
    ) -> None:
        """Keep features soon, unless too many wait to be written. Never raises.

        Args:
            key: their identity.
            count: samples of the dataset.
            form: of their labels.
            ids: int64 [n].
            features: uint8 [n, bytes of a sample]; not changed afterwards.
            labels: n of them.
        """

        def write() -> None:
            """Write them, in the writer's thread."""
            with self._used(key, count, form) as entry:
                if entry is not None:
                    entry.cache.put(ids, features, labels)
                    entry.changed = True

        self._line.offer(features.nbytes, write)

    def written(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until nothing waits to be written; return whether that came about within ``seconds``."""
        return self._line.wait(seconds)

    def close(self) -> None:
        """Write what waits, and close all keys."""
        self.written()
        self._line.close(CLOSE_SECONDS)
        with self._lock:
            entries, self._open = list(self._open.values()), OrderedDict()
        for entry in entries:
            entry.cache.close()

    def _flush(self) -> None:
        with self._lock:
            changed = [entry for entry in self._open.values() if entry.changed]
            for entry in changed:
                entry.changed = False
        for entry in changed:
            entry.cache.flush()

    @contextmanager
    def _used(self, key: FeatureKey, count: int, form: LabelForm) -> Iterator[_Open | None]:
        entry = self._enter(key, count, form)
        try:
            yield entry
        finally:
            if entry is not None:
                self._leave(entry)

    def _enter(self, key: FeatureKey, count: int, form: LabelForm) -> _Open | None:
        with self._lock:  # opened under it: a key is open once
            entry = self._open.get(key.digest)
            if entry is None:
                try:
                    memory = self._free_memory(key, count, form)
                    cache = FeatureCache(
                        self.folder,
                        key,
                        count,
                        form,
                        memory,
                        self._made_with,
                        codec=self._codec,
                        lasting=True,
                    )
                except (HapiError, OSError) as error:
                    log.warning("feature cache not used: %s", error)
                    return None
                entry = self._open[key.digest] = _Open(cache)
            self._open.move_to_end(key.digest)
            entry.users += 1
            return entry

    def _free_memory(self, key: FeatureKey, count: int, form: LabelForm) -> int:
        """Bytes of memory for a key that is opened, for which keys that nobody uses are closed; under the lock."""
        wanted = min(self._memory_bytes, count * (key.sample_bytes + form.nbytes))

        def free() -> int:
            return self._memory_bytes - sum(entry.cache.memory_bytes for entry in self._open.values())

        for digest in [digest for digest, entry in self._open.items() if not entry.users]:
            if free() >= wanted:
                break
            if self._open[digest].cache.memory_bytes:
                self._open.pop(digest).cache.close()
        return max(0, free())

    def _leave(self, entry: _Open) -> None:
        self._rates = entry.cache.probed_rates()
        with self._lock:
            entry.users -= 1
            unused = [digest for digest, other in self._open.items() if not other.users]
            closed = [self._open.pop(digest) for digest in unused[: max(0, len(self._open) - OPEN_KEYS)]]
        for old in closed:
            old.cache.close()
