"""Figures from the phases of ``benchmarks overload``. Pure: numbers in, numbers out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hapi.units import format_bytes

GOODPUT_GOAL, LIGHT_GOAL, MEMORY_GOAL = 0.90, 2.0, 0.05
"""Goals: share of the peak; multiple of the unloaded 95th percentile, plus one request; change of resident
memory, up or down.
"""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase: what its clients saw, and the server's resident memory meanwhile."""

    seconds: float
    skipped: float
    """Seconds at its start that do not count for the rates."""
    seen: Mapping[str, Any]
    """See :class:`benchmarks.load.overload_load.Seen`."""
    resident: Sequence[tuple[float, int]] = ()
    """(seconds since its start, bytes)."""
    processor: float = 0.0
    """Seconds of the processors that the server used."""

    def answers(self, tenant: str | None = None) -> list[Mapping[str, Any]]:
        """Answers that ended in the seconds that count, of one tenant or of all."""
        return [
            a
            for a in self.seen["answers"]
            if self.skipped <= a["ended"] <= self.seconds and tenant in (None, a["tenant"])
        ]

    def goodput(self, tenant: str | None = None) -> float:
        """Samples per second that were answered, from the first to the last answer: requests are few and large."""
        answers = sorted(self.answers(tenant), key=lambda a: float(a["ended"]))
        if len(answers) < 2:
            return 0.0
        return float(
            sum(a["samples"] for a in answers[1:]) / max(1e-9, answers[-1]["ended"] - answers[0]["ended"])
        )

    def per_processor_second(self) -> float:
        """Samples that were answered per second of the server's processors: others on the same cores change it less."""
        return float(sum(a["samples"] for a in self.seen["answers"]) / max(self.processor, 1e-9))

    def tries(self) -> float:
        """Requests per second that were sent, whatever became of them."""
        return float(self.seen["tries"] / self.seconds)

    def waits(self, tenant: str) -> list[float]:
        """Seconds from a request's first try to its whole answer."""
        return sorted(a["ended"] - a["began"] for a in self.answers(tenant))

    def sent_away(self) -> Counter[str]:
        """Answers 429 by tenant."""
        return Counter(tenant for tenant, _ in self.seen["sent_away"])

    def memory(self) -> tuple[float, float]:
        """Mean resident bytes of the first and of the last quarter of the seconds that count."""
        counted = [(at, nbytes) for at, nbytes in self.resident if self.skipped <= at <= self.seconds]
        quarter = (self.seconds - self.skipped) / 4
        first = [nbytes for at, nbytes in counted if at <= self.skipped + quarter]
        last = [nbytes for at, nbytes in counted if at >= self.seconds - quarter]
        return statistics.mean(first), statistics.mean(last)


@dataclass(frozen=True, kw_only=True)
class Returns:
    """Return whether those who were sent away and came back when they were told had been told the truth."""

    retry_after: float
    """Median Retry-After, in seconds."""
    count: int
    """Requests that were sent away at least once and answered in the end."""
    at_once: float
    """Share of them that were taken when they first returned."""
    waited_over_told: float
    """Median over them: seconds until the try that was taken, over the first Retry-After."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of sorted ``values`` that a ``share`` of them does not exceed; there must be one."""
    return values[min(len(values) - 1, max(0, -int(-share * len(values) // 1) - 1))]


def returns_of(phase: Phase) -> Returns | None:
    """None when nobody was sent away and answered later."""
    back = [a for a in phase.seen["answers"] if a["retry_after"]]
    if not back:
        return None
    return Returns(
        retry_after=statistics.median(seconds for _, seconds in phase.seen["sent_away"]),
        count=len(back),
        at_once=sum(len(a["retry_after"]) == 1 for a in back) / len(back),
        waited_over_told=statistics.median(
            (a["sent"] - a["began"]) / max(a["retry_after"][0], 1e-9) for a in back
        ),
    )


def shares(phase: Phase, weights: Mapping[str, float]) -> dict[str, float]:
    """Each tenant's samples per second over its weight, as a part of the mean over all of them."""
    each = {tenant: phase.goodput(tenant) / weight for tenant, weight in weights.items()}
    mean = statistics.mean(each.values())
    return {tenant: value / mean if mean else 0.0 for tenant, value in each.items()}


def verdicts(
    peak: float,
    alone: Sequence[float],
    request: float,
    loaded: Phase,
    light: str,
    weights: Mapping[str, float],
) -> dict[str, dict[str, float | bool]]:
    """The goals of one overloaded phase, each with what it got.

    ``peak``: samples per second at best; ``alone``: sorted seconds of the light tenant's requests on an idle server;
    ``request``: seconds of one of the others' on an idle server.
    """
    first, last = loaded.memory()
    waits = loaded.waits(light)
    allowed = LIGHT_GOAL * percentile(alone, 0.95) + request
    p95 = percentile(waits, 0.95) if waits else float("inf")
    smallest = min(shares(loaded, weights).values())
    goodput = loaded.goodput() / peak
    return {
        "goodput": {"got": goodput, "goal": GOODPUT_GOAL, "reached": goodput >= GOODPUT_GOAL},
        "memory": {"got": last / first - 1, "goal": MEMORY_GOAL, "reached": last / first - 1 <= MEMORY_GOAL},
        "light": {"got": p95, "goal": allowed, "reached": p95 <= allowed},
        "least_share": {"got": smallest, "goal": 0.5, "reached": smallest >= 0.5},
    }


def lines_of(way: str, found: Mapping[str, Any], seconds: float) -> list[str]:
    """The figures of one overloaded phase for a person."""
    goals = found["goals"]

    def says(goal: str) -> str:
        """Say whether a goal was met."""
        return "reached" if goals[goal]["reached"] else "NOT reached"

    light = "no answer" if found["light_p50"] is None else (
        f"p50 {found['light_p50']:.3f} s, p95 {found['light_p95']:.3f} s"
    )  # fmt: skip
    lines = [
        f"{way} clients for {seconds:g} s, tries for {found['tries_over_peak']:.1f} times the peak:",
        (f"  goodput       {found['goodput']:.1f} samples/s, {goals['goodput']['got']:.1%} of the peak "
        f"(goal {goals['goodput']['goal']:.0%}: {says('goodput')})"),
        (
            f"  processor     {found['per_processor_second']:.1f} samples per second of the server's processors, "
            f"{found['processor_over_peak']:.1%} of the peak's; {found['processor']:.0%} of a core used"
        ),
        (f"  memory        {format_bytes(int(found['resident_first']))} in the first quarter, "
        f"{format_bytes(int(found['resident_last']))} in the last: {goals['memory']['got']:+.1%} ({says('memory')})"),
        (f"  light tenant  {light}, sent away {found['light_sent_away']} times "
        f"(goal p95 {goals['light']['goal']:.3f} s: {says('light')})"),
        "  shares        " + ", ".join(f"{t} {s:.2f}" for t, s in found["shares"].items())
        + f" of the mean by weight (least {goals['least_share']['got']:.2f}: {says('least_share')})",
        f"  sent away     {found['sent_away']}; other outcomes: {found['other'] or 'none'}",
    ]  # fmt: skip
    back = found["returns"]
    if back is not None:
        lines.append(
            f"  Retry-After   {back['retry_after']:.0f} s in the median; of {back['count']} that were answered later "
            f"{back['at_once']:.0%} were taken when they first returned, {back['waited_over_told']:.2f} times the "
            "seconds that they were told after their first try"
        )
    return lines
