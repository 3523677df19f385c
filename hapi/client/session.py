"""A session: features for a training loop, extracted partly beside the store and partly here.

    session = Session.open(SessionSettings(model="resnet50", dataset="photos", server=("http://store:8099",)))
    optimiser = torch.optim.SGD(session.trained.parameters(), lr=0.01)
    for epoch in range(3):
        for features, labels in session.epoch(epoch):
            loss = torch.nn.functional.cross_entropy(session.trained(features), labels)
            optimiser.zero_grad(); loss.backward(); optimiser.step()

The session owns what is frozen: layers 1..split run on the servers, the other frozen ones here, in micro-batches,
in eval mode and without gradients. ``trained`` is an ordinary module of the remaining layers. With a strategy as
``split`` ("auto"), the session measures what batches cost and changes the split between batches, see
:mod:`hapi.client.planning.controller`; what the training loop gets is the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from hapi.arrays import IntArray
from hapi.client.early_checks import check_names
from hapi.client.job_context import JobContext, resolve_job
from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.epoch_stats import PassReport
from hapi.client.loading.link_stats import Traffic
from hapi.client.loading.pacing import Learned, RequestPacer
from hapi.client.loading.prefetcher import Batch, Prefetcher
from hapi.client.memory import FrozenSuffix, MemoryBudget, MicroBatch, to_device
from hapi.client.planning.cache_forecast import Expected, close_caches, open_caches
from hapi.client.planning.meter import Meter
from hapi.client.planning.split_source import Fixed, Named, Planned, Splits, planning_of
from hapi.client.recheck import Recheck, ServerLeftError
from hapi.client.settings import SessionSettings
from hapi.client.soundness import check_exactly_once, check_finite
from hapi.client.transport.http import Transport
from hapi.client.transport.server_pool import ServerPool
from hapi.closing import Closing
from hapi.config.settings import checked
from hapi.config.token import read_token
from hapi.data.epoch_order import batches
from hapi.errors import DataError, DeviceMemoryError, UsageError
from hapi.models.devices import finish, resolve_device, set_arithmetic
from hapi.models.graph.segment import Segment
from hapi.profiler.timing import TimedLayers, layer_segments
from hapi.trace import Tracer
from hapi.wire.labels import LabelKind

log = logging.getLogger("hapi.client")


class Session(Closing):
    """Delivers every sample of an epoch exactly once, in the sequence's order, as features at the freeze point.

    Use :meth:`open`, then :meth:`epoch`; close it, or use it as a context manager. Not thread-safe. A whole training::

        settings = hapi.SessionSettings(model="resnet50", dataset="flowers", server=("http://store:8099",))
        with hapi.Session.open(settings) as session:
            optimizer = torch.optim.AdamW(session.trained.parameters(), lr=1e-4)
            for epoch in range(3):
                for features, labels in session.epoch(epoch):
                    loss = torch.nn.functional.cross_entropy(session.trained(features), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    On a GPU it turns TF32 off in this process (unless the settings' ``tf32`` is on), so that both tiers compute the
    same, and waits for the GPU between two batches. Features come in the model's own type, whatever the precision.
    """

    def __init__(
        self,
        settings: SessionSettings,
        job_context: JobContext,
        budget: MemoryBudget,
        tracer: Tracer,
        optimizer_bytes: float,
    ) -> None:
        """See :meth:`open`, which makes ``job_context`` and ``budget`` from checked settings."""
        self.settings = settings
        self.job_context = job_context
        self.tracer = tracer
        self.device = job_context.device
        set_arithmetic(self.device, tf32=settings.tf32)
        self.budget = budget
        self._servers: ServerPool = job_context.servers
        self._buffers = BufferPool(pinned=self.device.type == "cuda")
        self._micro_batch = MicroBatch(settings.micro_batch)
        self._suffixes: dict[int, FrozenSuffix] = {}
        self._layers: dict[int, list[Segment]] = {}
        model = job_context.model
        self.last_split = job_context.last_split
        """Layers after this one run in :attr:`trained`: the freeze, or later over layers that train nothing."""
        self.trained: nn.Module = model.segment(self.last_split, len(model.layers), frozen=False)
        """The layers after the freeze: an ordinary module, in train mode unless the caller says otherwise."""
        self._trained_dtype = model.output_dtypes()[self.last_split]
        self.meter = Meter(self.device, 4 * settings.in_flight * self._servers.size)
        self._learned = Learned()
        self.caches = open_caches(job_context)
        """Caches of stored samples, by dataset; none without ``--sample-cache``."""
        self._used_caches = self.caches
        """None once a server was left whose samples may be in them."""
        self.recheck = Recheck(job_context, settings.recheck, self.budget) if settings.recheck else None
        """Compares some of what servers send; None without ``--recheck``."""
        try:
            self.planning = planning_of(
                settings, job_context, self.meter, budget, optimizer_bytes, self._expected()
            )
            """Chooses the split of each batch; None when it is fixed."""
            if (
                self.planning is not None and self.recheck is None
            ):  # what no split needs here takes no memory here
                model.release(self.planning.weights_from, len(model))
        except BaseException:
            close_caches(self.caches)
            raise
        self.last = PassReport()
        """Counters of the pass that is under way or was the last."""

    @classmethod
    def open(
        cls,
        settings: SessionSettings,
        *,
        token: str | None = None,
        tracer: Tracer | None = None,
        optimizer_bytes: float = 2.0,
        transports: Sequence[Transport] | None = None,
    ) -> Session:
        """Check the settings, connect, choose dataset and model, and check that they fit.

        Args:
            settings: where the data is, the model and its split, and how they are used.
            token: the servers' bearer token; None for that of the settings' ``token_file`` or of ``HAPI_TOKEN``.
            tracer: records what happens; None for nothing.
            optimizer_bytes: bytes that the loop's optimiser keeps for each byte of trained parameters, beside
                gradients (0 for plain SGD, 1 with momentum, 2 for Adam): for the plan's estimate of memory.
            transports: replace the servers of the settings.

        Raises:
            HapiError: one line that says what does not fit. Nothing is left open then.
        """
        settings = checked(settings)
        if transports is None:
            check_names(settings)
            token = read_token(settings.token_file) if token is None else token
        device = resolve_device(settings.device, "--device")
        budget = MemoryBudget(settings.memory, device)
        job_context = resolve_job(settings, device, token=token, transports=transports)
        try:
            return cls(settings, job_context, budget, tracer or Tracer(enabled=False), optimizer_bytes)
        except BaseException:
            job_context.servers.close()
            job_context.close()
            raise

    def close(self) -> None:
        """Drop the connections, and end the embedded server if there is one."""
        self._servers.close()
        close_caches(self.caches)
        self.job_context.close()

    @property
    def label_kind(self) -> LabelKind:
        """Kind of the labels: ``single``, ``multi`` or ``regression``."""
        return self.job_context.description.label_kind

    @property
    def retries(self) -> int:
        """Requests that failed and were made again, since the session began."""
        return self._servers.retries

    @property
    def reusable(self) -> bool:
        """True when a training sample has the same features in every epoch, so that your own loop may keep
        them.

        A random transform (``--augment``) draws anew in each epoch, unless it has one view only.
        """
        transform = self.job_context.transforms[0]
        return transform is None or not transform.random or self.job_context.views == 1

    def batch_ids(self, epoch: int) -> list[IntArray]:
        """Return the sample ids of every training batch of ``epoch``, in order: a pure function of order and
        epoch.
        """
        job_context, settings = self.job_context, self.settings
        return job_context.order.batches(
            epoch,
            job_context.training_ids,
            job_context.description.count,
            settings.bs,
            drop_last=settings.drop_last,
        )

    @property
    def split(self) -> int:
        """Split of batches that open now (a profiling batch aside)."""
        return self.job_context.split if self.planning is None else self.planning.split

    def epoch(
        self, epoch: int, start_batch: int = 0, split_of: Callable[[int], int] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (features [B, ...], labels) of each training batch of ``epoch``, on the session's device.

        Labels are int64 [B], the numbers of classes; of a dataset with several labels for a sample, or with
        numbers as labels, float32 [B, k] (``label_kind``).

        Args:
            epoch: number from 0.
            start_batch: batches to leave out, to resume in the middle of an epoch.
            split_of: returns the split of batch n of the epoch, instead of the session's own choice; it needs
                a session with a strategy, which has every layer at hand.

        Raises:
            HapiError: a whole pass did not deliver each of its samples exactly once, or a server or the store
                failed.
        """
        planned = self.batch_ids(epoch)
        if not planned:
            raise UsageError(
                "--drop-last leaves no batch: the dataset has fewer samples than --bs (times --trainers)"
            )
        if not 0 <= start_batch <= len(planned):
            raise UsageError(f"epoch {epoch} has {len(planned)} batches, cannot start at {start_batch}")
        planning = self.planning
        if split_of is not None:
            if planning is None:
                raise UsageError("split_of needs a session with a strategy, such as split='auto'")
            named = Named(self.job_context, split_of, planning.weights_from)
            return self._deliver(named, start_batch, planned, epoch)
        if planning is None:
            return self._deliver(Fixed(self.job_context, self.split), start_batch, planned, epoch)
        splits = Planned(self.job_context, planning, epoch, len(planned))
        return self._deliver(splits, start_batch, planned, epoch)

    def validation(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (features, labels) of the validation samples, in ascending order of id."""
        planned = list(batches(self.job_context.validation_ids, self.settings.bs))
        return self._deliver(Fixed(self.job_context, self.split, validation=True), 0, planned, 0)

    def _deliver(
        self, splits: Splits, first: int, planned: Sequence[IntArray], epoch: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The batches from ``first`` on. One that does not fit the memory is asked for again, at a later split."""
        delivered: list[IntArray] = []
        report = self.last = PassReport.over(Traffic(self._servers.received_bytes))
        if splits.measured:
            self.meter.follow(report.traffic)
        splits.begin()
        if self.recheck is not None:
            self.recheck.begin(planned)
        while first + len(delivered) < len(planned):
            try:
                begin = first + len(delivered)
                yield from self._prefetched(splits, epoch, begin, planned, delivered, report)
            except DeviceMemoryError:
                unfit, refused = report.unfit, report.refused
                report.unfit = report.refused = None
                number = first + len(delivered)
                if unfit is not None and splits.failed(number, unfit):
                    # Halved for layers that are no longer run here: what is left runs whole again.
                    self._micro_batch.size = self.settings.micro_batch
                elif refused is None or not splits.refused(number, refused):
                    raise
            except ServerLeftError:
                if self._used_caches:
                    log.warning(
                        "--sample-cache may hold samples of that server: it is not used any more; empty it with "
                        "'hapi cache clear'"
                    )
                self._used_caches = {}
        check_exactly_once(planned[first:], delivered)
        for cache in self.caches.values():
            cache.flush()

    def _prefetched(
        self,
        splits: Splits,
        epoch: int,
        first: int,
        planned: Sequence[IntArray],
        delivered: list[IntArray],
        report: PassReport,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        settings = self.settings
        window = Prefetcher(
            lambda number: splits.open(first + number).at(settings.seed, epoch),
            self._servers,
            planned[first:],
            request_size=settings.request_size,
            in_flight=settings.in_flight * self._servers.size,
            budget=settings.prefetch_bytes if self.planning is None else self.planning.received_ahead,
            buffers=self._buffers,
            tracer=self.tracer,
            traffic=report.traffic,
            caches=self._used_caches,
            pacing=RequestPacer(self._servers.received_bytes, report.traffic.link, self._learned),
            check=settings.check_features == "on",
            movable=splits.movable,
        )
        meter = self.meter if splits.measured else Meter(self.device)
        before, started = report.seconds, time.monotonic()
        waiting_since = seen = started
        try:
            for batch in window:
                report.stall_seconds += time.monotonic() - waiting_since
                split, number, count = batch.job.split, first + batch.number, len(batch.ids)
                if self.recheck is not None:
                    self.recheck.check(number, batch)
                report.timeline.begin(number, len(planned), batch)
                with report.client.running():
                    report.unfit = split
                    with (
                        self.tracer.span("frozen rest", "client", batch=number),
                        report.timeline.span("frozen rest"),
                    ):
                        features, labels = self._to_last_split(batch, meter)
                    report.unfit = None
                    delivered.append(batch.ids)
                    report.samples += count
                    report.splits[split] = report.splits.get(split, 0) + 1
                    del batch
                    with meter.working(split, "step", count), report.timeline.span("train step"):
                        yield features, labels
                        del features, labels
                        # The window takes the batch's pinned memory back for the next one, so its copy to the GPU
                        # must be over; a step's seconds are the GPU's; and no features pile up there. The copy that
                        # could have run under the step is short: a link feeds a GPU at least ten times slower.
                        finish(self.device)
                meter.batch(split, count)
                waiting_since = time.monotonic()
                report.seconds = before + waiting_since - started
                link = report.traffic.link
                splits.done(number, split, link.rates(seen), link.bounds(seen))
                seen = waiting_since
        finally:
            report.seconds = before + time.monotonic() - started
            report.refused = window.refused
            window.close()
            finish(self.device)  # also when the loop was left in the middle, before the memory is taken back

    def _expected(self) -> Expected | None:
        """Expected use of the training samples' cache, for a plan."""
        job_context, description = self.job_context, self.job_context.description
        cache = self.caches.get(description.reference)
        if cache is None:
            return None
        mean = description.total_bytes / max(1, description.count)
        return Expected(
            cache,
            job_context.training_ids,
            mean,
            epochs=self.settings.epochs,
            trainers=job_context.order.trainers,
        )

    def _to_last_split(self, batch: Batch, meter: Meter) -> tuple[torch.Tensor, torch.Tensor]:
        """Begun, not awaited: the batch's memory is in use until the device has come past it."""
        form = batch.job.labels
        if form.first_wrong(batch.labels.numpy()) is not None:
            raise DataError(f"batch {batch.number}: the server sent labels that are not {form.bounds}")
        labels = to_device(batch.labels, self.device)
        split = batch.job.split
        if split == self.last_split:
            return to_device(batch.features, self.device).to(self._trained_dtype), labels
        suffix = self._suffix(split)
        timed = TimedLayers(self._layers[split], self.device) if batch.job.time_layers else None
        with meter.working(split, "suffix" if timed is None else "timed", len(batch.ids)):
            features = suffix(batch.features, timed)
            if self.settings.frozen_precision == "fp16" and self.settings.check_features == "on":
                what = f"features of layer {self.last_split}, computed here,"
                check_finite(features, batch.ids, what, "fp16")
            if self.planning is not None:
                finish(self.device)  # so that these seconds are not counted as the step's
        if timed is not None:
            meter.layers(split, timed.seconds)
        return features, labels

    def _suffix(self, split: int) -> FrozenSuffix:
        """The frozen layers after ``split``; their weights are fetched when they are not here yet."""
        if split not in self._suffixes:
            frozen, last_split = self.job_context.frozen, self.last_split
            self.job_context.client_model.load_from(split)
            self.job_context.place_weights(split)
            segment = frozen.segment(split, last_split, frozen=True)
            shape, dtype = frozen.output_shapes()[last_split], self._trained_dtype
            self._suffixes[split] = FrozenSuffix(
                segment, tuple(shape), dtype, self._micro_batch, self.device, self.budget
            )
            self._layers[split] = layer_segments(frozen, split, last_split)
        return self._suffixes[split]
