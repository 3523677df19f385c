"""Figures of ``benchmarks siege``, and its goals. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.load.siege_jobs import Rounds
from hapi.units import format_bytes

HEALTH_SECONDS, LOG_BYTES, MORE_MEMORY, MORE_DESCRIPTORS = 1.0, 1_000_000, 0.10, 8
"""Goals: the slowest answer; the whole log; resident memory and descriptors beside those before."""


@dataclass(frozen=True, kw_only=True)
class Siege:
    """One run."""

    settings: Mapping[str, Any]
    conditions: Mapping[str, Any]
    quiet: Mapping[str, Rounds]
    """Each job alone with the others, undisturbed."""
    rounds: Mapping[str, Rounds]
    """Each job under siege."""
    looks: Sequence[Mapping[str, Any]]
    """Looks at the server's health, see :mod:`benchmarks.load.siege_watch`."""
    down: Sequence[tuple[float, float]]
    """Begins and ends of the times when the server was dead because it had been killed."""
    before: Mapping[str, int]
    after: Mapping[str, int]
    log_bytes: int
    seen: Mapping[str, Counter[str]]
    """Counts by attack: what it did, and the answers."""
    seconds: float

    def health(self) -> list[float | None]:
        """Seconds of each answer, but for looks that met a killed server."""
        return [
            check["seconds"]
            for check in self.looks
            if not any(since - HEALTH_SECONDS <= check["at"] <= until for since, until in self.down)
        ]

    def difference(self, job: str) -> float:
        """Largest relative difference of an epoch's loss from the undisturbed one's."""
        if not self.quiet[job].losses:
            return float("inf")
        quiet = self.quiet[job].losses[0]
        pairs = [pair for losses in self.rounds[job].losses for pair in zip(losses, quiet, strict=True)]
        return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=float("inf"))

    def goals(self) -> dict[str, dict[str, Any]]:
        """Each goal with what it got."""
        health = self.health()
        slowest = max((10.0 if s is None else s for s in health), default=float("inf"))
        failures = sum(len(r.failures) for r in self.rounds.values())
        memory = self.after["resident"] / self.before["resident"] - 1
        more = self.after["descriptors"] - self.before["descriptors"]
        worst = max(self.difference(job) for job in self.rounds)
        found = {
            "jobs that failed": (failures, 0),
            "difference of losses": (worst, 0.0),
            "slowest health answer, s": (slowest, HEALTH_SECONDS),
            "more resident memory": (memory, MORE_MEMORY),
            "more descriptors": (more, MORE_DESCRIPTORS),
            "log, bytes": (self.log_bytes, LOG_BYTES),
        }
        return {
            name: {"got": got, "goal": goal, "reached": got <= goal} for name, (got, goal) in found.items()
        }

    def to_json(self) -> dict[str, Any]:
        """All of it, but for the single looks."""
        health = self.health()
        return {
            "benchmark": "siege",
            "conditions": dict(self.conditions),
            "settings": dict(self.settings),
            "seconds": self.seconds,
            "goals": self.goals(),
            "jobs": {
                name: {"undisturbed": asdict(self.quiet[name]), "besieged": asdict(rounds)}
                for name, rounds in self.rounds.items()
            },
            "health": {
                "looks": len(health),
                "unanswered": sum(s is None for s in health),
                "over_a_second": sum(s is None or s > HEALTH_SECONDS for s in health),
            },
            "before": dict(self.before),
            "after": dict(self.after),
            "killed": len(self.down),
            "seen": {name: dict(counts) for name, counts in self.seen.items()},
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        lines = [f"siege of {self.seconds:.0f} s, the server killed {len(self.down)} times"]
        for name, rounds in self.rounds.items():
            quiet = self.quiet[name].seconds
            lines.append(
                f"job {name}: {len(rounds.losses)} rounds, {rounds.kills} kills of its trainer, "
                f"{rounds.refused} starts on the full disk, "
                f"{sum(rounds.seconds) / max(1, len(rounds.seconds)):.1f} s a round "
                f"({quiet[0] if quiet else float('nan'):.1f} undisturbed), losses differ by {self.difference(name):.2g}"
            )
            lines += [f"  {failure}" for failure in rounds.failures]
        for name, counts in self.seen.items():
            lines.append(
                f"{name}: " + (", ".join(f"{what} {n}" for what, n in counts.most_common(8)) or "nothing")
            )
        lines.append(
            f"resident {format_bytes(self.before['resident'])} before, {format_bytes(self.after['resident'])} after; "
            f"descriptors {self.before['descriptors']} and {self.after['descriptors']}"
        )
        for name, goal in self.goals().items():
            verdict = "reached" if goal["reached"] else "MISSED"
            lines.append(f"{verdict:<8} {name}: {goal['got']:.4g} (goal {goal['goal']:g})")
        return lines
