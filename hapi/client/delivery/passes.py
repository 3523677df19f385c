"""Passes over samples: batches come ahead, are assembled and handed to the training loop, until each was used."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from hapi.arrays import IntArray
from hapi.client.caching.filling import ComputedRows
from hapi.client.caching.keeping import Keeping
from hapi.client.caching.sources import PassFeatures
from hapi.client.delivery.assembly import Assembled, Assembly
from hapi.client.delivery.frozen_layers import FrozenLayers
from hapi.client.job_context import JobContext
from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.epoch_stats import PassReport
from hapi.client.loading.incoming import Incoming
from hapi.client.loading.job import ExtractionJob
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.pacing import Learned, RequestPacer
from hapi.client.loading.pass_loading import PassLoading
from hapi.client.loading.prefetcher import Batch
from hapi.client.loading.tried_codecs import TriedCodecs
from hapi.client.loading.wire_codecs import WireCodecs
from hapi.client.memory import EVEN_ROWS, MemoryBudget
from hapi.client.planning.controller import SplitController
from hapi.client.planning.meter import Meter
from hapi.client.planning.split_source import Fixed, Splits
from hapi.client.recheck import Recheck, ServerLeftError
from hapi.client.settings import SessionSettings
from hapi.client.soundness import check_exactly_once
from hapi.client.transport.holders import Holders
from hapi.client.transport.joint_rates import JointRates
from hapi.client.transport.link_meter import LinkMeter
from hapi.errors import DeviceMemoryError
from hapi.models.devices import finish
from hapi.trace import Tracer

Handed = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Passes:
    """Delivers the passes of a session, one at a time. Not thread-safe."""

    def __init__(
        self,
        settings: SessionSettings,
        job_context: JobContext,
        budget: MemoryBudget,
        tracer: Tracer,
        meter: Meter,
        keeping: Keeping,
        codecs: WireCodecs,
        tried: TriedCodecs,
        buffers: BufferPool,
        planning: SplitController | None,
        recheck: Recheck | None,
    ) -> None:
        """Use a session's parts, which it closes itself."""
        self._settings, self._tracer, self._meter = settings, tracer, meter
        self._job_context, self._servers = job_context, job_context.servers
        self._stall = job_context.stall
        self._device = job_context.device
        self._keeping, self._planning, self._recheck = keeping, planning, recheck
        self._codecs, self._buffers, self._learned = codecs, buffers, Learned()
        self._joint = JointRates()
        self._tried = tried
        self._layers = FrozenLayers(job_context, settings.micro_batch, budget)
        self._assembly = Assembly(
            job_context,
            self._layers,
            self._buffers,
            tried,
            check_overflow=settings.frozen_precision == "fp16" and settings.check_features == "on",
            planned=planning is not None,
        )
        described, servers = job_context.description, job_context.servers
        keeps = described.keeps_features
        self._holders = Holders(lambda: servers.names, described.count, described.group) if keeps else None
        self.report = PassReport()
        """Counters of the pass that is under way or was the last."""

    def deliver(
        self,
        splits: Splits,
        first: int,
        planned: Sequence[IntArray],
        epoch: int,
        *,
        validation: bool = False,
    ) -> Handed:
        """Yield the batches from ``first`` on. One that does not fit the memory is asked for again, at a later split.

        Args:
            splits: source of each batch's split.
            first: number of the first batch.
            planned: sample ids of all batches of the pass.
            epoch: number from 0.
            validation: whether these are the validation samples.
        """
        delivered: list[IntArray] = []
        report = self.report = PassReport.over(Traffic(self._servers.received_bytes, self._joint))
        if splits.measured:
            self._meter.follow(report.traffic)
        self._keeping.begin_pass()
        splits.begin()
        self._codecs.begin(epoch)
        if not validation:
            self._keeping.follow(None if self._planning is None else self._planning.reuse)
        if self._recheck is not None:
            self._recheck.begin(planned)
        source: PassFeatures | None = None
        while first + len(delivered) < len(planned):
            try:
                source = self._keeping.source(report.kept, epoch, splits.usual, validation=validation)
                yield from self._prefetched(splits, epoch, first, planned, delivered, report, source)
            except DeviceMemoryError:
                unfit, refused = report.unfit, report.refused
                report.unfit = report.refused = None
                number = first + len(delivered)
                if unfit is not None and splits.failed(number, unfit):
                    self._layers.restore_micro_batch()
                elif refused is None or not splits.refused(number, refused):
                    raise
            except ServerLeftError:
                self._keeping.distrust()
        check_exactly_once(planned[first:], delivered)
        if not validation:
            self._keep_left_over(source, epoch, planned, report)
        self._keeping.flush()

    def _prefetched(
        self,
        splits: Splits,
        epoch: int,
        first: int,
        planned: Sequence[IntArray],
        delivered: list[IntArray],
        report: PassReport,
        source: PassFeatures | None,
    ) -> Handed:
        """The batches that were not ``delivered`` yet, until one fails."""
        begin = first + len(delivered)
        window = self._incoming(splits, epoch, begin, planned, report, source)
        meter = self._meter if splits.measured else Meter(self._device)
        before, started = report.seconds, time.monotonic()
        waiting_since = seen = started
        try:
            for batch in window:
                report.stall_seconds += time.monotonic() - waiting_since
                self._stall.goes_on()
                number, asked = begin + batch.number, _Asked.of(batch)
                if self._recheck is not None:
                    self._recheck.check(number, batch)
                report.timeline.begin(number, len(planned), batch)
                if (found := batch.fetched) is not None:
                    self._codecs.consider(
                        found.job, found.features, report.traffic, report.samples, report.client.seconds
                    )
                report.client.begin()
                try:
                    assembled = self._assembled(batch, number, source, meter, report)
                    delivered.append(batch.ids)
                    report.handed_out(batch)
                    del batch
                    computed, stepping = assembled.computed, time.monotonic()
                    try:
                        with asked.step(meter), report.timeline.span("train step"):
                            yield assembled.features, assembled.labels
                            del assembled
                            # The window takes the batch's pinned memory back for the next one, so its copy to the GPU
                            # must be over; a step's seconds are the GPU's; and no features pile up there. The copy
                            # that could have run under the step is short: a link feeds a GPU ten times slower.
                            finish(self._device)
                    finally:  # also when the loop is left here
                        report.step_seconds += time.monotonic() - stepping
                        self._tried.measure()
                        self._keep(source, computed)
                        del computed
                finally:
                    report.client.end()
                self._stall.waits()
                waiting_since = time.monotonic()
                report.seconds = before + waiting_since - started
                self._tell(splits, meter, number, asked, report.traffic.link, seen)
                seen = waiting_since
        finally:
            self._stall.end()
            report.seconds = before + time.monotonic() - started
            report.refused = window.refused
            window.close()
            finish(self._device)  # also when the loop was left in the middle, before the memory is taken back

    def _incoming(
        self,
        splits: Splits,
        epoch: int,
        begin: int,
        planned: Sequence[IntArray],
        report: PassReport,
        source: PassFeatures | None,
    ) -> Incoming:
        return Incoming(
            lambda number: self._job(splits, begin + number, epoch),
            planned[begin:],
            source,
            lambda: self._loading(splits, report, source),
        )

    def _job(self, splits: Splits, number: int, epoch: int) -> ExtractionJob:
        job = splits.open(number).at(self._settings.seed, epoch)
        reuse = None if self._planning is None else self._planning.reuse
        return self._codecs.encoded(job, None if reuse is None else reuse.choice.crossing)

    def _loading(self, splits: Splits, report: PassReport, source: PassFeatures | None) -> PassLoading:
        settings, planning = self._settings, self._planning
        return PassLoading(
            servers=self._servers,
            request_size=settings.request_size,
            in_flight=settings.in_flight * self._servers.size,
            budget=settings.prefetch_bytes if planning is None else planning.received_ahead,
            buffers=self._buffers,
            tracer=self._tracer,
            traffic=report.traffic,
            caches=self._keeping.samples,
            keep_samples=source is None or not self._keeping.fills,
            features=source,
            pacing=RequestPacer(
                self._servers.received_bytes, report.traffic.link, self._learned, lambda: self._servers.size
            ),
            check=settings.check_features == "on",
            movable=splits.movable,
            may_open=splits.may_open,
            codecs=self._codecs,
            holders=self._holders if self._servers.size > 1 else None,
        )

    def _assembled(
        self, batch: Batch, number: int, source: PassFeatures | None, meter: Meter, report: PassReport
    ) -> Assembled:
        report.unfit = None if batch.fetched is None else batch.fetched.job.split
        with self._tracer.span("frozen rest", "client", batch=number), report.timeline.span("frozen rest"):
            assembled = self._assembly.assemble(batch, source, meter, keep=self._keeping.fills)
        report.unfit = None
        return assembled

    def _keep(self, source: PassFeatures | None, computed: ComputedRows | None) -> None:
        """Keep what was computed of a batch, once it is on the host; nothing where rounding is uncertain."""
        if source is None or computed is None:
            return
        if computed.rounding is None or not self._codecs.met_older:
            finish(self._device)
            self._keeping.keep(source, computed, self.report.times())

    def _keep_left_over(
        self, source: PassFeatures | None, epoch: int, planned: Sequence[IntArray], report: PassReport
    ) -> None:
        """Ask for the samples that ``epoch`` left out, at once and for the cache alone.

        Where memory is short they are left to the epochs that use them.
        """
        planning = self._planning
        split = self._job_context.split if planning is None else planning.split
        if source is None or split > source.cut:
            return
        ids = self._keeping.left_over(source, epoch, planned, None if planning is None else planning.reuse)
        if not len(ids):
            return
        # Samples that are kept make up for a forward pass that would be small.
        more = -(len(ids) % self._settings.request_size) % EVEN_ROWS
        batch = np.concatenate([ids, *planned[:more]])[: len(ids) + more]
        began = time.monotonic()
        try:
            self._compute(Fixed(self._job_context, split), epoch, batch, source, report)
        except DeviceMemoryError:
            return
        except ServerLeftError:
            self._keeping.distrust()
        finally:
            report.seconds += time.monotonic() - began

    def _compute(
        self, splits: Splits, epoch: int, ids: IntArray, source: PassFeatures, report: PassReport
    ) -> None:
        """Compute features of samples ``ids``, and keep those that are new."""
        if self._recheck is not None:
            self._recheck.begin([ids])
        means = replace(self._loading(splits, report, source), movable=lambda split: True)
        window = Incoming(lambda number: self._job(splits, number, epoch), [ids], source, lambda: means)
        try:
            for batch in window:
                if self._recheck is not None:
                    self._recheck.check(0, batch)
                with report.client.running(), self._tracer.span("left over", "client", samples=len(ids)):
                    assembled = self._assembly.assemble(batch, source, Meter(self._device), keep=True)
                    self._keep(source, assembled.computed)
        finally:
            window.close()
            finish(self._device)

    @staticmethod
    def _tell(splits: Splits, meter: Meter, number: int, asked: _Asked, link: LinkMeter, seen: float) -> None:
        """Tell the plan what a batch has cost, if it asked servers for something."""
        if asked.split is None:
            meter.leave_out()
            splits.passed()
            return
        meter.batch(asked.split, asked.samples, asked.share)
        splits.done(number, asked.split, link.rates(seen), link.bounds(seen))


class _Asked(NamedTuple):
    """Samples that a batch asked servers for: its costs are told for these samples only."""

    split: int | None
    """None when everything was kept."""
    samples: int
    share: float

    @classmethod
    def of(cls, batch: Batch) -> _Asked:
        """Return what ``batch`` asked for."""
        if batch.fetched is None:
            return cls(None, 0, 0.0)
        samples = len(batch.fetched.rows)
        return cls(batch.fetched.job.split, samples, samples / len(batch.ids))

    def step(self, meter: Meter) -> AbstractContextManager[None]:
        """Measure the training step in the block."""
        if self.split is None:
            return nullcontext()
        return meter.working(self.split, "step", self.samples, self.share)
