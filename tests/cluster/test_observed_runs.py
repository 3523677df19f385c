"""Observations of running servers, and the fit of the model's free parameters to them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleets import a_fleet, a_job, a_profile, profiles_of

from hapi.cluster.simulation.calibrate import ObservedRun, calibrate, load_runs
from hapi.cluster.simulation.fleet import Fleet
from hapi.cluster.simulation.observation import Observation, load_recorded, observation_of
from hapi.cluster.simulation.replay import Profiles
from hapi.errors import BadRequestError, ConfigError, UsageError


def a_status(served: int, sent: int, *, queued: int = 0) -> dict[str, Any]:
    """The part of a server's status that counts."""
    tenant = {
        "name": "ann", "served": served, "sent_bytes": sent, "cost_seconds": served / 10, "expected_wait": 0.5,
        "shed": {"full": 0, "late": 1},
    }  # fmt: skip
    return {
        "queue": {"running": 2, "slots": 4, "queued": queued, "max_queued": 128},
        "tenants": [tenant],
        "running": [{"split": 3, "total": 32}, {"split": 5, "total": 16}, {"split": 5, "total": 32}],
    }


def an_observation() -> Observation:
    """Two servers over ten seconds."""
    statuses = {
        "http://a": [a_status(10, 1000), a_status(30, 5000, queued=4)],
        "http://b": [a_status(0, 0), a_status(10, 1000)],
    }
    return observation_of(statuses, 10.0, a_profile(), a_job())


def test_an_observation_has_what_grew_and_means_of_the_others() -> None:
    found = an_observation()
    assert found.bytes_per_second == 500 and found.requests_per_second == 3
    assert found.splits == (5, 3) and found.tenants == 1
    assert found.request_samples == pytest.approx(80 / 3)
    first = found.servers[0]
    assert (first.requests, first.shed, first.running, first.queued) == (20, 0, 2.0, 2.0)


def test_an_observation_is_read_back_and_stands_for_a_profile(tmp_path: Path) -> None:
    path = str(tmp_path / "seen.json")
    an_observation().save(path)
    assert Observation.load(path) == an_observation()
    assert load_recorded(path) == (a_profile(), a_job())
    a_profile().save(str(tmp_path / "plain.json"), a_job(bs=4))
    assert load_recorded(str(tmp_path / "plain.json")) == (a_profile(), a_job(bs=4))


@pytest.mark.parametrize("broken", [{}, {"version": 9}, {"version": 1, "observed": 3}])
def test_another_document_is_one_line(tmp_path: Path, broken: dict[str, Any]) -> None:
    path = tmp_path / "seen.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(ConfigError, match=r"seen\.json: observation"):
        Observation.load(str(path))


def test_a_status_of_another_form_is_told() -> None:
    with pytest.raises(BadRequestError, match="is it a hapi-server"):
        observation_of({"http://a": [{"queue": {}}]}, 1.0, a_profile(), a_job())


def test_counts_of_two_processes_are_none() -> None:
    """Of a server that was started anew, whose counts began at 0, and of a balancer."""
    statuses = {"http://a": [{**a_status(10, 100), "server": "one"}, {**a_status(2, 20), "server": "two"}]}
    with pytest.raises(BadRequestError, match="http://a: its counts are of several processes"):
        observation_of(statuses, 1.0, a_profile(), a_job())


def fluid(fleet: Fleet, profiles: Profiles) -> float:
    """A made-up machine: links, and requests one by one."""
    return 1 / (1 / (100 * fleet.efficiency) + fleet.seconds * fleet.overhead)


@pytest.mark.parametrize(("overhead", "efficiency"), [(0.0, 0.9), (0.01, 1.0), (0.002, 0.95)])
def test_parameters_are_found_again(overhead: float, efficiency: float) -> None:
    runs = []
    for number, seconds in enumerate((3.0, 6.0, 30.0, 12.0)):
        fleet = a_fleet(seconds=seconds)
        truth = replace(fleet, overhead=overhead, efficiency=efficiency)
        profiles = profiles_of(fleet, a_profile())
        runs.append(
            ObservedRun(
                name=str(number),
                fleet=fleet,
                profiles=profiles,
                rate=fluid(truth, profiles),
                hold_out=number == 3,
            )
        )
    found = calibrate(runs, fluid)
    assert found.efficiency == pytest.approx(efficiency, abs=0.02)
    assert found.overhead == pytest.approx(overhead, abs=0.002)
    held = found.summary(hold_out=True)
    assert held is not None and held[1] < 0.05
    assert "held out" in found.lines()[-1]


def test_something_must_be_fitted() -> None:
    fleet = a_fleet()
    run = ObservedRun(
        name="x", fleet=fleet, profiles=profiles_of(fleet, a_profile()), rate=1.0, hold_out=True
    )
    with pytest.raises(UsageError, match="held out"):
        calibrate([run], fluid)


def test_the_file_of_runs_names_fleets_and_observations(tmp_path: Path) -> None:
    an_observation().save(str(tmp_path / "seen.json"))
    (tmp_path / "two.yaml").write_text(
        "servers: [{name: a, count: 2}]\ntrainers: [{name: t, profile: seen.json, split: 1}]\n"
    )
    runs = tmp_path / "runs.yaml"
    runs.write_text("runs: [{fleet: two.yaml, observed: seen.json, hold_out: true}]\n")
    (run,) = load_runs(str(runs))
    assert (run.name, run.rate, run.hold_out) == ("two", 500.0, True)
    runs.write_text("runs: [{fleet: two.yaml, observed: gone.json}]\n")
    with pytest.raises(UsageError, match=r"gone\.json"):
        load_runs(str(runs))
