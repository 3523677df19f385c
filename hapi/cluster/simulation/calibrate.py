"""The model's free parameters, fitted to runs that were observed; the error on runs that were held out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hapi.cluster.simulation.fleet import Fleet, load_fleet
from hapi.cluster.simulation.network import Floats
from hapi.cluster.simulation.observation import Observation
from hapi.cluster.simulation.replay import Profiles, load_profiles, replay
from hapi.config.settings import load, setting
from hapi.errors import UsageError

EFFICIENCY = (0.7, 1.0)
"""Bounds of the part of a link's bandwidth that contents get."""
OVERHEAD = (0.0, 0.2)
"""Bounds of a request's CPU seconds beside the profile."""
JITTER = (0.0, 0.2)
"""Bounds of the mean seconds, by chance, by which an answer begins later."""
ROUNDS = 5
"""Steps of the search."""
REPEATS = 3
"""Seeds over which a replay's rate is a mean."""
_BOUNDS = (OVERHEAD, EFFICIENCY, JITTER)
_STEPS = (0.002, 0.02, 0.01)
"""Differences of the parameters by which the effect of each is found."""
_Point = tuple[float, float, float]
"""Overhead, efficiency and jitter."""
_DAMPING = 1e-3


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """An observed run of a fleet, by its files."""

    fleet: Path = setting("fleet, as for replay, relative to this file")
    observed: Path = setting("observation, relative to this file")
    hold_out: bool = setting("tell the error, and do not fit it", default=False)


@dataclass(frozen=True, kw_only=True)
class RunsFile:
    """The file of ``hapi simulate calibrate``."""

    runs: tuple[RunFile, ...] = setting("observed runs")


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """A fleet, and the rate that it had."""

    name: str
    fleet: Fleet
    profiles: Profiles
    rate: float
    """Observed, in the unit of the ``rate_of`` of :func:`calibrate`."""
    hold_out: bool


@dataclass(frozen=True, kw_only=True)
class RunError:
    """One run beside its replay."""

    name: str
    hold_out: bool
    observed: float
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over observed, less 1."""
        return self.simulated / self.observed - 1

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**vars(self), "error": self.error}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The fitted parameters, and how far off the replays are with them."""

    overhead: float
    efficiency: float
    jitter: float
    errors: Sequence[RunError]

    def summary(self, *, hold_out: bool) -> tuple[float, float] | None:
        """Return the median and the largest size of the errors of runs of one kind; None without any."""
        sizes = [abs(error.error) for error in self.errors if error.hold_out == hold_out]
        return (statistics.median(sizes), max(sizes)) if sizes else None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        found: dict[str, Any] = {
            "overhead": self.overhead, "efficiency": self.efficiency, "jitter": self.jitter
        }  # fmt: skip
        for name, hold_out in (("fitted", False), ("held_out", True)):
            summary = self.summary(hold_out=hold_out)
            found[name] = None if summary is None else {"median": summary[0], "worst": summary[1]}
        return {**found, "runs": [error.to_json() for error in self.errors]}

    def lines(self) -> list[str]:
        """Return it for a person; the first three are lines of a fleet's file."""
        found = [
            f"overhead: {self.overhead * 1e3:.3g}ms",
            f"efficiency: {self.efficiency:.4f}",
            f"jitter: {self.jitter * 1e3:.3g}ms",
        ]
        found += [
            f"{error.name}: observed {error.observed:.4g}, simulated {error.simulated:.4g}, {error.error:+.1%}"
            + (" (held out)" if error.hold_out else "")
            for error in self.errors
        ]
        for name, hold_out in (("fitted", False), ("held out", True)):
            summary = self.summary(hold_out=hold_out)
            if summary is None:
                found.append(f"{name}: no runs, so that nothing tells how far off it is")
            else:
                found.append(f"{name}: {summary[0]:.1%} off (median), {summary[1]:.1%} (worst)")
        return found


RateOf = Callable[[Fleet, Profiles], float]


def bytes_per_second(fleet: Fleet, profiles: Profiles) -> float:
    """Return the bytes per second that a replay's servers send."""
    found = replay(fleet, profiles)
    return sum(group.nbytes for group in found.servers) / found.seconds


