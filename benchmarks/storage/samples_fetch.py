"""One figure of ``benchmarks samples --over``, in a process of its own: ``python -m
benchmarks.storage.samples_fetch JSON``.

The client's side: stored samples by ``POST /v1/samples`` or by ``mount``, checked as a trainer checks them, or plain
ranges of the same shards that nobody looks at. All of them with the same number of connections, into buffers that are
used again. Both sides have fetched for a while before the clock starts, which pays for memory that was never touched.
An epoch that ends is followed by the next one; computing their orders is outside of the clock, as for a disk.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from benchmarks.storage.samples_data import LARGE, NAME
from hapi.arrays import IntArray
from hapi.data.epoch_order import FULL, EpochOrder, Shuffle, epoch_sequence
from hapi.data.mount import mount
from hapi.errors import TransportError, WireError
from hapi.wire import messages
from hapi.wire.frame_reader import FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd, byte_view
from hapi.wire.sequences import SequenceRange
from hapi.wire.transport.http import HttpTransport

RANGE_BYTES = 16 << 20
"""Bytes of a plain download's range: those that a store's best client requests at once."""
REQUEST_BYTES = 8 << 20
"""Stored bytes of a request for samples, like a stretch that ``mount`` reads ahead; at most 65536 samples."""
REQUEST_SAMPLES = 128
"""Samples of a trainer's request: ``hapi-train``'s default."""
SEED = 1
EPOCHS = 4
"""Different ones that follow each other, again and again: a cache at the end of one has little of the next one."""
WARM_PART = 0.5
"""Share of a figure's time that is spent before its clock starts."""
_TIMEOUT = 600.0
"""Seconds: a fully shuffled request for small samples reads a whole dataset from a remote store."""
Task = Callable[[int], int]
"""Fetches something as the worker of that number; the samples (or bytes) that came."""


def fetch_figure(spec: dict[str, Any]) -> dict[str, Any]:
    """Fetch as ``spec`` says, for about its ``seconds``; the figures."""
    kind, _, variant = str(spec["reader"]).partition(" ")
    begin = {"plain": _plain, "server": _server, "mount": _dataset_reader}[kind](spec, variant)
    begin(time.perf_counter() + WARM_PART * spec["seconds"])
    serving, used = cpu_seconds(spec["pids"]), time.process_time()
    started = time.perf_counter()
    samples = begin(started + spec["seconds"])
    seconds, used = time.perf_counter() - started, time.process_time() - used
    return {
        "rate": samples / seconds,
        "cpu_us": used / samples * 1e6,
        "server_cpu_us": (cpu_seconds(spec["pids"]) - serving) / samples * 1e6,
        "samples": int(samples),
        "seconds": seconds,
    }


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds of these processes so far; those that have ended count nothing."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _plain(spec: dict[str, Any], variant: str) -> Callable[[float], float]:
    """Ranges of the shards, in order; bytes count as so many samples of mean length."""
    fetch = _store_range(spec) if spec["plain"].startswith("s3:") else _http_range(spec)

    def task(key: str, start: int, stop: int) -> Task:
        return lambda worker: fetch(worker, key, start, stop)

    tasks = [
        task(key, start, min(start + RANGE_BYTES, size))
        for key, size in spec["shards"]
        for start in range(0, size, RANGE_BYTES)
    ]
    mean, endless = float(spec["mean"]), itertools.cycle(tasks)
    return lambda deadline: _driven(endless, spec["connections"], deadline) / mean


def _http_range(spec: dict[str, Any]) -> Callable[[int, str, int, int], int]:
    host = urlsplit(spec["plain"])
    connections = [
        http.client.HTTPConnection(host.hostname or "", host.port) for _ in range(spec["connections"])
    ]
    buffers = [bytearray(RANGE_BYTES) for _ in connections]

    def fetch(worker: int, key: str, start: int, stop: int) -> int:
        connection, view = connections[worker], memoryview(buffers[worker])[: stop - start]
        connection.request("GET", f"/{quote(key)}", headers={"Range": f"bytes={start}-{stop - 1}"})
        response = connection.getresponse()
        filled = 0
        while filled < len(view) and (count := response.readinto(view[filled:])):
            filled += count
        if response.status != 206 or filled < len(view) or response.read(1):
            raise TransportError(f"{key}: {filled} bytes with status {response.status} for {start}..{stop}")
        return filled

    return fetch


def _store_range(spec: dict[str, Any]) -> Callable[[int, str, int, int], int]:
    import obstore

    from hapi.store.connect import connect

    store = connect(spec["plain"]).store

    def fetch(worker: int, key: str, start: int, stop: int) -> int:
        return len(memoryview(obstore.get_range(store, key, start=start, end=stop)))

    return fetch


