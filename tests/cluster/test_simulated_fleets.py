"""Whole simulated fleets beside closed forms: what a queue, a pipeline and fair shares must come to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.fleets import a_fleet, a_job, a_profile, profiles_of, replayed, servers, trainers
from support.profiler_tools import free_tier

from hapi.cluster.simulation.fleet import Fleet, FleetEvent, SharedLink, SharedMachine
from hapi.cluster.simulation.replay import Simulation, replay
from hapi.cluster.simulation.training.planning import PlannedSplits
from hapi.profiler.cost import estimate
from hapi.profiler.profile import LinkProfile, SampleProfile


def test_a_pipeline_is_as_fast_as_its_slowest_stage() -> None:
    """5 ms a sample on the server, 10 ms on the link, 2 ms in the step: the link's 100 a second."""
    profile = a_profile(forward=(0.005, 0, 0), step_seconds=0.002)
    fleet = a_fleet(servers(bandwidth=100 * 100 * 8), trainers())
    assert replayed(fleet, profile).samples_per_second == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("forward", [0.02, 0.0025])
def test_the_model_of_one_job_is_that_of_the_planner(forward: float) -> None:
    profile = a_profile(
        forward=(forward, 0, 0),
        step_seconds=0.005,
        link=LinkProfile(bits_per_second=100 * 80 * 8, variation=0.0, request_seconds=0.001),
    )
    job = a_job(samples=8 * 100)
    fleet = a_fleet(servers(bandwidth=profile.link.bits_per_second), trainers())
    found = replayed(fleet, profile, job).samples_per_second
    assert found == pytest.approx(job.samples / estimate(profile, job, 1).epoch_seconds, rel=0.1)


def test_two_jobs_get_half_of_a_server_each() -> None:
    profile = a_profile(forward=(0.005, 0, 0))
    found = replayed(a_fleet(jobs=trainers(2)), profile)
    (group,) = found.trainers
    assert group.samples_per_second == pytest.approx(200, rel=0.03)
    assert group.slowest == pytest.approx(100, rel=0.05)
    assert found.servers[0].devices == pytest.approx(1.0, abs=0.02)


def test_waits_are_those_of_a_queue_with_one_slot() -> None:
    """M/D/1, by many trainers that ask rarely: the mean wait is rho / (2 (1 - rho)) services (Pollaczek, Khinchine)."""
    service, count, rho = 0.04, 60, 0.6
    profile = a_profile(forward=(service / 8, 0, 0), server={"concurrency": 1})
    # Each one waits for its batch and then for its step: 8 samples in the pause, and the answer's own time.
    pause = count * service / rho
    job = a_job(samples=8, in_flight=1)
    fleet = a_fleet(
        servers(max_running=1),
        trainers(count, pause=pause, spread=pause),
        seconds=40.0,
        warm_up=5.0,
        tenants="one",
    )
    simulation = Simulation(fleet, profiles_of(fleet, profile, job))
    for trainer in simulation.trainers["job"]:
        rng = trainer._rng  # arrivals by chance, not in the same order again and again
        trainer.work = _RandomPause(trainer.work, rng)  # type: ignore[assignment]
    simulation.run(lambda share: None)
    (server,) = simulation.servers["store"]
    load = simulation.sampler.utilisation([server])[1]
    expected = service * load / (2 * (1 - load))
    assert sum(server.waits) / len(server.waits) == pytest.approx(expected, rel=0.2)


class _RandomPause:
    """A kind of work whose pauses are exponential."""

    def __init__(self, work, rng) -> None:  # type: ignore[no-untyped-def]
        self._work, self._rng = work, rng

    @property
    def pause(self) -> float:
        return float(self._rng.expovariate(1 / self._work.pause))

    def __getattr__(self, name: str) -> object:
        return getattr(self._work, name)


