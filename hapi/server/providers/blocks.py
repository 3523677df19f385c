"""The packs that a server provides, kept in memory in blocks within a bound, least recently used out first.

A local store needs none of this: the kernel keeps its files' pages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from hapi.errors import StoreError
from hapi.store.base import ObjectStore, ReadPart
from hapi.waiting import check, result

BLOCK_BYTES = 1 << 20

Block = tuple[str, int]
"""Key of the object, and number of the block in it."""


@dataclass(frozen=True)
class _Claims:
    """Blocks of one read: those that it fetches itself, and those that others fetch."""

    own: dict[Block, Future[memoryview]]
    others: dict[Block, Future[memoryview]]


class BlockCache:
    """Reads objects of a store through memory; of several readers of a block one fetches it. Thread-safe."""

    def __init__(self, store: ObjectStore, max_bytes: int) -> None:
        """Keep at most ``max_bytes`` bytes of the objects of ``store``, which never change."""
        self._store = store
        self._max_blocks = max_bytes // BLOCK_BYTES
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Block, memoryview] = OrderedDict()
        self._loading: dict[Block, Future[memoryview]] = {}
        self._sizes: dict[str, int] = {}
        self.hit_bytes = 0
        """Bytes that were given from memory."""
        self.read_bytes = 0
        """Bytes that were read from the store."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks.values())

    def read(self, part: ReadPart) -> None:
        """Fill one part."""
        start, stop = part.start, part.start + part.out.nbytes
        size = self._size(part.key, stop)
        if stop > size:
            raise StoreError(f"{part.key}: ends at byte {size}, but {start}..{stop} was asked for")
        span = max(1, self._max_blocks // 4)
        for first in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES), span):
            low, high = max(start, first * BLOCK_BYTES), min(stop, (first + span) * BLOCK_BYTES)
            self._read(ReadPart(part.key, low, part.out.cast("B")[low - start : high - start]), size)

    def _read(self, part: ReadPart, size: int) -> None:
        """Fill a part that is small beside all that is kept."""
        stop = part.start + part.out.nbytes
        wanted = [(part.key, n) for n in range(part.start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))]
        found, claims = self._divide(wanted)
        if claims.own:
            self._fetch(claims.own, size)
        for block in wanted:
            data = found.get(block)
            if data is None:
                data = self._awaited(block, claims, size)
            at = block[1] * BLOCK_BYTES
            low, high = max(at, part.start), min(at + data.nbytes, stop)
            part.out[low - part.start : high - part.start] = data[low - at : high - at]

    def _awaited(self, block: Block, claims: _Claims, size: int) -> memoryview:
        """A block that is being fetched. One that another reader fetches in vain is fetched anew: the error may concern
        that reader alone, as where its client went away.
        """
        if block in claims.own:
            return result(claims.own[block])
        try:
            return result(claims.others[block])
        except Exception:
            check()
        found, claims = self._divide([block])
        if claims.own:
            self._fetch(claims.own, size)
        data = found.get(block)
        return result(claims.own.get(block) or claims.others[block]) if data is None else data

    def _divide(self, wanted: Sequence[Block]) -> tuple[dict[Block, memoryview], _Claims]:
        """Divide ``wanted`` into blocks that are held and claims on those that are to be fetched."""
        found: dict[Block, memoryview] = {}
        claims = _Claims({}, {})
        with self._lock:
            for block in wanted:
                if block in self._blocks:
                    self._blocks.move_to_end(block)
                    found[block] = self._blocks[block]
                    self.hit_bytes += found[block].nbytes
                elif block in self._loading:
                    claims.others[block] = self._loading[block]
                else:
                    claims.own[block] = self._loading[block] = Future()
        return found, claims

    def _fetch(self, own: dict[Block, Future[memoryview]], size: int) -> None:
        """Read blocks from the store, give them to all that wait for them, and keep them."""
        parts = []
        try:
            for key, number in own:
                length = min(BLOCK_BYTES, size - number * BLOCK_BYTES)
                parts.append(ReadPart(key, number * BLOCK_BYTES, memoryview(bytearray(length))))
            self._store.read_many(parts)
        except BaseException as error:
            with self._lock:
                for block in own:
                    self._end_loading(block, own[block])
            for waiting in own.values():
                waiting.set_exception(error if isinstance(error, Exception) else StoreError("given up"))
            raise
        with self._lock:
            for block, part in zip(own, parts, strict=True):
                if self._end_loading(block, own[block]):  # it was not forgotten meanwhile
                    self._blocks[block] = part.out
                self.read_bytes += part.out.nbytes
            while len(self._blocks) > self._max_blocks:
                self._blocks.popitem(last=False)
        for block, part in zip(own, parts, strict=True):
            own[block].set_result(part.out)

    def _end_loading(self, block: Block, fetching: Future[memoryview]) -> bool:
        """Note that a fetch is over; return whether it is still the one of its block. Under the lock."""
        if self._loading.get(block) is not fetching:
            return False
        del self._loading[block]
        return True

    def forget(self, key: str) -> None:
        """Drop all blocks of an object."""
        with self._lock:
            for block in [block for block in self._blocks if block[0] == key]:
                del self._blocks[block]
            for block in [block for block in self._loading if block[0] == key]:
                del self._loading[block]

    def _size(self, key: str, needed: int) -> int:
        """Bytes of an object; looked up anew where it was too short, as before it was repaired."""
        with self._lock:
            known = self._sizes.get(key)
        if known is None or known < needed:
            size = self._store.size(key)
            if known not in (None, size):
                self.forget(key)  # its last block was cut short, too
            with self._lock:
                if len(self._sizes) >= 4096:
                    self._sizes.clear()
                self._sizes[key] = size
            return size
        return known
