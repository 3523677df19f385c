"""Cached features for one pass: which of a batch's samples have some, and reading them into its rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hapi.arrays import Flags, IntArray, LabelArray
from hapi.cache.features import FeatureCache
from hapi.client.caching.code_watch import CodeWatch
from hapi.client.caching.counts import KeptCounts
from hapi.client.loading.buffers import BufferPool
from hapi.client.memory import EVEN_ROWS
from hapi.errors import HapiError
from hapi.trace import Tracer
from hapi.wire.labels import LabelForm

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Multiples of the golden ratio are spread evenly (Knuth, TAOCP volume 3, section 6.4)."""


@dataclass(frozen=True, eq=False)
class KeptRows:
    """A batch's rows that were in the cache, among rows of the same form for the others."""

    features: torch.Tensor
    """[B, ...] at the cut, on the host; rows that were not found hold anything."""
    labels: torch.Tensor
    """[B] int64 or [B, k] float32."""
    found: Flags


class PassFeatures:
    """The cache as one pass uses it. Thread-safe."""

    def __init__(
        self,
        cache: FeatureCache,
        cut: int,
        dtype: torch.dtype,
        form: LabelForm,
        buffers: BufferPool,
        counts: KeptCounts,
        tracer: Tracer,
        watch: CodeWatch,
        part: float = 1.0,
    ) -> None:
        """Read features of layer ``cut``, of type ``dtype``, with labels of ``form``, of a ``part`` of the samples;
        ``watch`` sees those that come from servers."""
        self.watch = watch
        self.cache, self.cut, self.dtype = cache, cut, dtype
        self.counts, self.part = counts, part
        self._form, self._buffers, self._tracer = form, buffers, tracer

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's features."""
        return self.cache.sample_bytes

    def held(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are cached and worth reading, as far as is known; bool [n]."""
        return self.cache.held(ids) & in_part(ids, self.part)

    def in_memory(self, batches: Sequence[IntArray]) -> list[bool]:
        """Return which of ``batches``, none of them empty, lie in this process's memory whole, and so will stay."""
        if not batches:
            return []
        flags = self.cache.in_memory(np.concatenate(batches))
        starts = np.cumsum([0, *map(len, batches[:-1])])
        whole: list[bool] = np.logical_and.reduceat(flags, starts).tolist()
        return whole

    def take(self, number: int, ids: IntArray) -> KeptRows:
        """Read batch ``number``, of samples ``ids``, which :meth:`in_memory` has found to be there."""
        kept = self.read(number, ids, np.ones(len(ids), dtype=np.bool_))
        if not kept.found.all():
            raise HapiError(f"batch {number}: features have left the memory; this is a defect of hapi")
        return kept

    def read(self, number: int, ids: IntArray, held: Flags) -> KeptRows:
        """Read what the cache has of batch ``number``.

        Args:
            number: of the batch, for the trace.
            ids: its samples.
            held: what :meth:`held` said of them when the batch opened; what has come since then does not count.
        """
        features = self._buffers.tensor((len(ids), *self.cache.key.shape), self.dtype)
        labels = self._form.empty(len(ids))
        started = time.monotonic()
        with self._tracer.span("read features", "decode", batch=number):
            found = self._read(ids, held, byte_rows(features), labels)
        self.counts.read(int(found.sum()) * self.sample_bytes, time.monotonic() - started)
        return KeptRows(features, torch.from_numpy(labels), found)

    def _read(self, ids: IntArray, held: Flags, features: npt.NDArray[np.uint8], labels: LabelArray) -> Flags:
        if self.part >= 1:
            return held & self.cache.read(ids, features, labels)
        rows = np.flatnonzero(held)  # the others would be read for nothing
        some, some_labels = (
            np.empty((len(rows), features.shape[1]), dtype=np.uint8),
            self._form.empty(len(rows)),
        )
        sound = self.cache.read(ids[rows], some, some_labels)
        features[rows], labels[rows] = some, some_labels
        found = np.zeros(len(ids), dtype=np.bool_)
        found[rows] = sound
        return found


def in_part(ids: IntArray, part: float) -> Flags:
    """Return which of samples ``ids`` belong to a ``part`` of all, bool [n]; the same in every epoch and process.

    A larger part holds a smaller one.
    """
    if part >= 1:
        return np.ones(len(ids), dtype=np.bool_)
    mixed = ids.astype(np.uint64) * _GOLDEN
    flags: Flags = (mixed >> np.uint64(32)).astype(np.float64) < part * 2.0**32
    return flags


def byte_rows(features: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of host features [n, ...], uint8 [n, bytes], over the same memory."""
    rows: npt.NDArray[np.uint8] = features.reshape(len(features), -1).view(torch.uint8).numpy()
    return rows


def rows_to_ask(found: Flags, request_size: int) -> IntArray:
    """Return the rows to ask servers for: those that were not found, and some that were.

    The latter make sure that no forward pass is smaller than :data:`EVEN_ROWS`, neither a request's last COS batch
    nor a micro-batch, in so far as the batch has as many rows.

    Args:
        found: bool [B], rows that were in the cache.
        request_size: most samples of a request.

    Returns:
        int64, ascending.
    """
    missing = np.flatnonzero(~found)
    count = len(missing)
    if not count or count == len(found):
        return missing
    while count < len(found) and count % request_size % EVEN_ROWS:
        count += 1
    return np.sort(np.concatenate([missing, np.flatnonzero(found)[: count - len(missing)]]))
