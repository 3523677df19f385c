"""Cache of stored samples on the local disk: later epochs and later jobs do not fetch them again.

It holds samples of one dataset version as they are stored, never decoded or transformed, and their labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hapi.arrays import IntArray
from hapi.cache.folder import CacheFolder
from hapi.cache.records import RecordCache
from hapi.store.gather import copy_ranges
from hapi.wire.labels import SINGLE, LabelForm, equal_labels
from hapi.wire.references import DatasetReference
from hapi.wire.samples import Samples, offsets_of

_PART_BYTES = 16 << 20
"""Most bytes that :meth:`SampleCache.parts` gives at once, unless one sample has more."""


class SampleCache(RecordCache):
    """Cached samples of one dataset version. Thread-safe; close it after the last read."""

    def __init__(
        self, folder: CacheFolder, reference: DatasetReference, count: int, form: LabelForm | None = None
    ) -> None:
        """Use ``folder`` for the version ``reference`` of ``count`` samples with labels of ``form`` (None: single
        labels); HapiError when the folder cannot be used.
        """
        super().__init__(folder, reference, count, form or SINGLE)

    def parts(self, ids: IntArray) -> Iterator[tuple[IntArray, Samples]]:
        """Yield (rows of ``ids``, ascending; their samples) of all cached samples, a bounded number of bytes
        at a time.
        """
        locations = self.find(ids)
        rows = np.flatnonzero(locations.held)
        ends = np.cumsum(locations.length[rows], dtype=np.int64)
        while len(rows):
            count = max(1, int(np.searchsorted(ends, _PART_BYTES, side="right")))
            part, rows, ends = rows[:count], rows[count:], ends[count:] - ends[count - 1]
            offsets = offsets_of(locations.length[part])
            data, labels = np.empty(int(offsets[-1]), dtype=np.uint8), self._form.empty(len(part))
            sound = self.fill(ids[part], locations.of(part), offsets[:-1], data, labels)
            if sound.all():
                yield part, Samples(ids=ids[part], data=data, offsets=offsets, labels=labels)
            else:  # the damaged ones are dropped; the others are read again
                yield from ((part[rows], samples) for rows, samples in self.parts(ids[part]))

    def through(self, samples: Samples, read: Callable[[IntArray], Samples]) -> None:
        """Fill ``samples.data``: cached samples from the disk, the others with ``read(ids)``; the latter are
        cached.

        The ids, offsets and labels of ``samples`` are known; a cached sample with another length or label is
        damaged.
        """
        locations = self.find(samples.ids)
        same = locations.held & (locations.length == np.diff(samples.offsets))
        rows, labels = np.flatnonzero(same), self._form.empty(int(same.sum()))
        starts = samples.offsets[:-1][rows]
        sound = self.fill(samples.ids[rows], locations.of(rows), starts, samples.data, labels)
        same[rows] = sound & equal_labels(labels, samples.labels[rows])
        wrong = np.flatnonzero(locations.held & ~same)
        self.drop(samples.ids[wrong], locations.of(wrong))
        missing = np.flatnonzero(~same)
        if len(missing):
            others = read(samples.ids[missing])
            starts, lengths = others.offsets[:-1], np.diff(others.offsets)
            copy_ranges(others.data, starts, lengths, samples.data, samples.offsets[:-1][missing])
            self.put(others)
