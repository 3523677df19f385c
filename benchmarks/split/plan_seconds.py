"""``benchmarks plan``: how long ``hapi plan`` takes to answer, from the shell's view, for torchvision's models.

Each model is asked for twice in fresh processes, with a cache folder of its own: first nothing is kept of it, so that
its layers are sized and timed; then the kept profile answers.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.testbed.conditions import conditions
from benchmarks.testbed.tiers import last_line
from hapi.errors import HapiError

GOAL_SECONDS = 5.0
_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One model; seconds of the whole command."""

    model: str
    cold: float
    """Seconds with nothing kept of the model. The machine's own constants are, after the first model."""
    kept: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """All models of one run, and its conditions."""

    rows: tuple[PlanRow, ...]
    conditions: dict[str, Any]

    @property
    def worst(self) -> float:
        """The longest answer's seconds."""
        return max(row.cold for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        rows = [asdict(row) for row in self.rows]
        return {
            "benchmark": "plan",
            "rows": rows,
            "worst": self.worst,
            "goal": GOAL_SECONDS,
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person, the slowest first."""
        lines = [f"{'model':<22}{'measured':>10}{'kept':>9}"]
        for row in sorted(self.rows, key=lambda r: -r.cold):
            lines.append(f"{row.model:<22}{row.cold:>8.2f} s{row.kept:>7.2f} s")
        cold, kept = (statistics.median(getattr(r, name) for r in self.rows) for name in ("cold", "kept"))
        lines.append(f"{'median':<22}{cold:>8.2f} s{kept:>7.2f} s")
        verdict = "reached" if self.worst < GOAL_SECONDS else "missed"
        lines.append(f"goal: under {GOAL_SECONDS:g} s for every model; worst {self.worst:.2f} s: {verdict}")
        return lines


def measure_plan(models: Sequence[str], tell: Callable[[str], None]) -> PlanResult:
    """Ask for every model; :class:`HapiError` when the command fails for one."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="hapi-plan-") as cache:
        for model in models:
            rows.append(PlanRow(model=model, cold=_seconds(model, cache), kept=_seconds(model, cache)))
            tell(f"{model}: {rows[-1].cold:.2f} s, kept {rows[-1].kept:.2f} s")
    return PlanResult(rows=tuple(rows), conditions=conditions())


def _seconds(model: str, cache: str) -> float:
    paths = os.pathsep.join(dict.fromkeys(sys.path))
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hapi.cli.main", "plan", model],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_SECONDS,
        env={**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": cache},
    )
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise HapiError(f"hapi plan {model} failed: {last_line(done.stderr)}")
    return seconds
