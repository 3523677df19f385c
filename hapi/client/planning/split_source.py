"""Sources of the splits of a pass's batches: one for all, named by the caller, or planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from hapi.client.early_checks import check_fixed
from hapi.client.job_context import JobContext
from hapi.client.loading.job import ExtractionJob
from hapi.client.memory import MemoryBudget
from hapi.client.planning.controller import SplitController
from hapi.client.planning.meter import Meter, tier_of
from hapi.client.planning.plan_records import fitted
from hapi.client.planning.reuse_choice import ReuseChooser
from hapi.client.planning.split_range import SplitRange, blank_profile
from hapi.client.planning.warm_up import WarmUp
from hapi.client.settings import DataSettings, ModelSettings, SessionSettings
from hapi.client.transport.told_waits import told_waits
from hapi.errors import ConfigError, UsageError
from hapi.profiler.fit import Arrivals, Sizes
from hapi.profiler.offload_costs import OffloadChoice, OffloadTerms, choose_offload, price_offload
from hapi.profiler.profile import Job, Profile
from hapi.profiler.sizes import sizes_of
from hapi.profiler.stages.crowd import with_waits


class Splits(Protocol):
    """Source of the splits of a pass's batches."""

    @property
    def usual(self) -> int | None:
        """Split of most batches that open now; None where a caller names each batch's."""

    @property
    def measured(self) -> bool:
        """True when the costs of these batches count for the plan."""

    def begin(self) -> None:
        """Begin the pass."""

    def open(self, number: int) -> ExtractionJob:
        """Return the job of batch ``number``, which opens; from any thread."""

    def may_open(self, live: int) -> bool:
        """Return whether another batch may open beside ``live`` others; from any thread."""

    def done(self, number: int, split: int, rates: Arrivals, bounds: Arrivals) -> None:
        """Note that batch ``number`` was handed out and worked on.

        ``rates`` has (bytes, seconds) of arrivals since the last one, ``bounds`` upper bounds of seconds.
        """

    def passed(self) -> None:
        """Note that a batch was handed out and worked on that no server was asked for."""

    def failed(self, number: int, split: int) -> bool:
        """Return whether batch ``number``, which did not fit this side's memory, is tried at another split."""

    def movable(self, split: int) -> bool:
        """Return whether a batch that servers have no memory for at ``split`` may be tried at an earlier one."""

    def refused(self, number: int, split: int) -> bool:
        """Return whether batch ``number``, which a server has no memory for, is tried at another split."""


@dataclass
class Fixed:
    """One split for all batches."""

    job_context: JobContext
    split: int
    validation: bool = False

    @property
    def usual(self) -> int | None:
        """The only split."""
        return self.split

    @property
    def measured(self) -> bool:
        """False: no plan is made."""
        return not self.validation

    def begin(self) -> None:
        """Do nothing."""
        return

    def open(self, number: int) -> ExtractionJob:
        """Return the only job."""
        return self.job_context.job(self.split, validation=self.validation)

    def may_open(self, live: int) -> bool:
        """Return True."""
        return True

    def done(self, number: int, split: int, rates: Arrivals, bounds: Arrivals) -> None:
        """Do nothing."""
        return

    def passed(self) -> None:
        """Do nothing."""
        return

    def failed(self, number: int, split: int) -> bool:
        """Return False: there is no other split."""
        return False

    def movable(self, split: int) -> bool:
        """Return False: there is no other split."""
        return False

    def refused(self, number: int, split: int) -> bool:
        """Return False: there is no other split."""
        return False


class Named(Fixed):
    """The caller names the splits."""

    def __init__(self, job_context: JobContext, split_of: Callable[[int], int], weights_from: int) -> None:
        """Take splits from ``split_of``; the layers after split ``weights_from`` have their weights here."""
        super().__init__(job_context, 0)
        self._split_of = split_of
        self._range = SplitRange(weights_from, job_context.last_split)

    @property
    def usual(self) -> None:
        """None: the caller names them."""
        return None

    def open(self, number: int) -> ExtractionJob:
        """Return the job at the caller's split."""
        split = self._split_of(number)
        if split not in self._range:
            raise UsageError(f"split {split} is outside {self._range.min_split} to {self._range.max_split}")
        return self.job_context.job(split)


@dataclass
class Planned:
    """Splits that a :class:`SplitController` chooses."""

    job_context: JobContext
    planning: SplitController
    warm_up: WarmUp
    epoch: int
    batches: int
    """Batches of the whole epoch, of which a resumed one runs the last."""
    measured = True

    @property
    def usual(self) -> int | None:
        """The controller's split."""
        return self.planning.split

    def begin(self) -> None:
        """Begin a pass of the controller."""
        self.planning.begin_pass(self.epoch, self.batches)

    def open(self, number: int) -> ExtractionJob:
        """Return the job at the controller's split."""
        split, time_layers = self.planning.open(self.epoch, number)
        upcoming = self.planning.upcoming
        if upcoming is not None:
            self.warm_up.name(self.job_context.job(upcoming))
        return replace(self.job_context.job(split), time_layers=time_layers)

    def may_open(self, live: int) -> bool:
        """Ask the controller, which opens few ahead while it is undecided."""
        return self.planning.may_open(live)

    def done(self, number: int, split: int, rates: Arrivals, bounds: Arrivals) -> None:
        """Tell the controller about the batch."""
        self.planning.batch_done(self.epoch, number, split, rates, bounds)

    def passed(self) -> None:
        """Let the controller's clock go on."""
        self.planning.batch_passed()

    def failed(self, number: int, split: int) -> bool:
        """Ask the controller for another split."""
        return self.planning.failed(self.epoch, number, split)

    def movable(self, split: int) -> bool:
        """Ask the controller whether a smaller split fits."""
        return self.planning.movable(split)

    def refused(self, number: int, split: int) -> bool:
        """Ask the controller for an earlier split."""
        return self.planning.refused(self.epoch, number, split)


