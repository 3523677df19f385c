"""Small images and foreign shards made of them, for the tests of formats and of indexing."""

from __future__ import annotations

import io
import tarfile
import uuid
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from hapi.ingest.formats.shard import ShardBytes
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.store.open import open_store

Members = Sequence[tuple[str, bytes]]


def image(number: int, form: str = "PNG", side: int = 8) -> bytes:
    """An encoded image that differs from number to number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def tar(members: Iterable[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar archive of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def samples(numbers: Iterable[int], classes: int = 3) -> list[tuple[str, bytes]]:
    """Members of WebDataset samples: an image and its class number each."""
    members = []
    for number in numbers:
        members += [
            (f"{number:06d}.png", image(number)),
            (f"{number:06d}.cls", str(number % classes).encode()),
        ]
    return members


def memory_store() -> ObjectStore:
    """A new store."""
    return open_store(f"memory://{uuid.uuid4().hex}")


def shard_of(data: bytes, name: str = "a.tar") -> ShardBytes:
    """The bytes as a shard of a new store."""
    store = memory_store()
    store.put(f"folder/{name}", data)
    return ShardBytes(store, ObjectInfo(f"folder/{name}", len(data)), name)
