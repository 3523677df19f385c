"""The formats by name, and which of them lies in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from hapi.storage.formats.shard import Bad, Fields, Found, ShardBytes
from hapi.storage.objects import ObjectInfo, ObjectStore


class Format(Protocol):
    """A module of this package; see ``shard.py``."""

    NAME: str

    def claims(self, base: str) -> bool: ...

    def shards_of(
        self, store: ObjectStore, folder: str, objects: Sequence[ObjectInfo]
    ) -> list[ObjectInfo]: ...

    def scan(self, shard: ShardBytes, fields: Fields) -> Iterator[Found | Bad]: ...
