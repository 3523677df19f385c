"""Cache of features: the outputs of the frozen layers at one cut, kept on the local disk with their labels.

What fits a bounded part of this process's memory is kept there too, after its checksum was verified.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hapi.arrays import Flags, IntArray, LabelArray
from hapi.cache.disk_rates import DiskRates
from hapi.cache.feature_key import FeatureKey
from hapi.cache.folder import CacheFolder
from hapi.cache.key_file import KeyFile
from hapi.cache.memory_rows import MemoryRows
from hapi.cache.records import RecordCache
from hapi.closing import Closing
from hapi.wire.frames import DTYPE_BYTES
from hapi.wire.labels import LabelForm
from hapi.wire.references import DatasetReference
from hapi.wire.samples import Samples

_NAME = "features"
"""Name of the versions that features are, beside those of datasets."""


class FeatureCache(Closing):
    """Cached features of one key. Thread-safe; close it after the last read."""

    def __init__(
        self,
        folder: CacheFolder,
        key: FeatureKey,
        count: int,
        form: LabelForm,
        memory_bytes: int = 0,
        made_with: str = "",
    ) -> None:
        """Use ``folder`` for the features of ``key``.

        Args:
            folder: the cache's folder.
            key: identity of the features.
            count: samples of the dataset; ids are 0 to ``count - 1``.
            form: of the labels, which are kept with the features.
            memory_bytes: most bytes that are kept in this process's memory too.
            made_with: what computes the features that are put: the device and the smallest batch. People see it in
                ``hapi cache ls``, since the last bits may differ with it.

        Raises:
            HapiError: the folder cannot be used, or has features of another key under the same digest.
        """
        self.key = key
        self._form = form
        # Another name of the same samples is no other key.
        reference = DatasetReference(name=_NAME, version=key.digest)
        lines = (made_with,) if made_with else ()
        self._records = RecordCache(
            folder, reference, count, form, key=KeyFile(key.to_json(), key.dataset.name, lines), behind=True
        )
        self._memory = MemoryRows(memory_bytes, count, self.sample_bytes, form)

    @property
    def admits(self) -> bool:
        """True while more features can be kept, as far as is known."""
        return self._records.admits or not self._memory.full

    def held(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are cached; bool [n]."""
        held = self._memory.held(ids)
        if not held.all():
            held |= self._records.held(ids)
        return held

    def share(self, ids: IntArray) -> float:
        """Share of samples ``ids`` that is cached, from 0 to 1."""
        return float(self.held(ids).mean()) if len(ids) else 0.0

    def room(self, samples: int) -> float:
        """Share of ``samples`` for which the budget has room, from 0 to 1."""
        return self._records.room(samples, float(self.sample_bytes))

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's features."""
        return math.prod(self.key.shape) * DTYPE_BYTES[self.key.dtype]

    @property
    def memory_bytes(self) -> int:
        """Most bytes of this process's memory that its rows take."""
        return self._memory.nbytes

    def rates(self) -> DiskRates:
        """Return the measured rates of the disk, each of its last 64 MiB; None for what was not measured."""
        return self._records.rates()

    def read(self, ids: IntArray, features: npt.NDArray[np.uint8], labels: LabelArray) -> Flags:
        """Read the features of cached samples into their rows.

        Args:
            ids: int64 [n].
            features: bytes of the features, uint8 [n, sample_bytes], C-contiguous; rows that were not read hold
                anything.
            labels: of the dataset's form, n of them, in the same way.

        Returns:
            bool [n]: True for the rows that were read and passed their checksum.

        Raises:
            ValueError: ``features`` has another form.
        """
        if features.shape != (len(ids), self.sample_bytes) or not features.flags.c_contiguous:
            raise ValueError(f"features: expected contiguous rows of {self.sample_bytes} bytes for each id")
        found = self._memory.read(ids, features, labels)
        if found.all():
            return found
        rows = np.flatnonzero(~found)
        locations = self._records.find(ids[rows])
        kept_rows = np.flatnonzero(locations.held & (locations.length == self.sample_bytes))
        if len(kept_rows):
            rows = rows[kept_rows]
            kept = self._form.empty(len(rows))
            flat = features.reshape(-1)
            sound = self._records.fill(
                ids[rows], locations.of(kept_rows), rows * self.sample_bytes, flat, kept
            )
            rows, kept = rows[sound], kept[sound]
            labels[rows] = kept
            found[rows] = True
            if not self._memory.full:
                self._memory.add(ids[rows], features[rows], kept)
        return found

    def put(self, ids: IntArray, features: npt.NDArray[np.uint8], labels: LabelArray) -> None:
        """Keep the features of samples that are new, as far as there is room. Never raises.

        It may wait for the disk: what must not wait calls it behind the training.

        Args:
            ids: int64 [n].
            features: bytes of the features, uint8 [n, sample_bytes]; copied before this returns.
            labels: of the dataset's form, n of them.
        """
        offsets = np.arange(len(ids) + 1, dtype=np.int64) * self.sample_bytes
        data = np.ascontiguousarray(features).reshape(-1)
        self._records.put(Samples(ids=ids, data=data, offsets=offsets, labels=labels))
        self._memory.add(ids, features, labels)

    def flush(self) -> None:
        """Make what was put available to other processes, present and future. Never raises."""
        self._records.flush()

    def close(self) -> None:
        """Flush, and give the folder back; closing twice does nothing."""
        self._records.close()
