"""One process of ``benchmarks directory``: opens a dataset's index, finds samples, and tells what that took.

Arguments: the store's folder, the dataset's name, batch sizes. The answer is a JSON object on stdout.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.testbed.tiers import process_bytes
from hapi.data.dataset import Dataset, find_dataset
from hapi.data.index import digest
from hapi.data.index_file import read_own
from hapi.data.manifest import load_manifest
from hapi.store.base import ObjectStore
from hapi.store.open import open_store

_WARM = 5
_LOOKUP_IDS = 1 << 20
"""Samples found with each batch size."""


def main() -> None:
    """Measure, and print the answer."""
    folder, name, *batches = sys.argv[1:]
    store = open_store(folder)
    before = {part: process_bytes(os.getpid(), key) for part, key in _RESIDENT.items()}
    from_disk = _read_bytes()
    cold, dataset = _timed(lambda: find_dataset(store, name))
    from_disk = _read_bytes() - from_disk
    warm = []
    for _ in range(_WARM):
        # The one before goes first, as it would with a process that opens it once.
        del dataset
        gc.collect()
        seconds, dataset = _timed(lambda: find_dataset(store, name))
        warm.append(seconds)
    lookup = {size: _lookup(dataset, int(size)) for size in batches}
    resident = {part: process_bytes(os.getpid(), key) - before[part] for part, key in _RESIDENT.items()}
    parts = _parts(store, dataset)
    answer = {"cold": cold, "from_disk": from_disk, "warm": warm, "parts": parts}
    print(json.dumps({**answer, "lookup": lookup, "resident": resident}))


_RESIDENT = {"private": "RssAnon", "mapped": "RssFile"}


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def _lookup(dataset: Dataset, size: int) -> list[float]:
    """Nanoseconds a sample of each batch of ``size`` random ids."""
    rng = np.random.default_rng(size)
    batches = [rng.integers(0, dataset.count, size) for _ in range(max(3, _LOOKUP_IDS // size))]
    dataset.locate(batches[0])
    return [_timed(partial(dataset.locate, ids))[0] / size * 1e9 for ids in batches]


def _parts(store: ObjectStore, dataset: Dataset) -> dict[str, list[float]]:
    """Seconds of what a warm opening consists of."""
    key, size, name = dataset.manifest.index_key, dataset.manifest.index_size, dataset.name
    shards = dataset.shards
    parts: dict[str, list[float]] = {"manifest": [], "reading and checksum": [], "places within shards": []}
    for _ in range(_WARM):
        parts["manifest"].append(_timed(lambda: load_manifest(store, name))[0])
        parts["reading and checksum"].append(_timed(lambda: digest(read_own(store, key, size)))[0])
        parts["places within shards"].append(
            _timed(lambda: dataset.index.directory.check(shards, key, ""))[0]
        )
    return parts


def _read_bytes() -> int:
    """Bytes that this process has fetched from a device so far."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