def samples_per_second(fleet: Fleet, profiles: Profiles) -> float:
    """Return the samples per second that a replay's trainers train with."""
    return replay(fleet, profiles).samples_per_second


def calibrate(
    runs: Sequence[ObservedRun],
    rate_of: RateOf = bytes_per_second,
    tell: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Fit the parameters to the runs that are not held out, and replay all runs with them.

    Args:
        runs: observed ones.
        rate_of: what is compared.
        tell: told what happens.

    Raises:
        UsageError: all runs are held out.
    """
    fitted = [run for run in runs if not run.hold_out]
    if not fitted:
        raise UsageError("all runs are held out; leave hold_out away from some, which are fitted")

    def logs(point: _Point) -> Floats:
        """Return the logarithm of simulated over observed of each run."""
        rates = [_rate(run, point, rate_of) / run.rate for run in fitted]
        return np.log(np.maximum(rates, 1e-9))

    point = _least_squares(logs, tell)
    errors = [
        RunError(
            name=run.name, hold_out=run.hold_out, observed=run.rate, simulated=_rate(run, point, rate_of)
        )
        for run in runs
    ]
    overhead, efficiency, jitter = point
    return Calibration(overhead=overhead, efficiency=efficiency, jitter=jitter, errors=errors)


def load_runs(path: str) -> list[ObservedRun]:
    """Read the file of observed runs; :class:`UsageError` or :class:`ConfigError` in one line for what is wrong."""
    folder, found = Path(path).parent, []
    for run in load(RunsFile, path, flags=False).value.runs:
        fleet = load_fleet(str(folder / run.fleet))
        observed = Observation.load(str(folder / run.observed))
        if observed.bytes_per_second <= 0:
            raise UsageError(f"{run.observed}: the servers sent nothing meanwhile; observe them at work")
        found.append(
            ObservedRun(
                name=run.fleet.stem,
                fleet=fleet,
                profiles=load_profiles(fleet, (folder / run.fleet).parent),
                rate=observed.bytes_per_second,
                hold_out=run.hold_out,
            )
        )
    return found


def _rate(run: ObservedRun, point: _Point, rate_of: RateOf) -> float:
    """The rate of a run's replays with these parameters."""
    overhead, efficiency, jitter = point
    fleet = replace(run.fleet, overhead=overhead, efficiency=efficiency, jitter=jitter)
    return statistics.fmean(
        rate_of(replace(fleet, seed=fleet.seed + number), run.profiles) for number in range(REPEATS)
    )


def _least_squares(logs: Callable[[_Point], Floats], tell: Callable[[str], None]) -> _Point:
    """The point of the smallest squared errors: Gauss and Newton's steps, within bounds."""
    now: _Point = (OVERHEAD[0], EFFICIENCY[1], _STEPS[2])
    best, smallest = now, math.inf
    for number in range(ROUNDS):
        off = logs(now)
        size = float(np.sum(off**2))
        if size < smallest:
            best, smallest = now, size
        tell(
            f"step {number + 1} of {ROUNDS}: overhead {now[0] * 1e3:.2f} ms, efficiency {now[1]:.4f}, "
            f"jitter {now[2] * 1e3:.1f} ms"
        )
        # Each parameter is moved into its bounds, in units of its own step.
        moves = [
            step if value + step <= high else -step
            for value, step, (_, high) in zip(now, _STEPS, _BOUNDS, strict=True)
        ]
        effects = np.stack([logs(_moved(now, at, move)) - off for at, move in enumerate(moves)], axis=1)
        damping = _DAMPING * np.eye(len(moves)) * max(size, 1e-9)
        change = np.linalg.solve(effects.T @ effects + damping, -effects.T @ off)
        for at, move in enumerate(moves):
            now = _moved(now, at, float(change[at]) * move)
    return best if smallest <= float(np.sum(logs(now) ** 2)) else now


def _moved(point: _Point, at: int, by: float) -> _Point:
    """A point with one parameter changed, within its bounds."""
    moved = list(point)
    moved[at] = float(np.clip(moved[at] + by, *_BOUNDS[at]))
    return (moved[0], moved[1], moved[2])
