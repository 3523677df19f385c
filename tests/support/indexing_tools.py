"""A store with three tar shards, indexed in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hapi.ingest.in_place.discover import find_folder
from hapi.ingest.in_place.indexer import Indexed, IndexOptions, index_folder
from hapi.store.base import ObjectStore
from support.formats_tools import samples, tar

OPTIONS = IndexOptions(workers=2)


def index(store: ObjectStore, folder: str = "wds", name: str = "d", **options: Any) -> Indexed:
    flags = {
        key: options.pop(key)
        for key in ("replace", "restart", "keep_old", "on_start", "on_progress")
        if key in options
    }
    found = find_folder(store, folder, options.pop("format", None))
    return index_folder(store, name, found, replace_options(options), **flags)


def replace_options(changes: dict[str, Any]) -> IndexOptions:
    return replace(OPTIONS, **changes)


def three_shards(store: ObjectStore) -> None:
    for shard in range(3):
        store.put(f"wds/part/{shard:03d}.tar", tar(samples(range(10 * shard, 10 * shard + 10))))


def everything(store: ObjectStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list() if not info.key.startswith("datasets/")}