def test_every_sample_comes_once_whatever_fails() -> None:
    profile = a_profile(forward=(0.002, 0, 0), outputs=(1000, 100, 10))
    events = (
        FleetEvent(what="fail", name="store", at=3.0, seconds=2.0, count=1),
        FleetEvent(what="slow", name="store", at=8.0, seconds=3.0, count=2, factor=5.0),
    )
    fleet = a_fleet(
        servers(2, bandwidth=1.6e5),
        trainers(3, batches=20),
        seconds=60.0, warm_up=0.0, events=events,
    )  # fmt: skip
    job = a_job(samples=60)  # the last batch of an epoch has 4
    simulation = Simulation(fleet, profiles_of(fleet, profile, job))
    simulation.run(lambda share: None)
    (group,) = replay(fleet, profiles_of(fleet, profile, job)).trainers
    per_trainer = 2 * 60 + 4 * 8
    assert group.samples == 3 * per_trainer
    assert group.retries > 0
    assert group.nbytes == pytest.approx(3 * per_trainer * 1000), "what broke off is not counted twice"
    sent = sum(server.sent_bytes for server in simulation.servers["store"])
    assert sent == pytest.approx(group.nbytes)


def test_events_that_overlap_leave_all_as_it_was() -> None:
    """Each is undone when it is over, whichever began first."""
    events = (
        FleetEvent(what="link", name="wide", at=1.0, seconds=4.0, factor=0.5),
        FleetEvent(what="link", name="wide", at=3.0, seconds=4.0, factor=0.1),
        FleetEvent(what="fail", name="store", at=1.0, seconds=4.0),
        FleetEvent(what="fail", name="store", at=3.0, seconds=4.0),
    )
    fleet = a_fleet(
        servers(link="wide"),
        trainers(),
        links=(SharedLink(name="wide", bandwidth=8e6),),
        events=events,
        warm_up=0.0,
    )
    simulation = Simulation(fleet, profiles_of(fleet, a_profile()))
    (server,), link = simulation.servers["store"], simulation._links["wide"]
    seen: dict[float, tuple[bool, float]] = {}

    def look() -> Iterator[Any]:
        for moment in (0.5, 2.0, 4.0, 6.0, 8.0):
            yield simulation.env.timeout(moment - simulation.env.now)
            seen[moment] = server.alive, simulation.network.capacity(link)

    simulation.env.process(look())
    simulation.run(lambda share: None)
    first = seen[0.5][1]
    expected = {2.0: (False, 0.5), 4.0: (False, 0.05), 6.0: (False, 0.1), 8.0: (True, 1.0)}
    for moment, (alive, part) in expected.items():
        assert seen[moment] == (alive, pytest.approx(part * first)), moment


def test_the_same_seed_gives_the_same_fleet() -> None:
    profile = a_profile(forward=(0.01, 0.01, 0), outputs=(1000, 100, 10))
    fleet = a_fleet(servers(4, bandwidth=4e5), trainers(4, servers=2, split="auto", spread=1.0), seconds=5.0)
    first, second = (replayed(fleet, profile).to_json() for _ in range(2))
    other = replayed(replace(fleet, seed=1), profile).to_json()
    for document in (first, second, other):
        del document["wall_seconds"]
    assert first == second != other


def test_servers_of_one_machine_share_its_cores() -> None:
    cpu = free_tier("cpu")
    profile = a_profile(forward=(0.01, 0, 0), server_tier=cpu)
    own = replayed(a_fleet(servers(2), trainers(4)), profile)
    machines = (SharedMachine(name="box", cores=1.0),)
    shared = replayed(a_fleet(servers(2, machine="box"), trainers(4), machines=machines), profile)
    assert own.samples_per_second == pytest.approx(200, rel=0.05)
    assert shared.samples_per_second == pytest.approx(100, rel=0.05)


def test_a_straggler_gets_few_requests() -> None:
    profile = a_profile(forward=(0.01, 0, 0))
    slow = (FleetEvent(what="slow", name="store", at=0.0, count=1, factor=10.0),)
    fleet = a_fleet(servers(4), trainers(2), events=slow, seconds=16.0, warm_up=8.0)
    found = replayed(fleet, profile, a_job(prefetch_bytes=100_000))
    assert found.samples_per_second == pytest.approx(3.1 * 100, rel=0.1)


def test_planners_move_the_cut_when_a_link_becomes_slow() -> None:
    profile = a_profile(
        outputs=(10_000, 50, 10), forward=(0.001, 0.04, 0), suffix=(0.001, 0.005, 0), step_seconds=0.01,
        samples=SampleProfile(stored_bytes=50_000, encoded=False, uint8_bytes=50_000, tensor_bytes=50_000),
    )  # fmt: skip
    events = (FleetEvent(what="link", name="wide", at=10.0, factor=0.01),)
    fleet = a_fleet(
        servers(1, link="wide"),
        trainers(1, split="auto"),
        links=(SharedLink(name="wide", bandwidth=1e8),),
        events=events,
        seconds=40.0,
    )
    job = a_job(bs=32, request_size=32, samples=3200)
    found = replayed(fleet, profile, job)
    first, last = found.splits[0][1], found.splits[-1][1]
    assert first != last and set(last) == {2}, "the smaller answers, although the server works for them"


