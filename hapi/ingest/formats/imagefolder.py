"""Single images as objects: FOLDER/CLASS/**/image, as in torchvision's ImageFolder. Each object is one shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hapi.errors import UsageError
from hapi.ingest.formats.shard import Bad, Fields, Found, ShardBytes
from hapi.ingest.sources.folder import EXTENSIONS
from hapi.store.base import ObjectInfo, ObjectStore

NAME = "objects"
MAX_OBJECTS = 1_000_000
"""Most images: every object is a request of its own, when it is indexed and whenever it is read."""


def claims(base: str) -> bool:
    """Return whether this last part of a key is an image's."""
    return base.lower().endswith(EXTENSIONS)


def shards_of(store: ObjectStore, folder: str, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the images by name."""
    found = [info for info in objects if claims(info.key)]
    if len(found) > MAX_OBJECTS:
        raise UsageError(
            f"{store.url}/{folder} has {len(found)} images; up to {MAX_OBJECTS} single objects are indexed in place, "
            "pack them with 'hapi pack'"
        )
    return found


def scan(shard: ShardBytes, fields: Fields) -> Iterator[Found | Bad]:
    """Yield the object as a sample; its class is the first folder of its path."""
    label, slash, _ = shard.path.partition("/")
    yield Found(0, shard.size, label if slash else None, shard.path)
