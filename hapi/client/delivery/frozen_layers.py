"""The frozen layers on this side: any run of them, in micro-batches, with their weights fetched at need."""

from __future__ import annotations

import torch

from hapi.client.job_context import JobContext
from hapi.client.loading.tried_codecs import TriedCodecs
from hapi.client.memory import FrozenSuffix, MemoryBudget, MicroBatch
from hapi.models.graph.segment import Segment
from hapi.profiler.timing import TimedLayers, layer_segments


class FrozenLayers:
    """Runs frozen layers of a session's model on its device. Not thread-safe."""

    def __init__(self, job_context: JobContext, micro_batch: int, budget: MemoryBudget) -> None:
        """Run at most ``micro_batch`` samples at a time, within ``budget``."""
        self._job_context, self._budget = job_context, budget
        self._whole = micro_batch
        self._micro_batch = MicroBatch(micro_batch)
        self._suffixes: dict[tuple[int, int], FrozenSuffix] = {}
        self._layers: dict[tuple[int, int], list[Segment]] = {}

    def restore_micro_batch(self) -> None:
        """Run whole micro-batches again, after layers that they were halved for are run here no longer."""
        self._micro_batch.size = self._whole

    def suffix(self, start: int, stop: int) -> FrozenSuffix:
        """Return layers ``start + 1`` to ``stop``; their weights are fetched when they are not here yet.

        At the last split they give the type that the trained layers take, else that of layer ``stop``.
        """
        if (start, stop) not in self._suffixes:
            context = self._job_context
            context.bring_weights(start)
            frozen = context.frozen
            model = context.model if stop == context.last_split else frozen
            self._suffixes[start, stop] = FrozenSuffix(
                frozen.segment(start, stop, frozen=True),
                tuple(frozen.output_shapes()[stop]),
                model.output_dtypes()[stop],
                self._micro_batch,
                context.device,
                self._budget,
            )
        return self._suffixes[start, stop]

    def timed(self, start: int, stop: int, tried: TriedCodecs) -> TimedLayers:
        """Return the same layers in a form that times each, and has codecs ``tried``; after :meth:`suffix`."""
        if (start, stop) not in self._layers:
            self._layers[start, stop] = layer_segments(self._job_context.frozen, start, stop)

        def observe(number: int, output: torch.Tensor) -> None:
            """Take a sample of a layer's output."""
            tried.sample(start + number + 1, output)

        return TimedLayers(self._layers[start, stop], self._job_context.device, observe)
