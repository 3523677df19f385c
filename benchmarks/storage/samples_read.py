"""One figure of ``benchmarks samples``, in a process of its own: ``python -m benchmarks.storage.samples_read JSON``.

An epoch is read before the clock starts, as the first one of a process also pays for memory that was never touched, for
threads and tables. Then the files' pages are dropped (``posix_fadvise``, no root needed; checked with ``mincore``),
and for a warm page cache read in order, so that the kernel keeps them in the same large pieces for every reader. The
clock runs for one epoch with a cold page cache, with a warm one for as many as the time allows, in the same order.
Imports, opening and computing the order are outside of it. Directories and inodes stay in memory, to the file
readers' advantage.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.storage.samples_data import NAME, file_of
from benchmarks.storage.samples_peers import LIBRARIES, batches_of, open_form
from benchmarks.storage.shuffle_quality import quality
from benchmarks.testbed.processes import drop_pages
from hapi.arrays import IntArray
from hapi.data.epoch_order import Shuffle, epoch_sequence
from hapi.data.mount import mount
from hapi.errors import DataError

Batches = Generator[IntArray]
"""Ids of the samples of a batch, once it has been read."""


def read_figure(spec: dict[str, Any]) -> dict[str, Any]:
    """Read as ``spec`` says, for at most its ``seconds``; the figures."""
    folder, batch, longest = Path(spec["folder"]), int(spec["batch"]), float(spec["seconds"])
    kind, _, variant = str(spec["reader"]).partition(" ")
    name, pattern = {"hapi": ("store", "*.bin"), "raw": ("store", "*.bin")}.get(kind, (kind, "*"))
    paths = sorted(path for path in (folder / name).rglob(pattern) if path.is_file())
    begin, figures = _READERS[kind](folder, variant, batch)
    epochs = [_epoch(begin(), longest)]
    for path in paths:
        drop_pages(path)
        if not spec["cold"]:
            path.read_bytes()
    resident = _resident(paths)
    seconds = 0.0
    while seconds == 0 or (seconds < longest and not spec["cold"]):
        epochs.append(_epoch(begin(), longest - seconds))
        seconds += epochs[-1].seconds
    samples = sum(len(epoch.ids) for epoch in epochs[1:])
    found = {
        "rate": samples / seconds,
        "cpu_us": sum(epoch.cpu for epoch in epochs[1:]) / samples * 1e6,
        "samples": samples,
        "seconds": seconds,
        "resident": resident,
    }
    return found | figures(max((epoch.ids for epoch in epochs), key=len), seconds / samples)


@dataclass(frozen=True)
class _Epoch:
    """Samples read in one epoch."""

    ids: IntArray
    seconds: float
    cpu: float


def _epoch(batches: Batches, longest: float) -> _Epoch:
    """Read an epoch to its end, or until it has taken so many seconds."""
    seen: list[IntArray] = []
    started, used = time.perf_counter(), time.process_time()
    for ids in batches:
        seen.append(ids)
        if time.perf_counter() - started > longest:
            break
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    batches.close()
    return _Epoch(np.concatenate(seen), seconds, cpu)


_LOCATED = 1 << 14
_UNDER_WAY = 3
"""Batches that plain readers have under way, as many as ``next_batch`` has of large ones."""
Begin = Callable[[], Batches]
Figures = Callable[[IntArray, float], dict[str, Any]]
"""Further figures: ids of the longest epoch, and the seconds of a sample."""


def _hapi(folder: Path, variant: str, batch: int) -> tuple[Begin, Figures]:
    reader = mount(f"{folder / 'store'}/{NAME}")
    dataset = reader.dataset
    shuffle = Shuffle.parse("full" if variant == "full" else "chunks", dataset.reader.default_shuffle)
    order = shuffle.sequence(1, 0, dataset.count)

    def begin() -> Batches:
        reader.sequence(1, 0, order, shuffle=shuffle)
        try:
            while len(samples := reader.next_batch(batch)):
                yield samples.ids
        finally:
            reader.sequence(1, 0, order, start=len(order), shuffle=shuffle)  # nothing is read ahead any more

    def figures(ids: IntArray, seconds: float) -> dict[str, Any]:
        started = time.perf_counter()
        for first in range(0, len(ids), _LOCATED):
            dataset.locate(ids[first : first + _LOCATED])
        lookup = (time.perf_counter() - started) / len(ids)
        return {"lookup_share": lookup / seconds, "quality": order_score(order, batch)}

    return begin, figures


def _raw(folder: Path, variant: str, batch: int) -> tuple[Begin, Figures]:
    """Bare ``preadv`` of the same ranges of the same shards in the full permutation, "checked" or not at all."""
    threads, _, check = variant.partition(" ")
    with mount(f"{folder / 'store'}/{NAME}") as reader:
        dataset = reader.dataset
        located = dataset.locate(np.arange(dataset.count))
        order = epoch_sequence(1, 0, dataset.count)
        keys = [dataset.shard_key(number) for number in range(len(dataset.shards))]
        sums = dataset.index.checksum.copy()
    descriptors = [os.open(folder / "store" / key, os.O_RDONLY) for key in keys]
    starts, lengths, shards = located.offset, located.length, located.shard
    largest = int(np.sort(lengths)[-batch:].sum())
    buffers = itertools.cycle([np.zeros(largest, dtype=np.uint8).data for _ in range(_UNDER_WAY + 1)])

    def tasks(ids: IntArray) -> list[Callable[[], None]]:
        """A batch into one of the buffers, in the samples' order, a part of it for each thread."""
        buffer, ends = next(buffers), np.cumsum(lengths[ids])
        table = np.stack((ids, shards[ids].astype(np.int64), starts[ids], ends - lengths[ids], ends), axis=1)

        def read(part: IntArray) -> None:
            found = [0] * (len(part) if check else 0)
            for at, (_, shard, start, low, high) in enumerate(part.tolist()):
                os.preadv(descriptors[shard], [buffer[low:high]], start)
                if check:
                    found[at] = xxhash.xxh3_64_intdigest(buffer[low:high])
            if check and not np.array_equal(np.array(found, dtype=np.uint64), sums[part[:, 0]]):
                raise DataError(f"the benchmark's data in {folder} fail their checksums")

        return [partial(read, part) for part in np.array_split(table, int(threads)) if len(part)]

    return _threaded(tasks, order, int(threads), batch), lambda ids, seconds: {
        "quality": order_score(order, batch)
    }


