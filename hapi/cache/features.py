"""Cache of features: the outputs of the frozen layers at one cut, kept on the local disk with their labels."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hapi.arrays import Flags, IntArray, LabelArray
from hapi.cache.feature_key import FeatureKey
from hapi.cache.folder import CacheFolder
from hapi.cache.samples import SampleCache
from hapi.closing import Closing
from hapi.wire.frames import DTYPE_BYTES
from hapi.wire.labels import LabelForm
from hapi.wire.references import DatasetReference
from hapi.wire.samples import Samples


class FeatureCache(Closing):
    """Cached features of one key. Thread-safe; close it after the last read."""

    def __init__(
        self, folder: CacheFolder, key: FeatureKey, count: int, form: LabelForm, memory_bytes: int = 0
    ) -> None:
        """Use ``folder`` for the features of ``key``.

        Args:
            folder: the cache's folder.
            key: identity of the features.
            count: samples of the dataset; ids are 0 to ``count - 1``.
            form: of the labels, which are kept with the features.
            memory_bytes: most bytes that are kept in this process's memory too.

        Raises:
            HapiError: the folder cannot be used.
        """
        self.key = key
        reference = DatasetReference(name=key.dataset.name, version=key.digest)
        self._records = SampleCache(folder, reference, count, form)

    @property
    def admits(self) -> bool:
        """True while more features can be kept, as far as is known."""
        return self._records.admits

    def held(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are cached; bool [n]."""
        return self._records.held(ids)

    def share(self, ids: IntArray) -> float:
        """Share of samples ``ids`` that is cached, from 0 to 1."""
        return self._records.share(ids)

    def room(self, samples: int) -> float:
        """Share of ``samples`` for which the budget has room, from 0 to 1."""
        return self._records.room(samples, float(self.sample_bytes))

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's features."""
        return math.prod(self.key.shape) * DTYPE_BYTES[self.key.dtype]

    def read(self, ids: IntArray, features: npt.NDArray[np.uint8], labels: LabelArray) -> Flags:
        """Read the features of cached samples into their rows.

        Args:
            ids: int64 [n].
            features: bytes of the features, uint8 [n, sample_bytes]; rows of samples that are not cached stay as they
                are.
            labels: of the dataset's form, n of them, in the same way.

        Returns:
            bool [n]: True for the rows that were read and passed their checksum.
        """
        found: Flags = np.zeros(len(ids), dtype=np.bool_)
        for rows, samples in self._records.parts(ids):
            features[rows] = samples.data.reshape(len(rows), -1)
            labels[rows] = samples.labels
            found[rows] = True
        return found

    def put(self, ids: IntArray, features: npt.NDArray[np.uint8], labels: LabelArray) -> None:
        """Keep the features of samples that are new, as far as there is room. Never raises.

        Args:
            ids: int64 [n].
            features: bytes of the features, uint8 [n, sample_bytes]; copied before this returns.
            labels: of the dataset's form, n of them.
        """
        offsets = np.arange(len(ids) + 1, dtype=np.int64) * self.sample_bytes
        self._records.put(Samples(ids=ids, data=features.reshape(-1), offsets=offsets, labels=labels))

    def flush(self) -> None:
        """Make what was put available to other processes, present and future. Never raises."""
        self._records.flush()

    def close(self) -> None:
        """Flush, and give the folder back; closing twice does nothing."""
        self._records.close()
