"""Foreign shards that were written again after they were indexed, found by listing them.

A sample that is read is compared with its checksum. One whose features are kept is not read any more, so that an image
edited under its name would be used as it was. So the store's mark of change of each shard (ETag, or times of a file) is
noted beside the index when it is made::

    datasets/NAME/PACK/marks.safetensors   mark: xxh3_64 of each shard's mark, uint64 [shards]

It is no part of the dataset's version, which names content alone. The file system sets a file's time of status change
itself, so that an edit shows even when its other times were put back.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.data.manifest import Manifest, dataset_prefix
from hapi.data.shards import ShardTable
from hapi.errors import DataError, NotFoundError
from hapi.store.base import ObjectInfo, ObjectStore
from hapi.store.safetensors import decode_tensors, encode_tensors

VERIFY_BYTES = 256 << 20
"""Most bytes of shards with another mark that are read at a time, to see if their content is another one as well."""
_BLOCK = 8 << 20
_MARKS = "mark"

Marks = npt.NDArray[np.uint64]


def write_marks(
    store: ObjectStore, prefix: str, shards: ShardTable, listed: Iterable[ObjectInfo], below: int
) -> None:
    """Note the marks of an index's shards.

    Args:
        store: that has them.
        prefix: key prefix of the index.
        shards: of the index.
        listed: the objects as they were listed before they were read.
        below: characters of their keys before the names in ``shards``.
    """
    found = dict(listed_marks(listed, below))
    marks = np.array([found[shards.key(number)] for number in range(len(shards))], dtype=np.uint64)
    store.put(_key(prefix), encode_tensors({_MARKS: marks}))


def listed_marks(listed: Iterable[ObjectInfo], below: int = 0) -> Iterable[tuple[str, int]]:
    """Yield key (without its first ``below`` characters) and mark of each object."""
    for info in listed:
        yield info.key[below:], xxhash.xxh3_64_intdigest(f"{info.size} {info.changed}".encode())


def changed_shards(store: ObjectStore, manifest: Manifest, shards: ShardTable) -> int:
    """Return the number of foreign shards that are not as they were indexed; 0 for a packed dataset.

    Shards with another mark, such as those of a store that was copied, are read and compared where they have at most
    :data:`VERIFY_BYTES` together; otherwise they count as changed.
    """
    if manifest.in_place is None:
        return 0
    folder = manifest.in_place.folder
    below = len(folder) + 1 if folder else 0
    listed = {info.key[below:]: info for info in store.list(folder)}
    marks = dict(listed_marks(listed.values(), below))
    known = _read(store, manifest, len(shards))
    suspects = [
        number
        for number in range(len(shards))
        if known is None or marks.get(shards.key(number)) != int(known[number])
    ]
    as_long = [
        s for s in map(shards.__getitem__, suspects) if s.key in listed and listed[s.key].size == s.size
    ]
    if sum(shard.size for shard in as_long) > VERIFY_BYTES:
        return len(suspects)
    same = [s for s in as_long if _content(store, manifest.key_of(s.key), s.size) == s.checksum]
    return len(suspects) - len(same)


def _content(store: ObjectStore, key: str, size: int) -> int:
    state, block = xxhash.xxh3_64(), memoryview(bytearray(min(size, _BLOCK)))
    for start in range(0, size, _BLOCK):
        part = block[: min(_BLOCK, size - start)]
        store.read_into(key, start, part)
        state.update(part)
    return state.intdigest()


def marks_keys(manifest: Manifest) -> tuple[str, ...]:
    """Keys of the objects in a dataset's folder that have marks; none of a packed dataset."""
    return () if manifest.in_place is None else (_key(f"{dataset_prefix(manifest.name)}/{manifest.pack}"),)


def _key(prefix: str) -> str:
    return f"{prefix}/marks.safetensors"


def _read(store: ObjectStore, manifest: Manifest, count: int) -> Marks | None:
    """The marks of the index; None of one that was made by an older Hapi, or where they are damaged."""
    key = _key(f"{dataset_prefix(manifest.name)}/{manifest.pack}")
    try:
        tensors, _ = decode_tensors(np.frombuffer(store.get(key, 1 << 30), dtype=np.uint8), key)
    except (NotFoundError, DataError):
        return None
    marks = tensors.get(_MARKS)
    return marks if marks is not None and marks.dtype == np.uint64 and marks.shape == (count,) else None
