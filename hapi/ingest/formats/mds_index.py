"""The ``index.json`` of a MosaicML MDS dataset: its shards, and their sizes and digests.

Version 2 of MosaicML's streaming library (``base/format/base/writer.py``): for each shard the name, size and
digests of its file (``raw_data``), those of its compressed form if there is one (``zip_data``), and its
number of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from hapi.errors import BadRequestError, DataError, UsageError
from hapi.store.base import ObjectInfo, ObjectStore, check_key
from hapi.wire.documents import parse_document

INDEX = "index.json"
_MAX_INDEX_BYTES = 512 << 20
"""About 700 bytes a shard: 750,000 shards."""
_MAX_VALUES = 40_000_000
"""About 40 a shard."""
DIGESTS = frozenset(hashlib.algorithms_guaranteed - {"shake_128", "shake_256"} | xxhash.algorithms_available)
"""Kinds of digests that the streaming library offers. Others are not checked."""


@dataclass(frozen=True)
class MdsShard(ObjectInfo):
    """A shard with its entry in ``index.json``."""

    samples: int
    digests: tuple[tuple[str, str], ...]
    """Kinds of :data:`DIGESTS`, and the whole object's hexadecimal digest of each."""


def listed_shards(store: ObjectStore, folder: str, objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Return the shards of ``folder`` in the order of its ``index.json``.

    Args:
        store: where they lie.
        folder: key prefix of the dataset.
        objects: all objects below the folder.

    Raises:
        UsageError: there is no index, several below it, or only compressed shards.
        DataError: the index is damaged, or a shard does not exist in its size.
    """
    prefix = f"{folder.rstrip('/')}/" if folder else ""
    by_key = {info.key: info for info in objects}
    key = f"{prefix}{INDEX}"
    if key not in by_key:
        raise _no_index(store, folder, [info.key.removeprefix(prefix) for info in objects])
    where = f"{store.url}/{key}"
    if by_key[key].size > _MAX_INDEX_BYTES:
        raise DataError(f"{where} has {by_key[key].size} bytes; up to {_MAX_INDEX_BYTES} are read")
    found: dict[str, MdsShard] = {}
    for number, entry in enumerate(_entries(store.get(key, _MAX_INDEX_BYTES), where)):
        shard = _shard(entry, f"{where}, shard {number}", prefix, by_key)
        if shard.key in found:
            raise DataError(f"{where} lists {shard.key[:200]!r} twice; write the index again")
        found[shard.key] = shard
    return list(found.values())


def _no_index(store: ObjectStore, folder: str, paths: Sequence[str]) -> UsageError:
    below = sorted({path.rpartition("/")[0] for path in paths if path.rpartition("/")[2] == INDEX})
    what = f"{store.url}/{folder}"
    if not below:
        return UsageError(
            f"{what} has MDS shards but no {INDEX}, which says which of them belong together; "
            "finish writing them, or give the folder that has it"
        )
    names = ", ".join(below[:5]) + (f" and {len(below) - 5} more" if len(below) > 5 else "")
    return UsageError(
        f"{what} has no {INDEX} of its own, but its folders {names} have: index each of them, as in "
        f"{'/'.join(filter(None, (folder.rstrip('/'), below[0])))}, or merge them with streaming's merge_index"
    )


def _entries(data: bytes, where: str) -> list[Any]:
    try:
        document = parse_document(data, _MAX_VALUES)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {str(error)[:200]}; write the index again") from error
    if not isinstance(document, dict) or not isinstance(document.get("shards"), list):
        raise DataError(f"{where} is no index of MDS shards: it has no list 'shards'")
    if document.get("version") != 2:
        raise DataError(f"{where} has version {str(document.get('version'))[:40]!r}; version 2 is understood")
    return list(document["shards"])


def _shard(entry: Any, where: str, prefix: str, by_key: Mapping[str, ObjectInfo]) -> MdsShard:
    if not isinstance(entry, dict) or not isinstance(entry.get("raw_data"), dict):
        raise DataError(f"{where}: it has no field 'raw_data'; write the index again")
    if entry.get("format") != "mds" or entry.get("version") != 2:
        found = f"{str(entry.get('format'))[:40]!r} of version {str(entry.get('version'))[:40]!r}"
        raise DataError(f"{where} has format {found}; 'mds' of version 2 can be read in place")
    raw = entry["raw_data"]
    key = _key(prefix, raw.get("basename"), where)
    if key not in by_key:
        if entry.get("compression") or entry.get("zip_data"):
            raise UsageError(
                f"{where} is compressed ({str(entry.get('compression'))[:40]}), so that samples cannot be read from "
                "the middle of it: decompress the shards, or pack the images with 'hapi pack'"
            )
        raise DataError(f"{where}: {key[:200]!r} is not there; copy it again, or write the index again")
    info = by_key[key]
    if raw.get("bytes") != info.size:
        found = str(raw.get("bytes"))[:40]
        raise DataError(
            f"{where}: {key[:200]!r} has {info.size} bytes, not {found}: it is cut off or another file"
        )
    samples = entry.get("samples")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
        raise DataError(f"{where}: its number of samples is {str(samples)[:40]!r}; write the index again")
    return MdsShard(key, info.size, samples, _digests(raw.get("hashes"), where), changed=info.changed)


def _key(prefix: str, basename: Any, where: str) -> str:
    try:
        if not isinstance(basename, str):
            raise BadRequestError(f"its file's name is {str(basename)[:40]!r}")
        return check_key(prefix + basename)
    except BadRequestError as error:
        raise DataError(f"{where}: {error}; write the index again") from error


def _digests(hashes: Any, where: str) -> tuple[tuple[str, str], ...]:
    table = {} if hashes is None else hashes
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise DataError(f"{where}: its hashes are no table of texts; write the index again")
    return tuple((kind, value.lower()) for kind, value in sorted(table.items()) if kind in DIGESTS)