def _files(folder: Path, variant: str, batch: int) -> tuple[Begin, Figures]:
    count = sum(len(files) for _, _, files in os.walk(folder / "files"))
    order = epoch_sequence(1, 0, count)
    paths = [str(file_of(folder, number)) for number in range(count)]

    def read(ids: IntArray) -> None:
        for number in ids.tolist():
            descriptor = os.open(paths[number], os.O_RDONLY)
            os.read(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)

    def tasks(ids: IntArray) -> list[Callable[[], None]]:
        return [partial(read, part) for part in np.array_split(ids, int(variant)) if len(part)]

    return _threaded(tasks, order, int(variant), batch), lambda ids, seconds: {
        "quality": order_score(order, batch)
    }


def _threaded(
    tasks: Callable[[IntArray], list[Callable[[], None]]], order: IntArray, threads: int, batch: int
) -> Begin:
    """Batches read by ``threads`` threads, each a share of every batch; a few batches under way."""

    def begin() -> Batches:
        under_way: deque[tuple[IntArray, list[Future[None]]]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(order), batch):
                ids = order[first : first + batch]
                under_way.append((ids, [pool.submit(task) for task in tasks(ids)]))
                if len(under_way) == _UNDER_WAY:
                    yield _ended(under_way)
            while under_way:
                yield _ended(under_way)

    return begin


def _ended(under_way: deque[tuple[IntArray, list[Future[None]]]]) -> IntArray:
    ids, futures = under_way.popleft()
    for future in futures:
        future.result()
    return ids


def _peer(form: str, folder: Path, variant: str, batch: int) -> tuple[Begin, Figures]:
    count = sum(len(files) for _, _, files in os.walk(folder / "files"))

    def figures(ids: IntArray, seconds: float) -> dict[str, Any]:
        whole = len(ids) == count
        return {"quality": order_score(ids, batch) if whole else None}

    epoch = open_form(form, folder, batch)
    return lambda: batches_of(epoch(), batch), figures


_READERS = {"hapi": _hapi, "raw": _raw, "files": _files} | {form: partial(_peer, form) for form in LIBRARIES}


def order_score(order: IntArray, batch: int) -> float | None:
    """The quality of an order to batches; None where it is too short to tell."""
    return quality(order, batch).score if len(order) >= 2 * batch else None


def _resident(paths: list[Path]) -> float:
    """Share of the pages of these files (of 200 of them at most) that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    resident = pages = 0
    for path in paths[:: max(1, len(paths) // 200)]:
        size = path.stat().st_size
        if size == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, dtype=np.uint8)
            found = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
            if libc.mincore(view.ctypes.data, size, found.ctypes.data):
                raise OSError(ctypes.get_errno(), "mincore")
            resident, pages = resident + int((found & 1).sum()), pages + len(found)
            del view
    return resident / max(1, pages)


if __name__ == "__main__":
    print(json.dumps(read_figure(json.loads(sys.argv[1]))))
