"""Assembly of a batch: rows that servers sent and rows that were kept become what the trained layers take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hapi.arrays import IntArray
from hapi.cache.feature_key import WireRounding
from hapi.client.caching.filling import ComputedRows
from hapi.client.caching.sources import KeptRows, PassFeatures
from hapi.client.delivery.frozen_layers import FrozenLayers
from hapi.client.job_context import JobContext
from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.prefetcher import Batch, Fetched
from hapi.client.loading.tried_codecs import TriedCodecs
from hapi.client.memory import to_device
from hapi.client.planning.counts import Kind
from hapi.client.planning.meter import Meter
from hapi.client.soundness import check_finite
from hapi.codecs.names import LOSSY
from hapi.errors import DataError, HapiError
from hapi.models.devices import finish


@dataclass(frozen=True, eq=False)
class Assembled:
    """A batch for the trained layers, on the device. Begun, not awaited: the batch's memory is in use until then."""

    features: torch.Tensor
    labels: torch.Tensor
    computed: ComputedRows | None
    """Features to keep, whose copy may also be under way; None when nothing is kept of this batch."""


class Assembly:
    """Assembles the batches of a session. Not thread-safe."""

    def __init__(
        self,
        job_context: JobContext,
        layers: FrozenLayers,
        buffers: BufferPool,
        tried: TriedCodecs,
        *,
        check_overflow: bool,
        planned: bool,
    ) -> None:
        """Run frozen layers with ``layers``.

        Args:
            job_context: the session's.
            layers: those of this side.
            buffers: host memory for features to keep.
            tried: takes samples of what layers give in batches that are timed layer by layer.
            check_overflow: refuse features, computed here in fp16, that are not finite.
            planned: wait for the device before the training step, so that each has its own seconds.
        """
        self._device, self._last_split = job_context.device, job_context.last_split
        self._layers, self._buffers, self._tried = layers, buffers, tried
        self._check_overflow, self._planned = check_overflow, planned
        self._dtype = job_context.model.output_dtypes()[self._last_split]

    def assemble(
        self, batch: Batch, source: PassFeatures | None, meter: Meter, *, keep: bool = False
    ) -> Assembled:
        """Return ``batch`` for the trained layers.

        Args:
            batch: as the prefetcher hands it out.
            source: the features that are kept in this pass.
            meter: counts this side's work on what servers sent.
            keep: whether what is computed here is to be kept.

        Raises:
            DataError: a label is none.
            DeviceMemoryError: the device has no memory for it.
        """
        fetched, labels = batch.fetched, to_device(_labels(batch), self._device)
        if fetched is None:
            features = self._run(_kept(batch).features, _cut(source), self._last_split, batch.ids)
            return Assembled(features.to(self._dtype), labels, None)
        split, last, share = fetched.job.split, self._last_split, len(fetched.rows) / len(batch.ids)
        meet = last if source is None or split > source.cut else source.cut
        seconds: list[float] | None = [] if fetched.job.time_layers else None
        work: Kind = "suffix" if seconds is None else "timed"
        if split == last:
            features = to_device(fetched.features, self._device)
        else:
            with meter.working(split, work, len(fetched.rows)):
                features = self._run(fetched.features, split, meet, fetched.ids, seconds)
        rows, computed = _new_rows(fetched, batch.kept), None
        if source is not None and keep and meet == source.cut:
            computed = self._copied(features, fetched, source, rows)
        if batch.kept is not None:
            features = self._merged(features, batch, rows, _cut(source), meet)
        if meet < last:
            with meter.working(split, work, 0, share=share):
                features = self._run(features, meet, last, batch.ids, seconds, share)
        if seconds:
            meter.layers(split, seconds)
        return Assembled(features.to(self._dtype), labels, computed)

    def _run(
        self,
        features: torch.Tensor,
        start: int,
        stop: int,
        ids: IntArray,
        seconds: list[float] | None = None,
        share: float = 1.0,
    ) -> torch.Tensor:
        """Layers ``start + 1`` to ``stop`` over samples ``ids``; with a plan they are waited for, so that their
        seconds are not the step's.

        ``seconds`` takes those of each layer, of which ``share`` counts.
        """
        if start == stop:
            return to_device(features, self._device)
        suffix = self._layers.suffix(start, stop)
        timed = None if seconds is None else self._layers.timed(start, stop, self._tried)
        output = suffix(features, timed)
        if self._check_overflow:
            check_finite(output, ids, f"features of layer {stop}, computed here,", "fp16")
        if self._planned:
            finish(self._device)
        if seconds is not None and timed is not None:
            seconds += [share * each for each in timed.seconds]
        return output

    def _copied(
        self, features: torch.Tensor, fetched: Fetched, source: PassFeatures, rows: torch.Tensor | None
    ) -> ComputedRows:
        """A copy on the host of the new rows: the training loop may change its own."""
        ids, labels = fetched.ids, fetched.labels.numpy()
        if rows is not None:
            features, ids, labels = features[rows.to(self._device)], ids[rows.numpy()], labels[rows.numpy()]
        copy = self._buffers.tensor(tuple(features.shape), source.dtype)
        copy.copy_(features, non_blocking=True)
        job = fetched.job
        rounding = WireRounding(job.codec, job.split) if job.codec in LOSSY else None
        return ComputedRows(ids, copy, labels.copy(), rounding)

    def _merged(
        self, features: torch.Tensor, batch: Batch, rows: torch.Tensor | None, cut: int, meet: int
    ) -> torch.Tensor:
        """The kept rows and the new ones among ``features``, in the batch's order."""
        kept = _kept(batch)
        missing = torch.from_numpy(np.flatnonzero(~kept.found))
        if meet != cut:
            kept.features[missing] = 0  # they are run as well, and what they hold may be slow to compute with
        whole = self._run(kept.features, cut, meet, batch.ids)
        if meet == self._last_split:
            whole = whole.to(self._dtype)
        new = features if rows is None else features[rows.to(self._device)]
        whole[missing.to(self._device)] = new.to(whole.dtype)
        return whole


def _kept(batch: Batch) -> KeptRows:
    if batch.kept is None:
        raise HapiError(f"batch {batch.number}: rows are neither kept nor sent; this is a defect of hapi")
    return batch.kept


def _cut(source: PassFeatures | None) -> int:
    if source is None:
        raise HapiError("kept features of no cut; this is a defect of hapi")
    return source.cut


def _labels(batch: Batch) -> torch.Tensor:
    """Labels of all rows; :class:`DataError` when a server sent one that is none."""
    fetched = batch.fetched
    if fetched is not None and fetched.job.labels.first_wrong(fetched.labels.numpy()) is not None:
        raise DataError(
            f"batch {batch.number}: the server sent labels that are not {fetched.job.labels.bounds}"
        )
    if batch.kept is None and fetched is not None:
        return fetched.labels
    labels = _kept(batch).labels
    if fetched is not None:
        labels[torch.from_numpy(fetched.rows)] = fetched.labels
    return labels


def _new_rows(fetched: Fetched, kept: KeptRows | None) -> torch.Tensor | None:
    """Rows of ``fetched`` that were not kept; None for all of them."""
    if kept is None:
        return None
    new: IntArray = np.flatnonzero(~kept.found[fetched.rows])
    return None if len(new) == len(fetched.rows) else torch.from_numpy(new)
