"""Parts of the simulator: shared processors, fair links, the server's admission."""

from __future__ import annotations

import itertools
import random

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi.cluster.simulation.admission import SimulatedAdmission
from hapi.cluster.simulation.network import UNLIMITED, Network, fair_rates
from hapi.cluster.simulation.processors import Processors
from hapi.errors import BusyError
from hapi.server.scheduling.fair_queue import Tenant


def test_work_that_fits_the_cores_runs_at_full_speed() -> None:
    env = simpy.Environment()
    cores = Processors(env, 2)
    ends = ends_of(env, [cores.work(3.0), cores.work(1.0)])
    env.run()
    assert ends == [3.0, 1.0] and cores.used == pytest.approx(4.0)


def test_more_work_than_cores_shares_them_evenly() -> None:
    env = simpy.Environment()
    cores = Processors(env, 1)
    ends = ends_of(env, [cores.work(1.0), cores.work(2.0)])
    env.run()
    assert ends == pytest.approx([2.0, 3.0]), "half speed each, then the longer one alone"


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 3)), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_processors_do_all_work_and_no_more(work: list[tuple[float, float]]) -> None:
    env = simpy.Environment()
    cores = Processors(env, 2)

    def one(at: float, seconds: float) -> simpy.events.ProcessGenerator:
        yield env.timeout(at)
        yield cores.work(seconds)

    processes = [env.process(one(at, seconds)) for at, seconds in work]
    env.run(env.all_of(processes))
    assert cores.used == pytest.approx(sum(seconds for _, seconds in work))
    assert env.now >= max(at + seconds for at, seconds in work) - 1e-9


def ends_of(env: simpy.Environment, events: list[simpy.Event]) -> list[float]:
    """Times of the events, filled in while ``env`` runs."""
    found = [0.0] * len(events)
    for number, event in enumerate(events):
        event.callbacks.append(lambda _, number=number: found.__setitem__(number, env.now))
    return found


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=12),
    st.lists(st.floats(1, 100), min_size=5, max_size=5),
)
def test_rates_are_max_min_fair(paths: list[list[int]], limits: list[float]) -> None:
    capacity = [UNLIMITED, *limits]
    rates = fair_rates([tuple(path) for path in paths], [1] * len(paths), capacity)
    for path, rate in zip(paths, rates, strict=True):
        fullest = False
        for link in path:
            users = [r for p, r in zip(paths, rates, strict=True) if link in p]
            assert sum(users) <= capacity[link] * (1 + 1e-6)
            full = sum(users) >= capacity[link] * (1 - 1e-6)
            fullest |= full and rate >= max(users) * (1 - 1e-6)
        assert fullest, "each transfer has a full link on which none is faster"


def test_transfers_of_one_bundle_share_alike() -> None:
    paths, capacity = [(1, 2), (2,), (1,)], [UNLIMITED, 12.0, 40.0]
    bundled = fair_rates(paths, [2, 3, 1], capacity)
    each = fair_rates([(1, 2), (1, 2), (2,), (2,), (2,), (1,)], [1] * 6, capacity)
    assert bundled == pytest.approx([each[0], each[2], each[5]]) and bundled[0] == pytest.approx(4.0)


def test_a_transfer_takes_its_bytes_over_its_share() -> None:
    env = simpy.Environment()
    network = Network(env)
    shared, own = network.add_link(100.0), network.add_link(20.0)
    ends = ends_of(env, [network.send((shared,), 400.0).done, network.send((own, shared), 60.0).done])
    env.run()
    assert ends == pytest.approx([4.6, 3.0]), "20 and 80 a second, then 100 alone"
    assert network.carried[shared] == pytest.approx(460.0)


def test_a_broken_transfer_leaves_its_share() -> None:
    env = simpy.Environment()
    network = Network(env)
    link = network.add_link(10.0)
    broken = network.send((link,), 100.0)
    ends = ends_of(env, [network.send((link,), 100.0).done])
    env.run(until=4.0)
    assert network.crossed(broken) == pytest.approx(20.0)
    network.abort(broken)
    network.abort(broken)
    env.run()
    assert ends == pytest.approx([12.0]) and network.carried[link] == pytest.approx(120.0)


@pytest.mark.parametrize("settle", [0.0, 0.05])
def test_all_bytes_cross_whenever_rates_are_found(settle: float) -> None:
    env, rng = simpy.Environment(), random.Random(0)
    network = Network(env, settle)
    links = [network.add_link(rng.uniform(50, 100)) for _ in range(4)]
    sent = [(rng.sample(links, 2), rng.uniform(1, 50)) for _ in range(60)]

    def one(at: float, path: list[int], nbytes: float) -> simpy.events.ProcessGenerator:
        yield env.timeout(at)
        yield network.send(tuple(path), nbytes).done

    env.run(env.all_of([env.process(one(i / 10, *what)) for i, what in enumerate(sent)]))
    assert sum(network.carried[links]) == pytest.approx(2 * sum(nbytes for _, nbytes in sent))


def test_admission_grants_slots_in_turn_and_refuses_what_is_too_much() -> None:
    env = simpy.Environment()
    admission = SimulatedAdmission(env, slots=1, max_queued=1, max_wait=600)
    heavy, light = Tenant(name="heavy"), Tenant(name="light")
    first, granted = admission.enter(heavy, 1.0)
    assert granted.triggered
    waiting, second = admission.enter(heavy, 1.0)
    with pytest.raises(BusyError):
        admission.enter(heavy, 1.0)
    admission.finish(first, 1.0)
    assert second.triggered
    admission.finish(waiting, 1.0)
    assert admission.enter(light, 1.0)[1].triggered


def test_two_tenants_of_equal_weight_share_a_slot() -> None:
    env = simpy.Environment()
    admission = SimulatedAdmission(env, slots=1, max_queued=100, max_wait=600)
    served: list[str] = []

    def one(tenant: Tenant) -> simpy.events.ProcessGenerator:
        ticket, granted = admission.enter(tenant, 1.0)
        yield granted
        yield env.timeout(1.0)
        served.append(tenant.name)
        admission.finish(ticket, 1.0)

    for name, count in (("many", 8), ("few", 3)):
        for _ in range(count):
            env.process(one(Tenant(name=name)))
    env.run()
    firsts = list(itertools.islice(served, 6))
    assert firsts.count("few") == 3, "although all of the other tenant's came first"
