"""A session: features for a training loop, extracted partly beside the store and partly here.

    session = Session.open(TrainSettings(model="resnet50", dataset="photos", server=("http://store:8099",)))
    optimiser = torch.optim.SGD(session.trained.parameters(), lr=0.01)
    for epoch in range(3):
        for features, labels in session.epoch(epoch):
            loss = torch.nn.functional.cross_entropy(session.trained(features), labels)
            optimiser.zero_grad(); loss.backward(); optimiser.step()

The session owns what is frozen: layers 1..split run on the servers, split+1..freeze here, in micro-batches, in
eval mode and without gradients. ``trained`` is an ordinary module of the remaining layers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from hapi.client.buffers import BufferPool
from hapi.client.job import ExtractionJob
from hapi.client.memory import FrozenRest, to_device
from hapi.client.prepare import Prepared, prepare
from hapi.client.servers import ServerPool
from hapi.client.settings import TrainSettings
from hapi.client.window import Batch, Traffic, Window
from hapi.clocks import BusyClock
from hapi.config import checked
from hapi.errors import DataError, HapiError, UsageError
from hapi.models.devices import exact_arithmetic, finish
from hapi.storage.sequence import batches, epoch_sequence
from hapi.trace import Tracer
from hapi.wire.messages import IdArray


@dataclass
class PassReport:
    """Counters of one pass over some samples (a training epoch or a validation)."""

    samples: int = 0
    """Samples handed to the training loop, those in its hands included."""
    seconds: float = 0.0
    stall_seconds: float = 0.0
    """Seconds that the training loop waited for its next batch."""
    client: BusyClock = field(default_factory=BusyClock)
    """Seconds in which this side computed: decode, frozen rest, and the training loop's own work."""
    traffic: Traffic = field(default_factory=Traffic)


class Session:
    """Delivers every sample of an epoch exactly once, in the sequence's order, as features at the freeze point.

    Use :meth:`open`, then :meth:`epoch`; close it, or use it as a context manager. Not thread-safe.

    On a GPU it turns TF32 off in this process, see :func:`hapi.models.devices.exact_arithmetic`, and waits for the
    GPU between two batches.
    """

    def __init__(self, settings: TrainSettings, prepared: Prepared, tracer: Tracer | None = None) -> None:
        self.settings = settings
        self.prepared = prepared
        self.tracer = tracer or Tracer(enabled=False)
        self.device = prepared.device
        exact_arithmetic(self.device)
        self._servers: ServerPool = prepared.servers
        self._buffers = BufferPool(pinned=self.device.type == "cuda")
        model, split = prepared.model, prepared.job.split
        self.boundary = max(prepared.freeze, split)
        """Layers after this one run in :attr:`trained`."""
        self._rest: FrozenRest | None = None
        if self.boundary > split:
            segment = model.segment(split, self.boundary, frozen=True).to(self.device)
            shape, dtype = model.output_shapes()[self.boundary], model.output_dtypes()[self.boundary]
            self._rest = FrozenRest(segment, tuple(shape), dtype, settings.micro_batch, self.device)
        self.trained: nn.Module = model.segment(self.boundary, len(model.layers), frozen=False).to(
            self.device
        )
        """The layers after the freeze: an ordinary module, in train mode unless the caller says otherwise."""
        self.last = PassReport()
        """Counters of the pass that is under way or was the last."""

    @classmethod
    def open(
        cls, settings: TrainSettings, *, token: str | None = None, tracer: Tracer | None = None
    ) -> Session:
        """Connect, choose data set and model, and check that they fit; see :func:`hapi.client.prepare.prepare`."""
        settings = checked(settings)
        prepared = prepare(settings, token=token)
        try:
            return cls(settings, prepared, tracer)
        except BaseException:
            prepared.servers.close()
            prepared.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections, and end the embedded server if there is one."""
        self._servers.close()
        self.prepared.close()

    @property
    def retries(self) -> int:
        """Requests that failed and were made again, since the session began."""
        return self._servers.retries

    def batch_ids(self, epoch: int) -> list[IdArray]:
        """The sample ids of every training batch of ``epoch``, in order: a pure function of seed and epoch."""
        ids = self.prepared.training_ids
        order = ids[epoch_sequence(self.settings.seed, epoch, len(ids))]
        return list(batches(order, self.settings.bs, drop_last=self.settings.drop_last))

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(features [B, ...], labels int64 [B]) of each training batch of ``epoch``, on the session's device.

        ``start_batch`` batches are left out, to go on in the middle of an epoch. A whole pass that would not
        have delivered each of its samples exactly once raises :class:`HapiError`.
        """
        planned = self.batch_ids(epoch)
        if not planned:
            raise UsageError("--drop-last leaves no batch: the data set has fewer samples than --bs")
        if not 0 <= start_batch <= len(planned):
            raise UsageError(f"epoch {epoch} has {len(planned)} batches, cannot start at {start_batch}")
        return self._deliver(self.prepared.job, planned[start_batch:])

    def validation(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(features, labels) of the validation samples, in ascending order of id."""
        ids, job = self.prepared.validation_ids, self.prepared.validation_job
        return self._deliver(job, list(batches(ids, self.settings.bs)))

    def _deliver(
        self, job: ExtractionJob, planned: Sequence[IdArray]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        settings = self.settings
        window = Window(
            job,
            self._servers,
            planned,
            request_size=settings.request_size,
            in_flight=settings.in_flight * self._servers.size,
            budget=settings.prefetch_bytes,
            buffers=self._buffers,
            tracer=self.tracer,
        )
        report = self.last = PassReport(traffic=window.traffic)
        report.client = window.traffic.decode
        delivered: list[IdArray] = []
        started = asked = time.monotonic()
        try:
            for batch in window:
                report.stall_seconds += time.monotonic() - asked
                delivered.append(batch.ids)
                report.samples += len(batch.ids)
                with report.client.running():
                    with self.tracer.span("frozen rest", "client", batch=batch.number):
                        features, labels = self._to_freeze_point(batch)
                    del batch
                    yield features, labels
                    del features, labels
                    # The window takes the batch's pinned memory back for the next one, so its copy to the GPU
                    # must be over; a step's seconds are the GPU's; and no features pile up there. The copy that
                    # could have run under the step is short: a link feeds a GPU at least ten times slower.
                    finish(self.device)
                asked = time.monotonic()
                report.seconds = asked - started
            _check_exactly_once(planned, delivered)
        finally:
            report.seconds = time.monotonic() - started
            window.close()
            finish(self.device)  # also when the loop was left in the middle, before the memory is taken back

    def _to_freeze_point(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Begun, not awaited: the batch's memory is in use until the device has come past it."""
        classes = len(self.prepared.description.classes)
        if not 0 <= int(batch.labels.min()) <= int(batch.labels.max()) < classes:
            raise DataError(f"batch {batch.number}: the server sent labels outside 0 to {classes - 1}")
        labels = to_device(batch.labels, self.device)
        if self._rest is None:
            return to_device(batch.features, self.device), labels
        return self._rest(batch.features), labels


def _check_exactly_once(planned: Sequence[IdArray], delivered: Sequence[IdArray]) -> None:
    """Every planned sample arrived once: counted from the ids that the frames carried, not from the plan."""
    if not planned:
        return
    want, got = np.concatenate(planned), np.concatenate(delivered)
    size = int(max(want.max(), got.max())) + 1
    if not np.array_equal(np.bincount(want, minlength=size), np.bincount(got, minlength=size)):
        raise HapiError("an epoch did not use each sample exactly once; this is a defect of hapi")
