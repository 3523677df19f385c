"""What servers tell of their own work steers plans, and may be anything: plans stay plans, of finite numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support import lying
from support.local_job import COUNT, open_session

from hapi.wire.transport.http import Handler


def every_number(value: Any, number: float) -> Any:
    """The document with each number replaced."""
    if isinstance(value, dict):
        return {k: every_number(v, number) for k, v in value.items()}
    if isinstance(value, list):
        return [every_number(v, number) for v in value]
    return number if isinstance(value, int | float) and not isinstance(value, bool) else value


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value


@pytest.mark.slow_except("-1")
@pytest.mark.parametrize("number", [0, -1, 1e308, (1 << 63) - 1])
def test_a_plan_from_impossible_reports_is_one(remembered: Handler, number: float) -> None:
    with open_session(
        lying.reporting(remembered, lambda report: every_number(report, number)), split="auto"
    ) as session:
        for epoch in range(2):
            assert sum(len(labels) for _, labels in session.epoch(epoch)) == COUNT
        planning = session.planning
        assert planning is not None and planning.profile is not None
        assert all(map(math.isfinite, numbers(planning.profile.to_json())))
        json.dumps(planning.to_json(), allow_nan=False)


@pytest.mark.slow
def test_clocks_that_run_backwards_give_a_plan(remembered: Handler) -> None:
    def backwards(report: dict[str, Any]) -> dict[str, Any]:
        return {**report, **{name: [1e9, 0.0] for name in ("busy", "work", "others", "process", "clock")}}

    with open_session(lying.reporting(remembered, backwards), split="auto") as session:
        for epoch in range(2):
            list(session.epoch(epoch))
        assert session.planning is not None and session.planning.profile is not None
        assert all(map(math.isfinite, numbers(session.planning.profile.to_json())))
