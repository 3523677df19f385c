"""The state of an unfinished packing in the store, from which the same command goes on.

    no packing -- begin --> packing.json is there
    packing    -- shard --> shard-N.bin, then shard-N.part.safetensors: the shard counts from the second on
    packing    -- all shards --> index.safetensors, then manifest.json (the data set is there from here on)
    finished   -- clean --> parts, earlier packs and, last of all, packing.json are removed

A kill between any two of these steps leaves one of these states, never a data set that only looks whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

import numpy as np

from hapi.errors import BadRequestError, DataError, NotFoundError
from hapi.storage.index import SampleIndex
from hapi.storage.listing import PACKING_NAME
from hapi.storage.manifest import Shard, dataset_prefix, manifest_key
from hapi.storage.objects import ObjectStore
from hapi.storage.runs import runs_of
from hapi.wire.references import check_digest, check_name, strict_fields

LOCK_NAME = "pack.lock"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What ``packing.json`` says: the id of the packing, and what is being packed, how."""

    pack: str
    fingerprint: str
    """Digest of source and options: equal means the same samples in the same shards."""
    source: str
    created: str

    def to_bytes(self) -> bytes:
        return json.dumps(self.__dict__, indent=1).encode()

    @classmethod
    def load(cls, store: ObjectStore, name: str) -> Self | None:
        """The unfinished packing of ``name``; None when there is none, :class:`DataError` on damage."""
        key = f"{dataset_prefix(name)}/{PACKING_NAME}"
        try:
            data = store.get(key)
        except NotFoundError:
            return None
        try:
            fields = ("pack", "fingerprint", "source", "created")
            d = strict_fields(json.loads(data), dict.fromkeys(fields, True), "packing")
            check_name(d["pack"], "packing.pack")
            check_digest(d["fingerprint"], "packing.fingerprint")
            return cls(
                pack=d["pack"],
                fingerprint=d["fingerprint"],
                source=str(d["source"]),
                created=str(d["created"]),
            )
        except (ValueError, BadRequestError) as error:
            raise DataError(
                f"{store.url}/{key} is damaged ({error}); pass --restart to begin anew"
            ) from error


@dataclass(frozen=True)
class ShardPart:
    """The piece of the index that belongs to one shard."""

    shard: Shard
    index: SampleIndex


class PackFolder:
    """The objects of one packing in the store."""

    def __init__(self, store: ObjectStore, name: str, pack: str) -> None:
        self.store = store
        self.name = name
        self.pack = pack
        self.prefix = f"{dataset_prefix(name)}/{pack}"

    def _part_key(self, number: int) -> str:
        return f"{self.prefix}/shard-{number:05d}.part.safetensors"

    def write_shard(self, number: int, data: memoryview, shard: Shard, index: SampleIndex) -> None:
        """The shard, and then its part of the index, which makes it count."""
        self.store.put(f"{self.prefix}/{shard.key}", data)
        metadata = {"size": str(shard.size), "xxh3": shard.xxh3, "index": index.digest()}
        self.store.put(self._part_key(number), index.to_bytes(metadata))

    def read_part(self, number: int) -> ShardPart | None:
        """A completed shard; None when it is not there or not whole."""
        key = self._part_key(number)
        try:
            buffer = np.frombuffer(self.store.get(key), dtype=np.uint8)
            index, metadata = SampleIndex.from_buffer(buffer, key)
            shard = Shard(
                key=shard_name(number), size=int(metadata["size"]), xxh3=metadata["xxh3"], count=len(index)
            )
            index.directory.check([shard], key, first_shard=number)
            if index.digest() != metadata["index"] or len(index.run) != runs_of(shard.size, shard.count):
                return None
            if self.store.size(f"{self.prefix}/{shard.key}") != shard.size:
                return None
            return ShardPart(shard, index)
        except (NotFoundError, DataError, KeyError, ValueError):
            return None

    def clean(self, keep: bool) -> None:
        """Remove all of the data set but its manifest and (with ``keep``) this packing's shards and index.

        ``packing.json`` goes last, so that an interrupted cleaning is done again.
        """
        prefix = dataset_prefix(self.name)
        last = f"{prefix}/{PACKING_NAME}"
        for info in self.store.list(prefix):
            mine = info.key.startswith(f"{self.prefix}/") and not info.key.endswith(".part.safetensors")
            if info.key in (last, manifest_key(self.name), f"{prefix}/{LOCK_NAME}") or (keep and mine):
                continue
            self.store.delete(info.key)
        self.store.clean_temporary(prefix)
        self.store.delete(last)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"
