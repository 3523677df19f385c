"""The place of an optimiser's states in a training: chosen, priced and told before its first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hapi.cache.disk_rates import measure_disk
from hapi.client.session import Session
from hapi.errors import UsageError
from hapi.offload.loop.notices import record
from hapi.offload.optimizer import OffloadedOptimizer
from hapi.offload.shards import shares_of
from hapi.offload.states.folder import discard, rank_folder
from hapi.offload.training import offload_states
from hapi.paths import user_cache_folder, user_path
from hapi.profiler.offload_costs import OffloadCosts, OffloadPrice, OffloadTerms
from hapi.train.settings import TrainingSettings
from hapi.train.steps.gradient_step import GradientStep
from hapi.units import format_bytes

log = logging.getLogger("hapi.client")

_PRICED_STEP = 2
"""Step of a process whose seconds a price takes: the first one prepares much for the first time."""


class Offloading:
    """States of a training's optimiser in memory, in host memory or on disk."""

    def __init__(self, session: Session, settings: TrainingSettings, step: GradientStep) -> None:
        """Choose the place, and put the optimiser of ``step`` there.

        What a killed run left in the folders is removed: the checkpoint has all that a training goes on from.

        Raises:
            UsageError: a folder cannot be used, is in use, or has too little room.
        """
        self._session, self._optimizer = session, step.optimizer
        self.where = settings.offload
        """``off``, ``host`` or ``disk``."""
        self._costs = _costs(settings, step)
        self._price: OffloadPrice | None = None
        self._report: dict[str, Any] | None = None
        self._is_closed = False
        self._folders: list[Path] = []
        self._seconds = 0.0
        self._marks: list[tuple[int, float]] = []
        """Steps that were taken, and seconds of the training without waits for the disks, after the first of them."""
        chosen = session.ranks.gathered(session.offload)
        needed = (choice for choice in chosen if choice and choice.where != "off")
        choice = self._choice = next(needed, session.offload)  # what one rank needs, all do
        if choice is not None and self._costs is not None:
            self._costs = replace(
                self._costs,
                keeps_gradients=choice.costs.keeps_gradients,
                is_on_cpu=choice.costs.is_on_cpu,
            )
        if settings.offload == "auto":
            self.where = "off" if choice is None else choice.where
        budget = session.budget.bytes
        room = "the memory" if budget is None else f"{format_bytes(budget)} of memory"
        size = "" if self._costs is None else f" of {format_bytes(self._costs.memory_without)}"
        states = f"parameters, gradients and states{size}"
        if self.where == "off" or self._costs is None:
            self.where = "off"
            self.why = f"{states} stay in memory"
            if settings.offload == "auto" and self._costs is not None:
                self.why = f"not needed: the training fits {room} with its {states}"
            log.info("offload: %s", self.why)
            for folder in _folders(settings, needed=False):
                discard(rank_folder(folder, *shares_of(step.module)))
            return
        self.why = f"asked for by --offload {settings.offload}"
        if choice is not None and choice.is_needed:
            self.why = f"the training does not fit {room} with its {states}"
        elif choice is not None and choice.faster is not None:
            self.why = str(choice.faster)
        folders = self._folders = _folders(settings) if self.where == "disk" else []
        self._put(step, folders)
        self._announce(folders)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the block's time as that of a step, for the report."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began
        if self._price is not None and not self._price.step_seconds:
            self._price_step(self._price)

    def close(self) -> None:
        """Remove the files; the report stays."""
        if isinstance(self._optimizer, OffloadedOptimizer) and not self._is_closed:
            self._report = self._optimizer.report()
            self._is_closed = True
            self._optimizer.close()

    def to_json(self) -> dict[str, Any]:
        """Return place, reason and cost for the report."""
        facts: dict[str, Any] = {"where": self.where, "why": self.why}
        if self.where == "off" or self._costs is None:
            return facts
        facts |= {
            "folders": [str(folder) for folder in self._folders],
            "state_bytes": self._costs.state_bytes,
            "disk_bytes": self._costs.disk_bytes if self.where == "disk" else self._costs.written,
            "step_seconds": round(self._seconds, 4),
        }
        facts |= {"bytes_freed": self._costs.saved, "bytes_a_step": self._costs.read + self._costs.written}
        if self._price is not None:
            facts |= {"read_rate": self._price.read_rate, "write_rate": self._price.write_rate}
        if isinstance(self._optimizer, OffloadedOptimizer):
            facts["cost"] = self._report or self._optimizer.report()
        return facts

    def _put(self, step: GradientStep, folders: Sequence[Path]) -> None:
        choice, room = self._choice, self._session.budget.bytes
        is_short = room is not None and (choice is None or choice.is_short)
        if self._costs is not None and room is not None and is_short:
            room = min(room, self._costs.memory_without)  # the rest of it holds what is not trained
        own = [rank_folder(folder, *shares_of(step.module)) for folder in folders]
        step.optimizer = offload_states(
            step.module, step.optimizer, room, own, resumes=False, is_short=is_short, say=record
        )
        self._optimizer = step.optimizer

    def _announce(self, folders: Sequence[Path]) -> None:
        """Say, before the first step, what it costs and what would make it free."""
        costs = self._costs
        if costs is None or not folders:
            log.warning("offload: %s; the states go to host memory", self.why)
            return
        read, write = rates_of(folders)
        text = f"{self.why}; the states go to {', '.join(map(str, folders))}"
        if read and write:
            self._price = OffloadPrice(
                costs=costs,
                read_rate=read,
                write_rate=write,
                step_seconds=self._step_seconds(),
                batch=self._session.settings.bs,
                samples=len(self._session.job_context.training_ids),
                freezes=() if self._choice is None else self._choice.freezes,
            )
            text += f", {self._price}"
        if (choice := self._choice) is not None and choice.fitting_freeze is not None:
            text += f"; --freeze {choice.fitting_freeze} would fit without"
        log.warning("offload: %s", text)

    def _price_step(self, price: OffloadPrice) -> None:
        """Say the price once the second step is measured, where no profile said how long one takes."""
        if not isinstance(self._optimizer, OffloadedOptimizer):
            return
        steps = self._optimizer.steps
        if self._marks and self._marks[-1][0] == steps:
            return
        self._marks.append((steps, self._seconds - self._optimizer.report()["waited_seconds"]))
        if len(self._marks) > _PRICED_STEP:
            seconds = self._marks[-1][1] - self._marks[-2][1]
            self._price = replace(price, step_seconds=max(seconds, 1e-9))
            log.warning("offload: as the first steps show, %s", self._price)

    def _step_seconds(self) -> float:
        """Seconds of a batch in the trained layers by the given profile; 0 without one."""
        planning = self._session.planning
        profile = None if planning is None else planning.profile
        return 0.0 if profile is None else profile.step_seconds * self._session.settings.bs