def test_coarser_time_comes_to_about_the_same() -> None:
    profile = a_profile(forward=(0.01, 0, 0), outputs=(20_000, 100, 10), step_seconds=0.005)
    fine = a_fleet(servers(4, bandwidth=4e6), trainers(6))
    job = a_job(prefetch_bytes=1 << 20)
    coarse = replace(fine, detail="requests", settle=0.02)
    exact, about = (replayed(fleet, profile, job).samples_per_second for fleet in (fine, coarse))
    assert about == pytest.approx(exact, rel=0.05)


def test_requests_go_out_at_the_pace_of_the_link() -> None:
    """Of eight that may be under way few are: each has the link nearly for itself."""
    profile = a_profile(forward=(0.001, 0, 0))
    fleet = a_fleet(servers(bandwidth=100 * 100 * 8), trainers(in_flight=8))
    (group,) = replayed(fleet, profile, a_job(prefetch_bytes=100_000)).trainers
    assert group.samples_per_second == pytest.approx(100, rel=0.07)
    assert group.latency.p99 < 3 * 0.08


@pytest.mark.slow
def test_answers_begin_late_by_chance() -> None:
    found = replayed(a_fleet(jobs=trainers(8), jitter=0.1), a_profile(forward=(0.00001, 0, 0)))
    (group,) = found.trainers
    assert group.latency.p50 == pytest.approx(0.069, abs=0.03)
    assert group.latency.p99 > 0.3


@pytest.mark.slow
def test_a_request_at_a_straggler_is_sent_to_a_second_server() -> None:
    """One becomes slow under the requests that it has; without a second one they would take 100 times as long."""
    slow = (FleetEvent(what="slow", name="store", at=6.0, seconds=30.0, count=1, factor=100.0),)
    fleet = a_fleet(
        servers(4), trainers(1, in_flight=2, batches=1500), events=slow, seconds=60.0, warm_up=0.0
    )
    profile = a_profile(forward=(0.01, 0, 0), step_seconds=0.002, outputs=(1000, 100, 10))
    job = a_job(samples=8 * 500, prefetch_bytes=100_000)
    simulation = Simulation(fleet, profiles_of(fleet, profile, job))
    simulation.run(lambda share: None)
    (counts,) = (trainer.counts for trainer in simulation.trainers["job"])
    assert counts.samples == 1500 * 8
    assert 1 <= counts.extra <= 0.02 * 1500 and not counts.retries
    assert max(counts.latencies) < 4.0, "a request that waits at the slow one takes 8 s there"
    assert counts.nbytes == pytest.approx(1500 * 8 * 1000), "what was not taken is counted apart"
    for server in simulation.servers["store"]:
        assert server.admission.queue.running == server.admission.queue.queued == 0


@pytest.mark.slow
def test_a_trainer_that_comes_to_a_crowded_fleet_begins_with_an_earlier_cut() -> None:
    """By what the servers tell when it connects, as the client does: before it has measured any wait."""
    profile = a_profile(
        outputs=(50, 50, 10), forward=(0.001, 0.001, 0), suffix=(0.002, 0.002, 0), step_seconds=0.001,
        samples=SampleProfile(stored_bytes=50, encoded=False, uint8_bytes=50, tensor_bytes=50),
    )  # fmt: skip

    def first_cut(crowd: int) -> int:
        groups = (
            trainers(crowd, name="crowd", split=2, in_flight=8),
            trainers(name="late", split="auto", spread=9.0),
        )
        fleet = Fleet(servers=(servers(1),), trainers=groups[not crowd :], seconds=20.0, warm_up=1.0)
        simulation = Simulation(
            fleet, profiles_of(fleet, profile, a_job(samples=8000, prefetch_bytes=100_000))
        )
        simulation.run(lambda share: None)
        (late,) = simulation.trainers["late"]
        assert isinstance(late.splits, PlannedSplits)
        return late.splits._controller.changes[0].after

    assert first_cut(8) < first_cut(0)
