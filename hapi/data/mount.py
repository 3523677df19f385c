"""A dataset as DLFS offers it (section III-A): ``open/read/close`` of a sample, ``sequence``, ``next_batch``.

    with open_dataset("STORE/photos") as photos:
        photos.sequence(seed=1, epoch=0)
        while len(batch := photos.next_batch(256)):
            ...  # batch.data, batch.offsets, batch.labels: good until the next call

DLFS's own names for opening and reading stay as aliases: ``mount`` and ``bread``.

``next_batch`` reads ahead: its order is known, so stretches of it are read by threads of its own into buffers that are
used again, at most ``read_ahead_bytes`` of them. A batch is a view of such a buffer.

With a ``sample_cache``, a folder on a local disk, what was read of a store elsewhere is kept there for later epochs
and for other processes, also later ones (:mod:`hapi.cache.samples`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hapi.arrays import IntArray
from hapi.cache.folder import CacheFolder
from hapi.cache.samples import SampleCache
from hapi.closing import Closing
from hapi.data.dataset import Dataset, find_dataset
from hapi.data.epoch_order import Shuffle
from hapi.data.reading.reader import AccessHint, chunk_cache
from hapi.data.sample_directory import Located
from hapi.errors import UsageError
from hapi.store.open import open_store, split_address
from hapi.wire.samples import Samples, offsets_of

BATCH_SIZE = 256
"""Samples of a batch when a reader is iterated over."""
READ_AHEAD_BYTES = 32 << 20
"""Default bound of the buffers of stretches that are read, are being read or are handed out."""
_STRETCHES = 4
"""Stretches that share the bound: one handed out, the others being read or ready."""
_THREADS_FROM = 64 << 10
"""Mean bytes of a sample from which every stretch has a thread. Smaller ones are read in so many short steps that
threads mostly hand Python's lock to each other, but where they wait for a remote store."""
_RAMP = 5
"""The first stretch of a sequence has 2**-5 of its share, each that follows twice as much as the one before, so
that the first batch does not wait for thousands of samples."""
_LARGE_STRETCHES = 3
"""Stretches when a batch is larger than one should be: one handed out, two being read."""


class OpenSample(Closing):
    """One sample, open for reading from its start. Not thread-safe."""

    def __init__(self, reader: DatasetReader, sample: int) -> None:
        self.id = sample
        self.length = int(reader.dataset.lengths([sample])[0])
        """Bytes."""
        self._reader: DatasetReader | None = reader
        self._data: memoryview | None = None
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes, or all that are left; empty at the end. The first call checks the
        whole sample.
        """
        if self._reader is None:
            raise UsageError(f"sample {self.id} is closed; open it again")
        if self._data is None:
            self._data = self._reader.read(np.array([self.id])).data.data
        stop = self.length if size < 0 else min(self.length, self._position + size)
        part = bytes(self._data[self._position : stop])
        self._position = stop
        return part

    def close(self) -> None:
        """Release the sample's bytes; closing twice does nothing."""
        self._reader = self._data = None


@dataclass
class _Stretch:
    """Samples ``first..stop`` of the sequence, being read or read."""

    first: int
    stop: int
    reading: Future[Samples]
    buffer: npt.NDArray[np.uint8]


