"""Cache of samples on the local disk: later epochs and later jobs do not fetch them again.

It holds samples of one dataset version as they are stored, never decoded or transformed, and their labels. A
sample is read straight into its place in the caller's buffer, and checked. :mod:`hapi.cache.folder` decides
which segments are admitted and removed, :mod:`hapi.cache.catalog` knows the location of each sample, and
:mod:`hapi.cache.segments` reads and writes the files.

A segment with a damaged sample is removed as a whole, with one warning; its samples are fetched and cached
anew. When writing fails (a full disk), nothing more is cached, with one warning. Neither stops the caller.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from hapi.arrays import Bytes, Flags, IntArray, LabelArray
from hapi.cache.catalog import Catalogue, SampleLocations
from hapi.cache.folder import OPEN, CacheFolder
from hapi.cache.segments import (
    SegmentWriter,
    byte_rows,
    checksums,
    head_bytes,
    record_bytes,
    seed_of,
    segment_bytes,
)
from hapi.closing import Closing
from hapi.errors import ConflictError, HapiError, UsageError
from hapi.process.read_ahead import announced
from hapi.store.gather import copy_ranges
from hapi.wire.labels import SINGLE, LabelForm, equal_labels
from hapi.wire.references import DatasetReference, check_digest, check_name
from hapi.wire.samples import Samples, offsets_of

log = logging.getLogger("hapi.cache")

SEGMENT_BYTES = 64 << 20
"""Size of a segment; less where the budget is below :data:`_SEGMENTS` of them."""
_SEGMENTS = 16
_LONGEST = 1 << 30
"""Bytes of a sample: it is one read, and places in a segment have 32 bits."""
_PART_BYTES = 16 << 20
"""Most bytes that :meth:`SampleCache.parts` gives at once, unless one sample has more."""
_FULL_SECONDS = 10.0
"""Seconds between two looks for new room."""


class SampleCache(Closing):
    """Cached samples of one dataset version. Thread-safe; close it after the last read."""

    def __init__(
        self, folder: CacheFolder, reference: DatasetReference, count: int, form: LabelForm | None = None
    ) -> None:
        """Use ``folder`` for the version ``reference`` of ``count`` samples with labels of ``form`` (None: single
        labels); HapiError when the folder cannot be used.
        """
        check_name(reference.name, "dataset")
        check_digest(reference.version, "dataset version")
        self.folder = folder
        self._seed, self._form = seed_of(reference), form or SINGLE
        self._segment_bytes = min(SEGMENT_BYTES, folder.budget // _SEGMENTS)
        self._longest = min(_LONGEST, folder.budget // 2)
        self._writing = threading.Lock()
        self._writer: tuple[SegmentWriter, int, str] | None = None
        """The writer with the number and the token of its segment."""
        self._full_until = 0.0
        self._stopped = self._closed = False
        self.path = folder.version(reference)
        self._users: int | None = None
        """Marks the version as used; None while there is nothing of it."""
        self._attaching = threading.Lock()
        if self.path.exists():
            self._attach()
        self._catalogue = Catalogue(self.path, self._seed, count, self._form)

    def _attach(self) -> None:
        """Mark the version as used, and make its folder if it is not there."""
        with self._attaching:
            if self._users is None and not self._closed:
                self._users = self.folder.attach(self.path)

    def _attach_if_there(self) -> None:
        """Mark as used what another process has begun since the cache was opened."""
        if self._users is None and self.path.exists():
            with contextlib.suppress(HapiError):
                self._attach()

    @property
    def samples(self) -> int:
        """Number of cached samples."""
        return self._catalogue.samples

    @property
    def admits(self) -> bool:
        """True while more samples can be cached, as far as is known."""
        return not self._stopped and time.monotonic() >= self._full_until

    def room(self, samples: int, mean_bytes: float) -> float:
        """Share of ``samples`` of ``mean_bytes`` each for which the whole budget has room, from 0 to 1."""
        return min(1.0, self.folder.budget / max(1.0, samples * (mean_bytes + record_bytes(self._form))))

    def held(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are cached; bool [n]."""
        self._attach_if_there()
        return self._catalogue.held(ids)

    def share(self, ids: IntArray) -> float:
        """Share of samples ``ids`` that is cached, from 0 to 1."""
        return float(self.held(ids).mean()) if len(ids) else 0.0

    # -- reading -----------------------------------------------------------------------------------------

    def parts(self, ids: IntArray) -> Iterator[tuple[IntArray, Samples]]:
        """Yield (rows of ``ids``, ascending; their samples) of all cached samples, a bounded number of bytes
        at a time.
        """
        self._attach_if_there()
        locations = self._catalogue.find(ids)
        rows = np.flatnonzero(locations.held)
        ends = np.cumsum(locations.length[rows], dtype=np.int64)
        while len(rows):
            count = max(1, int(np.searchsorted(ends, _PART_BYTES, side="right")))
            part, rows, ends = rows[:count], rows[count:], ends[count:] - ends[count - 1]
            offsets = offsets_of(locations.length[part])
            data, labels = np.empty(int(offsets[-1]), dtype=np.uint8), self._form.empty(len(part))
            sound = self._fill(ids[part], locations.of(part), offsets[:-1], data, labels)
            if sound.all():
                yield part, Samples(ids=ids[part], data=data, offsets=offsets, labels=labels)
            else:  # the segments of the damaged ones are no more; what lies in others is read again
                yield from ((part[rows], samples) for rows, samples in self.parts(ids[part]))

    def through(self, samples: Samples, read: Callable[[IntArray], Samples]) -> None:
        """Fill ``samples.data``: cached samples from the disk, the others with ``read(ids)``; the latter are
        cached.

        The ids, offsets and labels of ``samples`` are known; a cached sample with another length or label is
        damaged.
        """
        locations = self._catalogue.find(samples.ids)
        same = locations.held & (locations.length == np.diff(samples.offsets))
        rows, labels = np.flatnonzero(same), self._form.empty(int(same.sum()))
        starts = samples.offsets[:-1][rows]
        sound = self._fill(samples.ids[rows], locations.of(rows), starts, samples.data, labels)
        same[rows] = sound & equal_labels(labels, samples.labels[rows])
        self._catalogue.drop(np.unique(locations.segment[locations.held & ~same]))
        missing = np.flatnonzero(~same)
        if len(missing):
            others = read(samples.ids[missing])
            starts, lengths = others.offsets[:-1], np.diff(others.offsets)
            copy_ranges(others.data, starts, lengths, samples.data, samples.offsets[:-1][missing])
            self.put(others)

    def _fill(
        self, ids: IntArray, locations: SampleLocations, starts: IntArray, out: Bytes, labels: LabelArray
    ) -> Flags:
        """Sample i to ``out[starts[i]:]`` and its label; bool [n], False where damaged."""
        heads = np.empty((len(ids), 2 + self._form.words), dtype=np.uint64)
        bounds = list(zip(starts.tolist(), (starts + locations.length).tolist(), strict=True))
        read = self._read(locations, byte_rows(heads), out.data, bounds)
        sound: Flags = read & (heads[:, 0] == checksums(heads, out.data, bounds, self._seed))
        sound &= heads[:, 1].view(np.int64) == ids
        if not sound.all():
            self._catalogue.drop(np.unique(locations.segment[~sound]))
        labels[:] = self._form.from_words(heads[:, 2:])
        return sound

    def _read(
        self, locations: SampleLocations, heads: memoryview, out: memoryview, bounds: list[tuple[int, int]]
    ) -> Flags:
        """Heads and bytes of the samples, in the order of the files; True for those that were there."""
        read = np.zeros(len(bounds), dtype=np.bool_)
        order = np.lexsort((locations.start, locations.segment))
        with contextlib.ExitStack() as opened:
            files = {n: self._catalogue.descriptor(n, opened) for n in np.unique(locations.segment).tolist()}
            numbers, starts = locations.segment[order].tolist(), locations.start[order].tolist()
            reads = [
                (file, start, row)
                for number, start, row in zip(numbers, starts, order.tolist(), strict=True)
                if (file := files[number]) is not None
            ]
            size = head_bytes(self._form)
            sizes = [size + stop - first for first, stop in bounds]
            for file, start, row in announced(reads, lambda read: (read[0], read[1], sizes[read[2]])):
                first, stop = bounds[row]
                head = heads[row * size : (row + 1) * size]
                with contextlib.suppress(OSError):  # of a disk that fails: as good as damaged
                    found = os.preadv(file, [head, out[first:stop]], start)
                    read[row] = found == sizes[row]
        return read

    # -- writing -----------------------------------------------------------------------------------------

    def put(self, samples: Samples) -> None:
        """Cache those of ``samples`` that are new, as far as there is room. Never raises."""
        if not self.admits:
            return
        with self._writing:
            if self._stopped:
                return
            try:
                self._append(samples)
            except ConflictError:
                self._full_until = time.monotonic() + _FULL_SECONDS
            except (OSError, UsageError) as error:
                self._stop(error)

    def flush(self) -> None:
        """Make the samples that were put available to other processes, present and future. Never raises."""
        with self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            self._seal()
        except ConflictError:
            pass  # what was written since the last time is lost
        except OSError as error:
            self._stop(error)

    def close(self) -> None:
        """Flush, and mark the version as unused by this process; closing twice does nothing."""
        with self._writing:
            if self._closed:
                return
            self._flush()
            self._closed = self._stopped = True
        self._catalogue.close()
        with self._attaching:
            if self._users is not None:
                self.folder.detach(self.path, self._users)
                self._users = None

    def _append(self, samples: Samples) -> None:
        lengths = np.diff(samples.offsets)
        rows = np.flatnonzero(~self._catalogue.held(samples.ids) & (lengths <= self._longest))
        rows = rows[np.sort(np.unique(samples.ids[rows], return_index=True)[1])]  # each sample once
        while len(rows):
            if self._writer is None:
                self._writer = self._new_segment(int(lengths[rows[0]]))
                if self._writer is None:
                    self._full_until = time.monotonic() + _FULL_SECONDS
                    return
            writer, number, _ = self._writer
            part = rows[: writer.fitting(lengths[rows])]
            rows = rows[len(part) :]
            if len(part):
                starts = samples.offsets[:-1][part]
                held = writer.append(
                    samples.ids[part], samples.labels[part], samples.data, starts, lengths[part]
                )
                self._catalogue.add(number, held)
            if len(rows) or number not in self._catalogue:  # which was found damaged
                self._seal()

    def _new_segment(self, length: int) -> tuple[SegmentWriter, int, str] | None:
        """Begin a segment for a sample of ``length`` bytes and others; None when there is no room."""
        min_bytes = segment_bytes(length, self._form)
        if min_bytes > self.folder.budget:
            return None
        self._attach()
        reserved = self.folder.reserve(self.path, max(self._segment_bytes, min_bytes), min_bytes)
        if reserved is None:
            return None
        writer = SegmentWriter(reserved.descriptor, reserved.capacity, self._seed, self._form)
        path = self.path / f"{OPEN}{reserved.token}"
        return writer, self._catalogue.begin(path, reserved.descriptor), reserved.token

    def _seal(self) -> None:
        """Make the open segment one that counts. One that cannot be sealed, or was found damaged, goes."""
        if self._writer is None:
            return
        (writer, number, token), self._writer = self._writer, None
        whole = False
        try:
            if writer.samples and number in self._catalogue:
                writer.finish()
                path = self.folder.seal(self.path, token)
                fcntl.flock(writer.descriptor, fcntl.LOCK_UN)
                whole = True
                self._catalogue.sealed(number, path)
        finally:
            if not whole:
                self._catalogue.forget(number)
                with contextlib.suppress(OSError):
                    (self.path / f"{OPEN}{token}").unlink(missing_ok=True)

    def _stop(self, error: OSError | UsageError) -> None:
        """Keep nothing more; what is here stays of use."""
        if not self._stopped:
            self._stopped = True
            log.warning(
                "cache %s: cannot be written (%s); training goes on, and nothing more is kept",
                self.folder.path,
                getattr(error, "strerror", None) or error,
            )
        with contextlib.suppress(OSError, ConflictError):
            self._seal()
