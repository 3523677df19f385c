"""``benchmarks stragglers --simulated``: ways, cases, what a seed decides, and the flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.fleet import slow_server
from benchmarks.fleet.slow_server import WAYS, Crowd, cases, simulate_slow_server


@pytest.mark.slow
def test_a_slow_server_hurts_who_goes_in_turn_and_not_the_client() -> None:
    busy = next(case for case in cases(4, 400) if case.load == 0.1 and not case.since)
    ratios, shares = {}, {}
    for way in WAYS:
        even, slow = (Crowd(busy, way, 1, straggles=straggles).run() for straggles in (False, True))
        assert len(even.seconds) == len(slow.seconds) == 400
        ratios[way], shares[way] = slow.p99 / even.p99, slow.slow / 400
    assert ratios["in turn"] > 10 and shares["in turn"] == pytest.approx(0.25, abs=0.01)
    assert ratios["in turn"] > ratios["requests in flight"] > 2 > ratios["answer times"]
    assert ratios["hedged"] <= 1.3 and shares["hedged"] < 0.05


def test_a_seed_gives_the_same_figures_again_and_another_one_others() -> None:
    case = cases(3, 200)[0]
    first, again, other = (Crowd(case, "hedged", seed, straggles=True).run() for seed in (0, 0, 1))
    assert first == again and first.seconds != other.seconds


def test_a_server_that_becomes_slow_in_the_middle_is_quick_before() -> None:
    start, middle = (
        next(case for case in cases(4, 400) if case.load == 0.1 and case.since == since)
        for since in (0.0, 0.5)
    )
    began, became, never = (
        Crowd(case, "in turn", 2, straggles=straggles).run()
        for case, straggles in ((start, True), (middle, True), (middle, False))
    )
    assert sum(began.seconds) > 1.5 * sum(became.seconds) > 3 * sum(never.seconds)


@pytest.mark.slow
def test_all_cases_stand_in_the_figures() -> None:
    told: list[str] = []
    found = simulate_slow_server(2, 100, 1, told.append)
    assert len(told) == len(cases(2, 100)) and len(found.rows) == len(told) * len(WAYS)
    assert len(found.table()) == len(told) * (len(WAYS) + 1)


@pytest.mark.parametrize(("flags", "requests"), [((), 2000), (("--requests", "150"), 150)])
def test_flags(
    flags: tuple[str, ...], requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def simulate(servers: int, requests: int, seeds: int, tell: object) -> slow_server.SlowServer:
        seen.append((servers, requests, seeds))
        return slow_server.SlowServer(rows=())

    monkeypatch.setattr(slow_server, "simulate_slow_server", simulate)
    assert main(["stragglers", "--simulated", *flags, "--json", str(tmp_path / "f.json")]) == 0
    assert seen == [(4, requests, 5)]
    assert (tmp_path / "f.json").exists()