def _server(spec: dict[str, Any], variant: str) -> Callable[[float], float]:
    """Ranges of a sequence from hapi-server; ``large``: of as many bytes in large samples, counted in mean lengths.

    ``trainer``: by ids, a batch at a time, a fifth of the samples held out, as ``hapi-train`` asks at split 0.
    """
    transport = HttpTransport(spec["server"], token=spec["token"], timeout=_TIMEOUT)
    found = transport.call("GET", f"{messages.DATASETS_PATH}/{LARGE if variant == 'large' else NAME}")
    description = messages.DatasetDescription.from_json(found)
    mean, count = description.total_bytes / description.count, description.count
    order = EpochOrder(seed=SEED, shuffle=Shuffle.parse(spec["shuffles"][variant], FULL))
    everything = np.arange(count, dtype=np.int64)
    fetcher = _Fetcher(transport, description, order)
    held_in = np.sort(epoch_sequence(SEED + 1, 0, count)[count // 5 :])
    max_samples = min(messages.MAX_SAMPLES, max(8, int(REQUEST_BYTES / mean)))
    tasks: list[Task] = []
    for epoch in range(EPOCHS):
        if variant == "trainer":
            batches = order.batches(epoch, held_in, count, REQUEST_SAMPLES)
            tasks += [fetcher.batch(epoch, batch) for batch in batches]
        else:
            sequence = order.sequence(epoch, everything, count)
            ranges = [(start, min(start + max_samples, count)) for start in range(0, count, max_samples)]
            tasks += [fetcher.range(epoch, sequence, *position) for position in ranges]
            fetcher.range(epoch, sequence, 0, 1)(0)  # opens the dataset, and has the order computed
    endless = itertools.cycle(tasks)

    def begin(deadline: float) -> float:
        return _driven(endless, spec["connections"], deadline) * mean / float(spec["mean"])

    return begin


class _Fetcher:
    """Requests samples, and checks what comes as the trainer's window does."""

    def __init__(
        self, transport: HttpTransport, description: messages.DatasetDescription, order: EpochOrder
    ) -> None:
        self._transport, self._reference, self._order = transport, description.reference, order
        self._buffers: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def range(self, epoch: int, sequence: IntArray, start: int, stop: int) -> Task:
        """Fetches places ``start..stop`` of the order's ``sequence`` in ``epoch``."""
        shuffle = self._order.shuffle
        wanted = SequenceRange(
            seed=SEED, epoch=epoch, group=shuffle.group, window=shuffle.window, start=start, stop=stop
        )
        body = messages.SamplesRequest(dataset=self._reference, ids=wanted).to_json()
        return lambda worker: self._fetch(worker, body, sequence[start:stop])

    def batch(self, epoch: int, ids: IntArray) -> Task:
        """Fetches these samples of the order in ``epoch``."""
        request = messages.SamplesRequest(
            dataset=self._reference, ids=ids, windows=self._order.windows(epoch)
        )
        return lambda worker: self._fetch(worker, request.to_json(), ids)

    def _fetch(self, worker: int, body: dict[str, Any], ids: IntArray) -> int:
        def receive(reader: FrameReader) -> int:
            while not isinstance(reader.next(sink), StreamEnd):
                offsets = arrays[1]
                if offsets[0] != 0 or offsets[-1] != len(arrays[0]) or (np.diff(offsets) < 0).any():
                    raise WireError("the offsets of stored samples do not fit their bytes")
            return reader.samples

        arrays: list[Any] = []
        position = 0

        def sink(header: FrameHeader) -> list[memoryview]:
            nonlocal position
            count = len(header.ids)
            if not np.array_equal(header.ids, ids[position : position + count]):
                raise WireError("the server sent other samples than were asked for, or in another order")
            position += count
            data = self._buffer(worker, header.tensors[0].nbytes)
            arrays[:] = [data, np.empty(count + 1, np.int64), np.empty(count, np.int64)]
            return [byte_view(array) for array in arrays]

        return self._transport.stream(messages.SAMPLES_PATH, body, receive)

    def _buffer(self, worker: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        known = self._buffers.get(worker)
        if known is None or len(known) < size:
            known = self._buffers[worker] = np.zeros(size, np.uint8)
        return known[:size]


def _dataset_reader(spec: dict[str, Any], variant: str) -> Callable[[float], float]:
    """Batches of the sequence, straight from the store."""
    reader = mount(f"{spec['plain']}/{NAME}")
    dataset = reader.dataset
    shuffle = Shuffle.parse(spec["shuffles"][variant], FULL)
    orders = [shuffle.sequence(SEED, epoch, dataset.count) for epoch in range(EPOCHS)]
    epochs = itertools.cycle(enumerate(orders))

    def batches() -> Iterator[int]:
        with reader:
            for epoch, order in epochs:
                reader.sequence(SEED, epoch, order, shuffle=shuffle)
                while len(batch := reader.next_batch(spec["batch"])):
                    yield len(batch)

    endless = batches()

    def begin(deadline: float) -> float:
        samples = 0
        while time.perf_counter() < deadline:
            samples += next(endless)
        return samples

    return begin


def _driven(tasks: Iterator[Task], workers: int, deadline: float) -> float:
    """The sum over ``tasks``, done by so many threads; none begins after ``deadline``."""
    lock, sums = threading.Lock(), [0] * workers
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            while time.perf_counter() < deadline and not errors:
                with lock:
                    task = next(tasks)
                sums[worker] += task(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(sums)


if __name__ == "__main__":
    print(json.dumps(fetch_figure(json.loads(sys.argv[1]))))
