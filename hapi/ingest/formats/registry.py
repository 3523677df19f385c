"""The formats by name, and the choice of the one that lies in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from hapi.errors import UsageError
from hapi.ingest.formats import imagefolder as objects
from hapi.ingest.formats import mds, tfrecord, webdataset
from hapi.ingest.formats.shard import Bad, Fields, Found, ShardBytes
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.text import counted


class Format(Protocol):
    """A module of this package; see ``shard.py``."""

    NAME: str

    def claims(self, base: str) -> bool:
        """Return whether an object with this last part of a key is a sign of the format."""

    def shards_of(self, store: ObjectStore, folder: str, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        """Return the shards among ``objects``, in their order."""

    def scan(self, shard: ShardBytes, fields: Fields) -> Iterator[Found | Bad]:
        """Yield the samples of one shard in their order."""


_ALL: tuple[Format, ...] = (webdataset, mds, tfrecord, objects)
FORMATS: Mapping[str, Format] = {module.NAME: module for module in _ALL}


def choose(where: str, listed: Sequence[ObjectInfo]) -> Format:
    """Return the format of the objects below ``where``; :class:`UsageError` when there is none, or more than
    one.
    """
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for info in listed:
        base = info.key.rpartition("/")[2]
        for name, module in FORMATS.items():
            if module.claims(base):
                counts[name] = counts.get(name, 0) + 1
                examples.setdefault(name, base)
    if not counts:
        names = ", ".join(info.key.rpartition("/")[2] for info in listed[:3])
        raise UsageError(
            f"{where} has no shards and no images that Hapi knows by their names "
            f"({counted(len(listed), 'object')}: {names}{', ...' if len(listed) > 3 else ''}); "
            "give another folder, or name their format with --format"
        )
    if len(counts) > 1:
        found = ", ".join(f"{counts[name]} of {name} ({examples[name]})" for name in counts)
        raise UsageError(
            f"{where} has a mixture of formats: {found}; give a folder with one of them, or choose with --format"
        )
    return FORMATS[next(iter(counts))]