def offload_terms(settings: TrainingSettings) -> OffloadTerms | None:
    """Return what may be offloaded, with a probe of the disks that it would go to; None where all stays in memory."""
    terms = settings.offload_terms
    folders = _folders(settings, needed=False)
    return terms if terms is None or not folders else replace(terms, rates=lambda: rates_of(folders))


def rates_of(folders: Sequence[Path]) -> tuple[float, float]:
    """Measure the bytes a second that disks read and write together; 0 where that cannot be measured."""
    found = [measure_disk(folder) for folder in folders]
    return sum(rates.read or 0.0 for rates in found), sum(rates.write or 0.0 for rates in found)


def _costs(settings: TrainingSettings, step: GradientStep) -> OffloadCosts | None:
    """Costs of the trained parameters; None where their states have to stay in memory."""
    terms = settings.offload_terms
    sizes = [parameter.numel() for group in step.optimizer.param_groups for parameter in group["params"]]
    if terms is None or not sizes:
        return None
    return OffloadCosts(parameters=sum(sizes), states=terms.states, drives=terms.drives, largest=max(sizes))


def _folders(settings: TrainingSettings, *, needed: bool = True) -> list[Path]:
    """Folders of the states; UsageError where there is none for ones that are ``needed``."""
    if settings.offload_dir:
        return [user_path(folder, "--offload-dir") for folder in settings.offload_dir]
    kept = user_cache_folder() if settings.output is None else Path(settings.output)
    if kept is None and needed:
        raise UsageError("--offload disk needs --offload-dir DIR: this user has no home")
    return [] if kept is None else [kept]