class DatasetReader(Closing):
    """Reads one version of a dataset, in shuffled batches or sample by sample. One sequence at a time; one thread.

    :func:`open_dataset` makes it.

    >>> import hapi, numpy
    >>> numpy.savez("dots.npz", x=numpy.zeros((6, 3, 8, 8), dtype=numpy.uint8), y=[0, 1, 2, 0, 1, 2])
    >>> _ = hapi.pack("dots.npz", "store/dots")
    >>> with hapi.open_dataset("store/dots", batch_size=4) as dots:
    ...     ids = dots.sequence(seed=0, epoch=0)
    ...     for batch in dots:
    ...         print(len(batch.ids), batch.data.nbytes)
    4 768
    2 384

    Attributes:
        count: samples of the dataset.
        dataset: its manifest, labels and shards.
        batch_size: samples of a batch when it is iterated over.
    """

    def __init__(
        self,
        dataset: Dataset,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        sample_cache: SampleCache | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> None:
        """Read ``dataset``.

        Args:
            dataset: the dataset at one version.
            read_ahead_bytes: bound of the buffers that are read ahead.
            sample_cache: cache of this very version, closed with the reader.
            batch_size: samples of a batch when the reader is iterated over.
        """
        if isinstance(batch_size, bool) or batch_size < 1:
            raise UsageError(f"batch_size: expected a number of samples of at least 1, got {batch_size!r}")
        self.batch_size = batch_size
        self.dataset = dataset
        self.sample_cache = sample_cache
        self.count = dataset.count
        self._stretch_bytes = read_ahead_bytes // _STRETCHES
        waits = dataset.store.local_path("any") is None
        large = dataset.total_bytes >= _THREADS_FROM * dataset.count
        threads = _STRETCHES - 1 if waits or large else 1
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="hapi-ahead")
        self._order: IntArray = np.empty(0, dtype=np.int64)
        self._hint: AccessHint | None = None
        self._begun = False
        """True when there is a sequence."""
        self._position = self._planned = 0
        self._reach = self._stretch_bytes
        """Bytes of the stretch that is planned next."""
        self._stretches: deque[_Stretch] = deque()
        self._buffers: list[npt.NDArray[np.uint8]] = []

    def open(self, sample: int) -> OpenSample:
        """Sample ``sample`` for reading; :class:`NotFoundError` when there is no such id."""
        return OpenSample(self, sample)

    def read(
        self,
        ids: IntArray,
        hint: AccessHint | None = None,
        out: npt.NDArray[np.uint8] | None = None,
    ) -> Samples:
        """Return the bytes of samples ``ids``, checked, from the sample cache where it has them. Thread-safe.

        Args:
            ids: int64 [n].
            hint: for the reads to come.
            out: buffer for the bytes, uint8; None for new memory.

        Raises:
            DataError: a sample is damaged; the first one is named.
            NotFoundError: an id is out of range.
            ConflictError: another version has replaced this one.
        """
        return self._read_at(self.dataset.locate(ids), hint, out)

    def _read_at(
        self, located: Located, hint: AccessHint | None, out: npt.NDArray[np.uint8] | None
    ) -> Samples:
        cache, dataset = self.sample_cache, self.dataset
        if cache is None:
            return dataset.read_at(located, hint, out)
        wanted, offsets = located.ids.copy(), offsets_of(located.length)
        data = np.empty(int(offsets[-1]), dtype=np.uint8) if out is None else out[: int(offsets[-1])]
        samples = Samples(ids=wanted, data=data, offsets=offsets, labels=dataset.labels_at(located))
        cache.through(samples, lambda missing: dataset.read(missing, hint))
        return samples

    def sequence(
        self,
        seed: int,
        epoch: int,
        order: IntArray | None = None,
        start: int = 0,
        shuffle: str | Shuffle = "auto",
    ) -> IntArray:
        """Begin an epoch: ``next_batch`` then gives its samples.

        Args:
            seed: of the order.
            epoch: number from 0.
            order: any ids (int64 [n]) that the caller made of seed and epoch, instead of an order of
                ``shuffle``.
            start: place in the order to begin at.
            shuffle: ``"full"``, any permutation; ``"chunks"``, the chunk windows that suit the store;
                ``"chunks:GROUP:WINDOW"``; ``"auto"``, chunk windows where the store is slow to read single
                samples, otherwise ``"full"``. With ``order``, the shuffle that it resembles, if any.

        Returns:
            The ids in their order, int64.

        Raises:
            NotFoundError: an id does not exist.
        """
        reader = self.dataset.reader
        if isinstance(shuffle, str):
            prefers_chunks = reader.prefers_chunks and order is None
            shuffle = Shuffle.parse(shuffle, reader.default_shuffle, prefers_chunks=prefers_chunks)
        elif not isinstance(shuffle, Shuffle):
            raise UsageError(
                f"shuffle: expected a Shuffle or its name, such as 'chunks', got {shuffle!r:.80}"
            )
        found = shuffle.sequence(seed, epoch, self.count) if order is None else np.asarray(order)
        if len(found):
            self.dataset.locate([found.min(), found.max()])
        if not 0 <= start <= len(found):
            raise UsageError(f"start: expected 0 to {len(found)}, the samples of the sequence, got {start}")
        hint = reader.access_hint(shuffle, seed, epoch) if shuffle.group else reader.order_hint(found[start:])
        self._drop()
        if self.sample_cache is not None:
            self.sample_cache.flush()  # an epoch may be over
        self._order = found
        self._position = self._planned = start
        self._reach = self._stretch_bytes >> _RAMP
        self._hint = hint
        self._begun = True
        return found

    def next_batch(self, count: int) -> Samples:
        """Return the next ``count`` samples of the sequence, fewer at its end, none after it.

        The batch's bytes are valid until the next call. Errors are those of :meth:`read`; the same samples
        then come next.
        """
        if isinstance(count, bool) or count < 1:
            raise UsageError(f"next_batch: expected a number of samples of at least 1, got {count!r}")
        stop = min(self._position + count, len(self._order))
        while self._stretches and self._stretches[0].stop <= self._position:
            self._buffers.append(self._stretches.popleft().buffer)
        if self._stretches and self._stretches[0].stop < stop:
            self._drop()  # another ``count`` than before: the batch would lie in two buffers
        self._plan(count)
        if self._position == stop:
            return self.read(self._order[stop:stop])
        stretch = self._stretches[0]
        try:
            samples = stretch.reading.result()
        except BaseException:
            self._drop()
            raise
        batch = _part(samples, self._position - stretch.first, stop - stretch.first)
        self._position = stop
        return batch

    bread = next_batch
    """DLFS's name for it."""

    def __iter__(self) -> Iterator[Samples]:
        """Batches of :attr:`batch_size` samples up to the end of the sequence; each is good until the next.

        Raises:
            UsageError: no sequence was begun.
        """
        if not self._begun:
            raise UsageError("there is no sequence to iterate over: call sequence(seed, epoch) first")
        while len((batch := self.next_batch(self.batch_size)).ids):
            yield batch

    def _plan(self, count: int) -> None:
        """Let the next stretches be read, as many as there is room for."""
        while self._planned < len(self._order) and len(self._stretches) < _STRETCHES:
            max_count = max(count, self._reach * self.count // max(1, self.dataset.total_bytes))
            ids = self._order[self._planned : self._planned + max_count]
            located = self.dataset.locate(ids)
            ends = np.cumsum(located.length)
            whole = int(np.searchsorted(ends, self._reach, side="right")) // count * count
            ids = ids[: max(whole, count)]
            total = int(ends[len(ids) - 1])
            if total > self._stretch_bytes and len(self._stretches) >= _LARGE_STRETCHES:
                return
            buffer = self._buffer(total)
            reading = self._threads.submit(self._read_at, located.part(0, len(ids)), self._hint, buffer)
            self._stretches.append(_Stretch(self._planned, self._planned + len(ids), reading, buffer))
            self._planned += len(ids)
            self._reach = min(self._stretch_bytes, max(1, 2 * self._reach))

    def _buffer(self, size: int) -> npt.NDArray[np.uint8]:
        """A buffer of at least ``size`` bytes: one that was handed back, if it is large enough."""
        for at, buffer in enumerate(self._buffers):
            if len(buffer) >= size:
                return self._buffers.pop(at)
        del self._buffers[_STRETCHES - 1 :]
        return np.empty(max(size, min(self._stretch_bytes, self.dataset.total_bytes)), dtype=np.uint8)

    def _drop(self) -> None:
        """Forget what was read ahead; the next batch is read from where the sequence stands."""
        for stretch in self._stretches:
            stretch.reading.cancel()
        for stretch in self._stretches:
            if not stretch.reading.cancelled():
                stretch.reading.exception()
            self._buffers.append(stretch.buffer)
        self._stretches.clear()
        self._planned = self._position

    def close(self) -> None:
        """End the threads that read ahead; closing twice does nothing."""
        self._drop()
        self._buffers.clear()
        self._threads.shutdown()
        if self.sample_cache is not None:
            self.sample_cache.close()


def _part(samples: Samples, low: int, high: int) -> Samples:
    offsets = samples.offsets[low : high + 1]
    return Samples(
        ids=samples.ids[low:high],
        data=samples.data[int(offsets[0]) : int(offsets[-1])],
        offsets=offsets - offsets[0],
        labels=samples.labels[low:high],
    )


def open_dataset(
    address: str,
    version: str | None = None,
    *,
    batch_size: int = BATCH_SIZE,
    cache_bytes: int | None = None,
    read_ahead_bytes: int = READ_AHEAD_BYTES,
    sample_cache: str | Path | None = None,
    sample_cache_bytes: int | None = None,
) -> DatasetReader:
    """A reader of the dataset at ``address``, to be closed after use or used as a context manager.

    >>> import hapi, numpy
    >>> numpy.savez("dots.npz", x=numpy.zeros((6, 3, 8, 8), dtype=numpy.uint8), y=[0, 1, 2, 0, 1, 2])
    >>> _ = hapi.pack("dots.npz", "store/dots")
    >>> with hapi.open_dataset("store/dots") as dots:
    ...     ids = dots.sequence(seed=0, epoch=0, shuffle="chunks")
    ...     while len(batch := dots.next_batch(4)):
    ...         print(len(batch.labels), batch.sample(0).shape)
    4 (192,)
    2 (192,)

    Args:
        address: STORE/NAME, such as ``store/flowers`` or ``s3://bucket/flowers``.
        version: the version that it must have, also a replaced one that is still kept; None: the current one.
        batch_size: samples of a batch when the reader is iterated over.
        cache_bytes: bound of chunks of small samples that are kept; None: 64 MiB, of a remote store 360 MiB.
        read_ahead_bytes: bound of what is read ahead of the sequence; three batches, if those are larger.
        sample_cache: a folder on a local disk in which stored samples are kept for later epochs and processes.
        sample_cache_bytes: bound of that folder, for all datasets and processes; None: half of what its disk has for
            it, at most 100 GB.

    Raises:
        NotFoundError: there is no such dataset; the message names those that are there.
        ConflictError: it is there in another version only.
        DataError: its manifest or index is damaged.
        UsageError: the address or the sample cache cannot be used.
    """
    folder = (
        None if sample_cache is None else CacheFolder.open(sample_cache, sample_cache_bytes, "sample cache")
    )
    url, name = split_address(address)
    store = open_store(url)
    dataset = find_dataset(store, name, version, chunk_cache(store, cache_bytes))
    kept = (
        None if folder is None else SampleCache(folder, dataset.reference, dataset.count, dataset.label_form)
    )
    return DatasetReader(dataset, read_ahead_bytes, kept, batch_size)


mount = open_dataset
"""DLFS's name for it."""