def planning_of(
    settings: SessionSettings,
    job_context: JobContext,
    meter: Meter,
    budget: MemoryBudget,
    optimizer_bytes: float,
    reuse: ReuseChooser | None = None,
    offload: OffloadChoice | None = None,
) -> SplitController | None:
    """Return the planning of a session; None when its split is fixed, which needs no profile.

    Args:
        settings: the session's.
        job_context: the job.
        meter: counts its costs.
        budget: this side's memory.
        optimizer_bytes: see :meth:`hapi.client.session.Session.open`.
        reuse: see :class:`SplitController`.
        offload: place of the optimiser's states; None where they stay in memory.
    """
    if job_context.strategy is None:
        check_fixed(settings)
        return None
    given = None if settings.profile is None else Profile.load(settings.profile)
    sizes, job = _sizes(settings, job_context, optimizer_bytes), _job(settings, job_context, budget)
    if offload is not None:
        sizes = replace(sizes, offloaded_bytes=offload.freed)
    if given is not None:
        given = with_waits(given, job, told_waits(job_context.servers))
    if given is not None and offload is not None:
        given = replace(given, update_seconds=given.update_seconds + offload.added_seconds)
    try:
        return SplitController(
            job_context.strategy,
            sizes,
            job,
            meter,
            replan=settings.replan == "on",
            profile_epochs=settings.profile_epoch,
            profile_batches=settings.profile_batches,
            profile=given,
            reuse=reuse,
        )
    except ConfigError as error:
        raise ConfigError(f"--profile {settings.profile}: {error}") from None


def offload_of(
    settings: SessionSettings,
    job_context: JobContext,
    budget: MemoryBudget,
    optimizer_bytes: float,
    terms: OffloadTerms,
) -> OffloadChoice:
    """Choose the place of the optimiser's states: by a given profile's seconds, otherwise by sizes alone.

    Args:
        settings: the session's.
        job_context: the job.
        budget: this side's memory.
        optimizer_bytes: see :meth:`hapi.client.session.Session.open`; of the optimiser with all in memory.
        terms: what the user asks for.
    """
    sizes, job = _sizes(settings, job_context, optimizer_bytes), _job(settings, job_context, budget)
    if settings.profile is None or job_context.strategy is None or terms.rates is None:
        only = job_context.split if job_context.strategy is None else None
        return choose_offload(blank_profile(sizes), job, terms, only)
    try:
        given = fitted(Profile.load(settings.profile), sizes)
    except ConfigError as error:
        raise ConfigError(f"--profile {settings.profile}: {error}") from None
    return price_offload(given, job, terms, terms.rates).choice


def _sizes(settings: ModelSettings, job_context: JobContext, optimizer_bytes: float) -> Sizes:
    description = job_context.description
    sizes = sizes_of(
        job_context.frozen,
        settings.model,
        job_context.freeze,
        stored_bytes=description.total_bytes / max(1, description.count),
        encoded=job_context.transforms[0] is not None,
        client=tier_of(job_context.device),
        optimizer_bytes=optimizer_bytes,
    )
    ranks = job_context.ranks
    return replace(
        sizes,
        one_machine=job_context.one_machine,
        client=replace(sizes.client, processors=max(1, sizes.client.processors // ranks.local_size)),
        ranks=ranks.size,
        local_ranks=ranks.local_size,
    )


def _job(settings: SessionSettings, job_context: JobContext, budget: MemoryBudget) -> Job:
    return Job(
        bs=job_context.ranks.largest_part(settings.bs),
        samples=_samples_of_an_epoch(settings, job_context),
        epochs=settings.epochs,
        micro_batch=settings.micro_batch,
        request_size=settings.request_size,
        in_flight=settings.in_flight * job_context.servers.size,
        prefetch_bytes=settings.prefetch_bytes,
        memory_bytes=budget.bytes,
        alternate=settings.alternate == "on" and job_context.strategy == "auto",
    )


def _samples_of_an_epoch(settings: DataSettings, job_context: JobContext) -> int:
    """Samples that this trainer uses; at least 1, as an epoch without any is refused when it begins."""
    count, trainers = len(job_context.training_ids), job_context.order.trainers
    if settings.drop_last:
        return max(1, count // (settings.bs * trainers) * job_context.ranks.largest_part(settings.bs))
    return -(-count // job_context.processes)
