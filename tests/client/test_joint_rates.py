"""How many servers' answers at once fill the links: what is learned of rates alone and together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.client.transport.joint_rates import FORGOTTEN_SECONDS, JointRates
from hapi.cluster.simulation.network import fair_rates


def names(count: int) -> list[str]:
    return [f"server{number}" for number in range(count)]


def rate_of(links: list[float], sending: list[int], shared: float) -> float:
    """Bytes per second of these servers' answers, each over its link and all over the shared one."""
    paths = [(number, len(links)) for number in sending]
    return sum(fair_rates(paths, [1] * len(paths), [*links, shared]))


def learned(links: list[float], shared: float, together: int, seconds: float = 2.0) -> JointRates:
    """What is known after each server was alone, and up to ``together`` at once."""
    rates = JointRates()
    for count in range(1, together + 1):
        for sending in itertools.islice(itertools.combinations(range(len(links)), count), 6):
            nbytes = rate_of(links, list(sending), shared) * seconds
            rates.add([f"server{number}" for number in sending], nbytes, seconds)
    return rates


some_links = st.lists(st.floats(1e6, 1e8), min_size=2, max_size=6)


@given(links=some_links, together=st.integers(1, 6))
def test_links_of_their_own_are_all_used(links: list[float], together: int) -> None:
    """Also where they are unlike each other; where few were seen at once, more are tried."""
    together = min(together, len(links))
    assert learned(links, 1e12, together).width(len(links)) == min(2 * together, len(links))


@given(links=some_links, share=st.floats(0.05, 1.0), together=st.integers(2, 6))
def test_a_shared_link_is_filled_by_one(links: list[float], share: float, together: int) -> None:
    rates = learned(links, share * min(links), min(together, len(links)))
    assert rates.width(len(links)) == 1


@given(servers=st.integers(3, 8), width=st.integers(1, 8))
def test_a_link_of_some_servers_is_filled_by_as_many(servers: int, width: int) -> None:
    rates = learned([1e7] * servers, 1e7 * width, servers)
    assert rates.width(servers) == (servers if width > 0.75 * servers else width)


def test_one_server_fills_its_link() -> None:
    rates = JointRates()
    assert rates.width(1) == 1
    rates.add(["a"], 1e6, 1.0)
    assert rates.width(1) == 1


def test_one_server_is_measured_alone_and_then_all() -> None:
    rates = JointRates()
    assert rates.width(4) == 1
    rates.add(["a", "b"], 1e7, 1.0)
    rates.add(["a"], 1e6, 0.05)
    assert rates.width(4) == 1, "not for long enough"
    rates.add(["a"], 1e7, 0.95)
    assert rates.width(4) == 1, "b counts as a"
    rates.add(["b"], 1e6, 1.0)
    assert rates.width(8) == 4, "since it is slower"
    other = JointRates()
    other.add(["a"], 1e7, 1.0)
    assert other.width(4) == 2
    other.add(["a", "b"], 1e3, 0.01)
    assert other.width(4) == 2, "not for long enough"
    other.add(["a", "b"], 1e7, 1.0)
    assert other.width(4) == 1


def test_it_is_measured_anew_after_a_while() -> None:
    rates = learned([1e7] * 3, 1e7, 3)
    assert rates.width(3) == 1
    for _ in range(int(FORGOTTEN_SECONDS)):
        rates.add(["server0"], 1e7, 1.0)
    assert rates.width(3) == 2


def test_a_network_that_changes_is_followed() -> None:
    rates = learned([1e7] * 2, 1e12, 2)
    for _ in range(20):
        rates.add(names(2), 1e7, 1.0)
    assert rates.width(2) == 1
    for _ in range(20):
        rates.add(names(2), 2e7, 1.0)
    assert rates.width(2) == 2


@pytest.mark.parametrize(("nbytes", "seconds"), [(-1.0, 1.0), (1e9, 0.0), (1e9, -1.0)])
def test_impossible_measurements_are_left_out(nbytes: float, seconds: float) -> None:
    rates = learned([1e7] * 2, 1e7, 2)
    rates.add(names(2), nbytes, seconds)
    assert rates.width(2) == 1
