"""The benchmark of ``hapi plan``'s own seconds: its verdict, and one real answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.split.plan_seconds import PlanResult, PlanRow


def test_the_slowest_model_decides() -> None:
    rows = (PlanRow(model="a", cold=1.0, kept=0.5), PlanRow(model="b", cold=5.5, kept=0.7))
    result = PlanResult(rows=rows, conditions={})
    assert result.worst == 5.5 and "missed" in result.table()[-1]
    assert [line.split()[0] for line in result.table()[1:3]] == ["b", "a"]
    assert "reached" in PlanResult(rows=rows[:1], conditions={}).table()[-1]


@pytest.mark.slow
def test_a_model_is_asked_for_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", "--model", "squeezenet1_1", "--json", str(out)]) == 0
    assert "goal: under 5 s" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    assert row["model"] == "squeezenet1_1" and row["kept"] > 0 and row["cold"] > 0
