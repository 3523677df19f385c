"""Where the batches of a pass get their splits from: one for all, named by the caller, or planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from hapi.client.loading.job import ExtractionJob
from hapi.client.memory import MemoryBudget
from hapi.client.planning.controller import SplitController
from hapi.client.planning.meter import Meter, tier_of
from hapi.client.planning.split_range import SplitRange
from hapi.client.prepare import JobContext
from hapi.client.settings import DataSettings, PlanningSettings, SessionSettings
from hapi.errors import ConfigError, UsageError
from hapi.profiler.fit import Arrivals
from hapi.profiler.profile import Job, Profile
from hapi.profiler.sizes import sizes_of


class Splits(Protocol):
    """Where the batches of a pass get their splits from."""

    @property
    def measured(self) -> bool:
        """Whether what these batches cost counts for the plan."""

    def begin(self) -> None:
        """The pass begins."""

    def open(self, number: int) -> ExtractionJob:
        """The job of batch ``number``, which opens; from any thread."""

    def done(self, number: int, split: int, rates: Arrivals, bounds: Arrivals) -> None:
        """Batch ``number`` was handed out and worked on.

        ``rates``, ``bounds``: (bytes, seconds) of arrivals since the last one, as they took and as they took at most.
        """

    def failed(self, number: int, split: int) -> bool:
        """Batch ``number`` did not fit this side's memory; whether it is to be tried at another split."""

    def movable(self, split: int) -> bool:
        """Whether a batch that servers have no memory for at ``split`` may be tried at an earlier one."""

    def refused(self, number: int, split: int) -> bool:
        """A server has no memory for batch ``number``; whether it is to be tried at another split."""


@dataclass
class Fixed:
    prepared: JobContext
    split: int
    validation: bool = False

    @property
    def measured(self) -> bool:
        return not self.validation

    def begin(self) -> None:
        return

    def open(self, number: int) -> ExtractionJob:
        return self.prepared.job(self.split, validation=self.validation)

    def done(self, number: int, split: int, rates: Arrivals, bounds: Arrivals) -> None:
        return

    def failed(self, number: int, split: int) -> bool:
        return False

    def movable(self, split: int) -> bool:
        return False

    def refused(self, number: int, split: int) -> bool:
        return False


class Named(Fixed):
    """The caller names the splits."""

    def __init__(self, prepared: JobContext, split_of: Callable[[int], int], weights_from: int) -> None:
        """``weights_from``: the layers after this split have their weights here."""
        super().__init__(prepared, 0)
        self._split_of = split_of
        self._range = SplitRange(weights_from, prepared.last_split)

    def open(self, number: int) -> ExtractionJob:
        split = self._split_of(number)
        if split not in self._range:
            raise UsageError(f"split {split} is outside {self._range.min_split} to {self._range.max_split}")
        return self.prepared.job(split)


@dataclass
class Planned:
    prepared: JobContext
    planning: SplitController
    epoch: int
    batches: int
    """Batches of the whole epoch, of which a resumed one runs the last."""
    measured = True

    def begin(self) -> None:
        self.planning.begin_pass(self.epoch, self.batches)

    def open(self, number: int) -> ExtractionJob:
        split, time_layers = self.planning.open(self.epoch, number)
        return replace(self.prepared.job(split), time_layers=time_layers)

    def done(self, number: int, split: int, rates: Arrivals, bounds: Arrivals) -> None:
        self.planning.batch_done(self.epoch, number, split, rates, bounds)

    def failed(self, number: int, split: int) -> bool:
        return self.planning.failed(self.epoch, number, split)

    def movable(self, split: int) -> bool:
        return self.planning.movable(split)

    def refused(self, number: int, split: int) -> bool:
        return self.planning.refused(self.epoch, number, split)


def planning_of(
    settings: SessionSettings,
    prepared: JobContext,
    meter: Meter,
    budget: MemoryBudget,
    optimizer_bytes: float,
    cached: Callable[[int], tuple[float, float]] | None = None,
) -> SplitController | None:
    """The planning of a session; None when its split is fixed, which no profile has a say in.

    ``optimizer_bytes``: see :meth:`hapi.client.session.Session.open`. ``cached``: see :class:`SplitController`.
    """
    if prepared.strategy is None:
        if settings.profile is not None:
            raise UsageError(f"--profile {fixed_split(settings)}")
        return None
    given = None if settings.profile is None else Profile.load(settings.profile)
    description = prepared.description
    sizes = sizes_of(
        prepared.model,
        settings.model,
        prepared.freeze,
        stored_bytes=description.total_bytes / max(1, description.count),
        encoded=prepared.transforms[0] is not None,
        client=tier_of(prepared.device),
        optimizer_bytes=optimizer_bytes,
    )
    job = Job(
        bs=settings.bs,
        samples=_samples_of_an_epoch(settings, prepared),
        epochs=settings.epochs,
        micro_batch=settings.micro_batch,
        request_size=settings.request_size,
        in_flight=settings.in_flight * prepared.servers.size,
        prefetch_bytes=settings.prefetch_bytes,
        memory_bytes=budget.bytes,
    )
    try:
        return SplitController(
            prepared.strategy,
            sizes,
            job,
            meter,
            replan=settings.replan == "on",
            profile_epochs=settings.profile_epoch,
            profile_batches=settings.profile_batches,
            profile=given,
            cached=cached,
        )
    except ConfigError as error:
        raise ConfigError(f"--profile {settings.profile}: {error}") from None


def fixed_split(settings: PlanningSettings) -> str:
    """The end of the error for a flag about profiles, beside a split that no profile has a say in."""
    return (
        f"needs a split that is chosen from a profile, such as --split auto; split {settings.split} is fixed"
    )


def _samples_of_an_epoch(settings: DataSettings, prepared: JobContext) -> int:
    """That this trainer uses; at least 1, as an epoch without any is refused when it begins."""
    count, trainers = len(prepared.training_ids), prepared.order.trainers
    if settings.drop_last:
        return max(1, count // (settings.bs * trainers) * settings.bs)
    return -(-count // trainers)
