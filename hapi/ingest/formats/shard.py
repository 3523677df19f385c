"""Tools of a format's module: a shard's bytes, read once in order, and the samples found in them.

A format is a module with

    NAME: str                                       as in ``hapi index --format``
    claims(base: str) -> bool                       whether an object with this last part of a key is a sign of it
    shards_of(store, folder, objects) -> list[ObjectInfo]
                                                    the shards among all objects below the folder, in their order
    scan(shard, fields) -> Iterator[Found | Bad]    the samples of one shard, in their order

``objects`` is the listing of the folder, sorted by key; a prefix ``.../`` of their keys is ``folder``.
``scan`` only locates samples. The caller checks that they are images, not too long, and have a label. Damage
of a record is a :class:`Bad` if the scan can go on behind it, otherwise a :class:`DataError` naming the
shard. A property of the whole shard is checked at its end (:meth:`ShardBytes.check_at_end`): if it fails,
none of its samples is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from hapi.errors import DataError, StoreError
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.text import printable

BLOCK_BYTES = 4 << 20
"""Bytes read at once: large enough that a store's few ms a request do not count."""
_KEPT_BLOCKS = 3
"""Blocks held at a time. A sample's label may stand behind its image, which is then still here."""
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")

Label = int | str | None
"""A class number, a class name, or nothing known."""


@dataclass(frozen=True)
class Found:
    """A sample: bytes ``offset..offset + length`` of the shard; messages call it ``name``."""

    offset: int
    length: int
    label: Label
    name: str


@dataclass(frozen=True)
class Bad:
    """A sample that cannot be used, and the reason (a few words that follow ``name: ``)."""

    name: str
    problem: str


@dataclass(frozen=True)
class Fields:
    """Fields of a record that are the image and the label; None: the format's defaults."""

    image: str | None = None
    label: str | None = None
    unlabelled: bool = False
    """Labels come from elsewhere: none is looked for, and none can be wrong."""


class ShardBytes:
    """The bytes of one object, read in blocks in order, each once (a look far back reads again).

    Its checksum comes with it: every block is added when it is first read. For one thread.
    """

    def __init__(self, store: ObjectStore, info: ObjectInfo, name: str | None = None) -> None:
        self._store = store
        self.info = info
        """The object from ``shards_of``; a format may add facts from its own index about the shard."""
        self.key = key = info.key
        self.size = info.size
        self.path = key if name is None else name
        """The key below the folder that is indexed."""
        self.name = printable(self.path)
        """Name of the shard in messages."""
        self._blocks: dict[int, memoryview] = {}
        self._next = 0
        self._digest = xxhash.xxh3_64()
        self._watching: list[Callable[[memoryview], None]] = [self._digest.update]
        self._checks: list[Callable[[], None]] = []

    def watch(self, update: Callable[[memoryview], None]) -> None:
        """Call ``update`` with the object's bytes in their order as they are first read. Call it before the
        first read.
        """
        self._watching.append(update)

    def check_at_end(self, check: Callable[[], None]) -> None:
        """Call ``check`` when all bytes have been read; its :class:`DataError` makes the whole shard useless."""
        self._checks.append(check)

    def read(self, offset: int, length: int) -> memoryview:
        """Return bytes ``offset..offset + length``; :class:`DataError` naming the shard when it ends before.

        They are valid as long as they are held. Memory is taken only for bytes that exist.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise DataError(
                f"shard {self.name}: bytes {offset}..{offset + length} are needed, it has {self.size}; "
                "it is cut off or damaged"
            )
        if length == 0:
            return memoryview(b"")
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        start = offset - first * BLOCK_BYTES
        if first == last:
            return self._block(first)[start : start + length]
        out = memoryview(bytearray(length))
        done = 0
        for number in range(first, last + 1):
            part = self._block(number)[start : start + length - done]
            out[done : done + len(part)] = part
            done += len(part)
            start = 0
        return out.toreadonly()

    def checksum(self) -> int:
        """Return the xxh3_64 of the whole object, reading the rest of it; DataError when a check at its end
        fails.
        """
        count = -(-self.size // BLOCK_BYTES)
        if self._next < count:
            self._block(count - 1)
        for check in self._checks:
            check()
        return self._digest.intdigest()

    def _block(self, number: int) -> memoryview:
        while self._next <= number:
            block = self._load(self._next)
            for update in self._watching:
                update(block)
            self._keep(self._next, block)
            self._next += 1
        if number not in self._blocks:
            self._keep(number, self._load(number))
        return self._blocks[number]

    def _keep(self, number: int, block: memoryview) -> None:
        self._blocks[number] = block
        if len(self._blocks) > _KEPT_BLOCKS:
            del self._blocks[next(iter(self._blocks))]

    def _load(self, number: int) -> memoryview:
        start = number * BLOCK_BYTES
        block = np.empty(min(BLOCK_BYTES, self.size - start), dtype=np.uint8).data
        try:
            self._store.read_into(self.key, start, block)
        except StoreError:
            # Is it the object, which has changed since it was listed, or the store?
            size = self._store.size(self.key)
            if size >= self.size:
                raise
            raise DataError(
                f"shard {self.name} has {size} bytes, {self.size} when it was listed: it changes"
            ) from None
        return block.toreadonly()


def label_of(text: str) -> int | str:
    """Return a label from text: a class number when it is a whole number, otherwise a class name."""
    stripped = text.strip()
    return int(stripped) if _WHOLE_NUMBER.fullmatch(stripped) else stripped
