"""``hapi verify``: every byte of a dataset is read and compared with the checksums of shards and samples.

Checksums of runs are left out: a wrong one only makes a reader check the samples themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from hapi.arrays import Bytes, IntArray
from hapi.data.index import SampleIndex
from hapi.data.index_file import read_index
from hapi.data.listing import LOCK_NAME, PACKING_NAME
from hapi.data.manifest import REMEDY, Manifest, dataset_prefix, load_manifest, manifest_key
from hapi.data.replaced import kept
from hapi.data.shard_marks import marks_keys
from hapi.data.tensor_check import Check, tensor_check
from hapi.errors import DataError, NotFoundError
from hapi.store.base import ObjectStore, is_key
from hapi.store.damage import BLOCK_BYTES, Damage, Progress, VerifyReport
from hapi.store.locking.locks import is_lock_object


def verify_dataset(
    store: ObjectStore,
    name: str,
    *,
    on_damage: Callable[[Damage], None] = lambda damage: None,
    on_start: Callable[[Manifest], None] = lambda manifest: None,
    on_progress: Progress = lambda samples, size: None,
) -> VerifyReport:
    """Check manifest, index, every shard and every sample.

    Args:
        store: where the dataset lies.
        name: its name there.
        on_damage: told each finding.
        on_start: told the manifest, before samples are read.
        on_progress: told samples and bytes since its last call.

    Returns:
        A report with all findings.

    Raises:
        NotFoundError: there is no such dataset.
        StoreError: the store itself fails.
    """
    report = VerifyReport(name, remedy=REMEDY, on_damage=on_damage)
    try:
        manifest = load_manifest(store, name)
    except DataError as error:
        report.add(Damage(manifest_key(name), str(error)))
        return report
    report.version, report.remedy = manifest.version, manifest.remedy
    on_start(manifest)
    try:
        index = read_index(store, manifest)
    except DataError as error:
        report.add(Damage(manifest.index_key, f"{error} (without it the shards cannot be verified)"))
        return report
    keys, check = [], tensor_check(manifest.layout)
    for number in range(len(index.shards)):
        keys.append(manifest.key_of(index.shards.key(number)))
        for damage in _shard_damages(store, keys[-1], number, index, check, report, on_progress):
            report.add(damage)
    for damage in _extra_objects(store, manifest, keys):
        report.add(damage)
    return report


def _shard_damages(
    store: ObjectStore,
    key: str,
    number: int,
    index: SampleIndex,
    check: Check,
    report: VerifyReport,
    on_progress: Progress,
) -> Iterator[Damage]:
    shard, first = index.shards[number], int(index.shards.firsts[number])
    try:
        size = store.size(key)
    except NotFoundError:
        yield Damage(key, f"missing, with samples {first} to {first + shard.count - 1}")
        return
    if size != shard.size:
        yield Damage(key, f"has {size} bytes instead of {shard.size}")
    ids = np.arange(first, first + shard.count)
    located = index.directory.locate(ids)
    starts, stops = located.offset, located.offset + located.length
    state, hashed = xxhash.xxh3_64(), 0
    damaged = size != shard.size
    for begin, end, members in _blocks(starts, stops, min(size, shard.size)):
        block = np.empty(max(0, min(end, size) - begin), dtype=np.uint8)
        if len(block):
            store.read_into(key, begin, block.data)
        new = block[hashed - begin :]
        state.update(new.data)
        hashed += len(new)
        wrong = _wrong_samples(index.checksum[ids], members, starts, stops, begin, block, check)
        for position, problem in wrong:
            damaged = True
            yield Damage(key, problem, first + position, int(starts[position]), int(stops[position]))
        report.samples += len(members)
        report.size += len(new)
        on_progress(len(members), len(new))
    if not damaged and state.intdigest() != shard.checksum:
        yield Damage(key, "fails the checksum of the whole shard")


def _blocks(starts: IntArray, stops: IntArray, size: int) -> Iterator[tuple[int, int, IntArray]]:
    """Stretches of a shard of about ``BLOCK_BYTES``, and which samples each of them holds whole.

    Samples may lie in any order, apart or over one another. The stretches cover the shard in order: each
    begins within what was covered, or where that ends; every sample is in one of them. Beyond
    ``size`` only samples are looked at.
    """
    order = np.argsort(starts, kind="stable")
    ordered = starts[order]
    covered, low = 0, 0
    while covered < size or low < len(order):
        begin = covered if low == len(order) else int(ordered[low])
        if covered < size:
            begin = min(begin, covered)
        high = int(np.searchsorted(ordered, begin + BLOCK_BYTES))
        members = order[low:high]
        end = int(stops[members].max()) if len(members) else min(begin + BLOCK_BYTES, size)
        yield begin, end, members
        covered, low = max(covered, end), high


def _wrong_samples(
    checksums: npt.NDArray[np.uint64],
    members: IntArray,
    starts: IntArray,
    stops: IntArray,
    begin: int,
    block: Bytes,
    check: Check,
) -> Iterator[tuple[int, str]]:
    """Samples of a block that are not what they should be: their place in the shard, and the problem."""
    view = block.data
    expected = checksums[members].tolist()
    edges = zip(starts[members].tolist(), stops[members].tolist(), strict=True)
    for position, (start, stop), checksum in zip(members.tolist(), edges, expected, strict=True):
        if stop - begin > len(view):
            yield position, "cut off"
        elif xxhash.xxh3_64_intdigest(view[start - begin : stop - begin]) != checksum:
            yield position, "fails its checksum"
        elif (problem := check(view[start - begin : stop - begin])) is not None:
            yield position, problem


def _extra_objects(store: ObjectStore, manifest: Manifest, shards: Sequence[str]) -> Iterator[Damage]:
    """Objects that belong to nothing; none are named while a packing of the name is under way."""
    prefix = dataset_prefix(manifest.name)
    if store.exists(f"{prefix}/{PACKING_NAME}"):
        return
    known = {manifest_key(manifest.name), manifest.index_key, *marks_keys(manifest), *shards}
    listed = store.list(prefix)
    known |= kept(store, manifest.name, manifest, [info.key for info in listed])
    known |= {info.key for info in listed if is_lock_object(info.key, f"{prefix}/{LOCK_NAME}")}
    for info in listed:
        # A store's listing may still have what was just deleted (Swift's, when a node is down).
        if info.key not in known and (not is_key(info.key) or store.exists(info.key)):
            yield Damage(info.key, f"belongs to nothing ({info.size} bytes); it can be removed", extra=True)
