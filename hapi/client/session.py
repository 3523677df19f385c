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
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from hapi.arrays import IntArray
from hapi.cache.memory_rows import memory_bound
from hapi.client.caching.keeping import Keeping
from hapi.client.delivery.passes import Passes
from hapi.client.early_checks import check_names
from hapi.client.job_context import JobContext, resolve_job
from hapi.client.joint.ranks import ALONE, Ranks
from hapi.client.joint.shared_plan import PlannedTogether, SharedPlan
from hapi.client.joint.unshared import warn_of_unshared
from hapi.client.loading.buffers import BufferPool
from hapi.client.loading.epoch_stats import PassReport
from hapi.client.loading.tried_codecs import TriedCodecs
from hapi.client.loading.wire_codecs import WireCodecs
from hapi.client.memory import MemoryBudget
from hapi.client.planning.cache_facts import CacheFacts
from hapi.client.planning.controller import SplitController
from hapi.client.planning.meter import Meter
from hapi.client.planning.reuse_choice import ReuseChooser
from hapi.client.planning.split_source import (
    Fixed,
    Named,
    Planned,
    offload_of,
    planning_of,
)
from hapi.client.planning.warm_up import WarmUp
from hapi.client.recheck import Recheck
from hapi.client.settings import SessionSettings, WireCodec
from hapi.client.transport.server_pool import ServerPool
from hapi.closing import Closing
from hapi.codecs.names import NONE
from hapi.config.settings import checked
from hapi.config.token import read_token
from hapi.data.epoch_order import EpochOrder, batches
from hapi.errors import UsageError
from hapi.models.devices import resolve_device, set_arithmetic
from hapi.profiler.offload_costs import OffloadChoice, OffloadTerms
from hapi.text import counted
from hapi.trace import Tracer
from hapi.wire.labels import LabelKind
from hapi.wire.transport.base import Transport

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
        offload: OffloadTerms | None = None,
    ) -> None:
        """See :meth:`open`, which makes ``job_context`` and ``budget`` from checked settings."""
        self.settings = settings
        self.ranks = job_context.ranks
        """Processes that train one model together."""
        self._shared_plan = SharedPlan(self.ranks)
        self.job_context = job_context
        self.tracer = tracer
        self.device = job_context.device
        set_arithmetic(self.device, tf32=settings.tf32)
        self.budget = budget
        self._servers: ServerPool = job_context.servers
        model = job_context.model
        self.last_split = job_context.last_split
        """Layers after this one run in :attr:`trained`: the freeze, or later over layers that train nothing."""
        self.trained: nn.Module = model.segment(self.last_split, len(model.layers), frozen=False)
        """The layers after the freeze: an ordinary module, in train mode unless the caller says otherwise."""
        self._has_begun = self._is_closed = False
        """Whether an epoch was asked for, and whether none can be any more."""
        self._ordered: tuple[EpochOrder, int, list[IntArray]] | None = None
        """Batches of the epoch that was asked for last, in its order."""
        self.meter = Meter(self.device, 4 * settings.in_flight * self._servers.size)
        buffers = BufferPool(pinned=self.device.type == "cuda")
        one_machine = settings.wire_codec == "auto" and job_context.embedded is not None
        wire_codec: WireCodec = "none" if one_machine else settings.wire_codec
        tried = TriedCodecs(wire_codec, settings.cache_codec)
        self.planning: SplitController | None = None
        """Chooses the split of each batch; None when it is fixed."""
        self.keeping = Keeping(settings, job_context, buffers, tried, tracer, lambda: self.split)
        """Caches of this side."""
        self._warm_up = WarmUp(self._servers)
        self.codecs = WireCodecs(wire_codec, tried)
        """Encodings of features on the wire."""
        self.recheck = Recheck(job_context, settings.recheck, self.budget) if settings.recheck else None
        """Compares some of what servers send; None without ``--recheck``."""
        self.offload: OffloadChoice | None = None
        """Place of the optimiser's states; None for a loop that leaves them in memory."""
        try:
            if offload is not None:
                self.offload = offload_of(settings, job_context, budget, optimizer_bytes, offload)
            self.planning = planning_of(
                settings, job_context, self.meter, budget, optimizer_bytes, self._chooser(), self.offload
            )
            if self.planning is not None and self.recheck is None:
                # What no split needs here takes no memory here.
                model.release(self.planning.weights_from, len(model))
        except BaseException:
            self.keeping.close()
            raise
        self._passes = Passes(
            settings,
            job_context,
            budget,
            tracer,
            self.meter,
            self.keeping,
            self.codecs,
            tried,
            buffers,
            self.planning,
            self.recheck,
        )

    @classmethod
    def open(
        cls,
        settings: SessionSettings,
        *,
        token: str | None = None,
        tracer: Tracer | None = None,
        optimizer_bytes: float = 2.0,
        offload: OffloadTerms | None = None,
        transports: Sequence[Transport] | None = None,
        ranks: Ranks = ALONE,
    ) -> Session:
        """Check the settings, connect, choose dataset and model, and check that they fit.

        Args:
            settings: where the data is, the model and its split, and how they are used.
            token: the servers' bearer token; None for that of the settings' ``token_file`` or of ``HAPI_TOKEN``.
            tracer: records what happens; None for nothing.
            optimizer_bytes: bytes that the loop's optimiser keeps for each byte of trained parameters, beside
                gradients (0 for plain SGD, 1 with momentum, 2 for Adam): for the plan's estimate of memory.
            offload: what the loop can put elsewhere (:func:`hapi.offload_training`), which it does as the session's
                ``offload`` says; None where all stays.
            transports: replace the servers of the settings.
            ranks: processes that train one model together; each takes its part of every batch.

        Raises:
            HapiError: one line that says what does not fit. Nothing is left open then.
        """
        settings = checked(settings)
        if transports is None:
            check_names(settings)
            token = read_token(settings.token_file) if token is None else token
        device = ranks.device or resolve_device(settings.device, "--device")
        budget = MemoryBudget(settings.memory, device)
        job_context = resolve_job(settings, device, token=token, transports=transports, ranks=ranks)
        try:
            budget.leave(job_context.embedded_bytes(), ranks.local_size)
            own = tracer or Tracer(enabled=False)
            return cls(settings, job_context, budget, own, optimizer_bytes, offload)
        except BaseException:
            job_context.servers.close()
            job_context.close()
            raise

    def close(self) -> None:
        """Drop the connections, and end the embedded server if there is one."""
        self._is_closed = True
        self._servers.close()
        self.keeping.close()
        self.job_context.close()

    @property
    def last(self) -> PassReport:
        """Counters of the pass that is under way or was the last."""
        return self._passes.report

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
        epoch. With several ranks it has all their samples, of which :meth:`epoch` delivers this one's.
        """
        job_context, settings = self.job_context, self.settings
        order, known = job_context.order, self._ordered
        if known is None or known[:2] != (order, epoch):
            ids = order.batches(
                epoch,
                job_context.training_ids,
                job_context.description.count,
                settings.bs,
                drop_last=settings.drop_last,
            )
            known = self._ordered = order, epoch, ids
        return list(known[2])

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
        self._check_open()
        planned = self.batch_ids(epoch)
        if self.ranks.size > 1:
            planned = list(map(self.ranks.part, planned))
        elif not self._has_begun:
            warn_of_unshared(self.settings.trainers)
        self._has_begun = True
        if not planned:
            raise UsageError(
                "--drop-last leaves no batch: the dataset has fewer samples than --bs (times --trainers)"
            )
        if not 0 <= start_batch <= len(planned):
            raise UsageError(
                f"epoch {epoch} has {counted(len(planned), 'batch')}, cannot start at {start_batch}"
            )
        planning = self.planning
        if split_of is not None:
            if planning is None:
                raise UsageError("split_of needs a session with a strategy, such as split='auto'")
            named = Named(self.job_context, split_of, planning.weights_from)
            return self._passes.deliver(named, start_batch, planned, epoch)
        if planning is None:
            fixed = Fixed(self.job_context, self.split)
            return self._passes.deliver(fixed, start_batch, planned, epoch)
        splits = self._planned(planning, epoch, len(planned))
        return self._passes.deliver(splits, start_batch, planned, epoch)

    def validation(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (features, labels) of the validation samples, in ascending order of id.

        With several ranks, those of this one's part of each of ``validation_batches``.
        """
        self._check_open()
        planned = list(map(self.ranks.part, self.validation_batches()))
        fixed = Fixed(self.job_context, self.split, validation=True)
        return self._passes.deliver(fixed, 0, planned, 0, validation=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the session is closed; open another one (hapi.Session.open)")

    def _planned(self, planning: SplitController, epoch: int, count: int) -> Planned:
        if self.ranks.size == 1:
            return Planned(self.job_context, planning, self._warm_up, epoch, count)
        return PlannedTogether(
            self.job_context, planning, self._warm_up, epoch, count, shared=self._shared_plan
        )

    def validation_batches(self) -> list[IntArray]:
        """Return the ids of each batch of validation samples."""
        return list(batches(self.job_context.validation_ids, self.settings.bs))

    def _chooser(self) -> ReuseChooser | None:
        """The choice of what is kept; None where nothing can be, and time alone counts."""
        job_context, settings = self.job_context, self.settings
        folder, server_keeps = job_context.cache_folder, job_context.description.keeps_features
        if folder is None and not server_keeps and settings.objective == "time":
            return None
        facts = CacheFacts(
            ids=job_context.training_ids,
            trainers=job_context.processes,
            budget=0 if folder is None else folder.budget,
            memory_bytes=memory_bound(settings.cache_memory),
            samples=lambda: self.keeping.samples.get(job_context.description.reference),
            views=job_context.views or 1,
            features=self.keeping.training.shares,
            rounded=job_context.wire_rounding != NONE,
            refused=lambda: self.keeping.refusal,
            rates=self.keeping.rates,
            fast_part=(lambda: None) if folder is None else folder.fast_part,
            codecs=self.keeping.codecs,
            wire_codecs=self.codecs.costs,
            asked=self.meter.snapshot if server_keeps else None,
            server_room=lambda: self.keeping.server_room,
        )
        return ReuseChooser(
            facts,
            objective=settings.objective,
            prices=settings.prices,
            always=settings.cache == "on",
            wire_codecs=self.codecs.costs,
            kept_for=facts.kept_for if facts.views > 1 else None,
        )
