"""``hapi verify``: every byte of a data set is read and held against every checksum there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from hapi.errors import DataError, NotFoundError
from hapi.storage.dataset import read_index
from hapi.storage.index import SampleIndex, offsets_of
from hapi.storage.listing import PACKING_NAME
from hapi.storage.manifest import Manifest, dataset_prefix, load_manifest, manifest_key
from hapi.storage.objects import ObjectStore
from hapi.storage.packing import LOCK_NAME

BLOCK_BYTES = 8 << 20
"""Bytes read at once (more when one sample is larger)."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Damage:
    """One finding; ``str()`` is the line that ``hapi verify`` prints."""

    where: str
    """Key of the object."""
    problem: str
    sample: int | None = None
    start: int | None = None
    """The damaged sample's bytes in the object: ``start..stop``, stop excluded."""
    stop: int | None = None

    def __str__(self) -> str:
        sample = "" if self.sample is None else f" sample {self.sample}, bytes {self.start}..{self.stop}:"
        return f"{self.where}:{sample} {self.problem}"


@dataclass
class VerifyReport:
    """What was read, and what was found."""

    name: str
    version: str | None = None
    samples: int = 0
    size: int = 0
    """Bytes of shards that were read."""
    damages: list[Damage] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.damages


def verify_dataset(
    store: ObjectStore,
    name: str,
    *,
    on_damage: Callable[[Damage], None] = lambda damage: None,
    on_start: Callable[[Manifest], None] = lambda manifest: None,
    on_progress: Progress = lambda samples, size: None,
) -> VerifyReport:
    """Check manifest, index, every shard and every sample; damage is told as it is found, and collected.

    ``on_start`` is called with the manifest before the samples are read. :class:`NotFoundError` when there
    is no such data set, :class:`StoreError` when the store itself fails.
    """
    report = VerifyReport(name)

    def found(damage: Damage) -> None:
        report.damages.append(damage)
        on_damage(damage)

    try:
        manifest = load_manifest(store, name)
    except DataError as error:
        found(Damage(manifest_key(name), str(error)))
        return report
    report.version = manifest.version
    on_start(manifest)
    index: SampleIndex | None = None
    try:
        index = read_index(store, manifest)
    except DataError as error:
        found(Damage(manifest.index_key, str(error)))
    first = 0
    for number, shard in enumerate(manifest.shards):
        for damage in _shard_damages(store, manifest, number, index, first, report, on_progress):
            found(damage)
        first += shard.count
    for damage in _extra_objects(store, manifest):
        found(damage)
    return report


def _shard_damages(
    store: ObjectStore,
    manifest: Manifest,
    number: int,
    index: SampleIndex | None,
    first: int,
    report: VerifyReport,
    on_progress: Progress,
) -> Iterator[Damage]:
    shard, key = manifest.shards[number], manifest.shard_key(number)
    try:
        size = store.size(key)
    except NotFoundError:
        yield Damage(key, f"missing, with samples {first} to {first + shard.count - 1}")
        return
    if size != shard.size:
        yield Damage(key, f"has {size} bytes instead of {shard.size}")
    state = xxhash.xxh3_64()
    damaged = size != shard.size
    for low, bounds in _blocks(index, first, shard.count, shard.size):
        stop = min(int(bounds[-1]), size)
        block = np.empty(max(0, stop - int(bounds[0])), dtype=np.uint8)
        store.read_into(key, int(bounds[0]), block.data)
        state.update(block.data)
        if index is not None:
            for damage in _sample_damages(key, index, low, bounds, block):
                damaged = True
                yield damage
            report.samples += len(bounds) - 1
        report.size += len(block)
        on_progress(len(bounds) - 1 if index is not None else 0, len(block))
    if not damaged and state.hexdigest() != shard.xxh3:
        yield Damage(key, "fails the checksum of the whole shard")


def _blocks(index: SampleIndex | None, first: int, count: int, size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Stretches of a shard of about ``BLOCK_BYTES``: the first sample, and where its samples start and end.

    Without an index the stretches are plain pieces of the shard.
    """
    if index is None:
        for start in range(0, size, BLOCK_BYTES):
            yield first, np.array([start, min(start + BLOCK_BYTES, size)], dtype=np.int64)
        return
    bounds = offsets_of(index.length[first : first + count])
    low = 0
    while low < count:
        high = int(np.searchsorted(bounds, bounds[low] + BLOCK_BYTES, side="right")) - 1
        high = min(max(high, low + 1), count)
        yield first + low, bounds[low : high + 1]
        low = high


def _sample_damages(
    key: str, index: SampleIndex, low: int, bounds: np.ndarray, block: np.ndarray
) -> Iterator[Damage]:
    base, view = int(bounds[0]), block.data
    expected = index.checksum[low : low + len(bounds) - 1].tolist()
    edges = bounds.tolist()
    for position, checksum in enumerate(expected):
        start, stop = edges[position], edges[position + 1]
        if stop - base > len(view):
            yield Damage(key, "cut off", low + position, start, stop)
        elif xxhash.xxh3_64_intdigest(view[start - base : stop - base]) != checksum:
            yield Damage(key, "fails its checksum", low + position, start, stop)


def _extra_objects(store: ObjectStore, manifest: Manifest) -> Iterator[Damage]:
    """Objects that belong to nothing; none are named while a packing of the name is under way."""
    prefix = dataset_prefix(manifest.name)
    if store.exists(f"{prefix}/{PACKING_NAME}"):
        return
    known = {manifest_key(manifest.name), manifest.index_key, f"{prefix}/{LOCK_NAME}"}
    known.update(manifest.shard_key(number) for number in range(len(manifest.shards)))
    for info in store.list(prefix):
        # A store's listing may still have what was just deleted (Swift's, when a node is down).
        if info.key not in known and store.exists(info.key):
            yield Damage(info.key, f"belongs to nothing ({info.size} bytes); it can be removed")
