"""The fixed part of requests to the servers: one dataset, one model, one split. Immutable; a new split is a
new job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from hapi.arrays import IntArray
from hapi.codecs.names import NONE, Codec
from hapi.data.manifest import SampleLayout
from hapi.errors import BadRequestError, HapiError, UnprocessableError
from hapi.wire import messages
from hapi.wire.frames import TensorSpec
from hapi.wire.labels import SINGLE, LabelForm
from hapi.wire.references import DatasetReference, ModelReference, Precision, TransformSpec
from hapi.wire.sequences import ChunkWindows


@dataclass(frozen=True, kw_only=True)
class ExtractionJob:
    """Everything but the sample ids of the requests of one run (or part of one)."""

    dataset: DatasetReference
    layout: SampleLayout
    mean_stored_bytes: float
    """Mean bytes of a stored sample, for budgets at split 0."""
    stored_bytes: int = 1 << 62
    """Bytes of all samples of the dataset; no part of them has more."""
    transform: TransformSpec | None
    split: int
    split_name: str
    """Name of layer ``split``; empty for split 0."""
    model: ModelReference | None
    """None for split 0."""
    shape: tuple[int, ...]
    """Shape of one sample as the window delivers it: layer ``split``'s output, or the model's input."""
    dtype: torch.dtype
    id: str = ""
    """Id of the training run, by which a server tells its work from that of others."""
    windows: ChunkWindows | None = None
    """Chunk windows that the sample ids come from; None for other orders."""
    labels: LabelForm = SINGLE
    """Form of the samples' labels."""
    precision: Precision = "fp32"
    """Type of the frozen layers' results."""
    views: int | None = None
    """Draws of a random transform that take turns from epoch to epoch; None: a new one in each."""
    codec: Codec = NONE
    """Encoding that features may have on the wire."""
    time_layers: bool = False
    """True when the server times each layer for one request of every batch."""

    @property
    def path(self) -> str:
        """Path to which its requests are posted."""
        return messages.EXTRACT_PATH if self.split else messages.SAMPLES_PATH

    @property
    def keepable(self) -> bool:
        """True when servers may keep the features: none are for timing, nor of a transform that draws anew."""
        drawn = self.transform is not None and self.transform.random
        return self.split > 0 and not drawn and not self.time_layers

    def at(self, seed: int, epoch: int) -> ExtractionJob:
        """Return the job in one epoch: chunk windows and a random transform differ from epoch to epoch."""
        windows, transform = self.windows, self.transform
        view = epoch if self.views is None else epoch % self.views
        return replace(
            self,
            windows=None if windows is None else replace(windows, epoch=epoch),
            transform=transform.at(seed, view) if transform is not None and transform.random else transform,
        )

    def request(self, ids: IntArray, *, first: bool = False) -> dict[str, Any]:
        """Return the document that asks for ``ids``; ``first`` marks the first request of its batch."""
        if self.model is None:
            return messages.SamplesRequest(
                dataset=self.dataset, ids=ids, job=self.id, windows=self.windows
            ).to_json()
        return messages.ExtractRequest(
            dataset=self.dataset,
            model=self.model,
            split=self.split,
            split_name=self.split_name,
            ids=ids,
            transform=self.transform,
            time_layers=self.time_layers and first,
            job=self.id,
            windows=self.windows,
            precision=self.precision,
            codec=self.codec,
        ).to_json()

    def explained(self, error: BadRequestError, server: str) -> HapiError:
        """Return the error to raise for a request that ``server`` refused: ``error``, or one that says more."""
        if self.precision == "fp32" or f"unknown field {messages.PRECISION!r}" not in str(error):
            return error
        return UnprocessableError(
            f"{server} is of an older hapi, which computes in float32 only; update it, or leave "
            f"--frozen-precision {self.precision} away"
        )

    def sample_bytes(self) -> int:
        """Bytes of one delivered sample in memory."""
        return max(1, math.prod(self.shape) * self.dtype.itemsize)

    def expected_tensors(self, count: int) -> tuple[TensorSpec, ...]:
        """Return the forms of the tensors that a frame of ``count`` samples must carry (splits from 1)."""
        features = TensorSpec(messages.FEATURES, str(self.dtype).removeprefix("torch."), (count, *self.shape))
        return features, self.labels.spec(count)
