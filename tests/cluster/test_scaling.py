"""How many servers there should be: bounds whatever is read, and a fleet in simulated time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.cluster.scaling import FleetReading, ScalingRule, ScalingState, wanted_servers

RULE = ScalingRule(lowest=1, highest=40)
START_SECONDS = 8.0
"""Time from a decision to a server that answers."""
FORGETTING = 5.0
"""Seconds over which trainers' shares are means."""
READ = 2.0
"""Seconds between two decisions."""


@dataclass
class Fleet:
    """Trainers that could take ``demand`` servers' work; a share of each queue is due to their bursts alone."""

    demand: float
    rule: ScalingRule = RULE
    servers: int = 1
    queue: float = 0.0
    """Expected wait that has nothing to do with missing servers, in seconds."""
    link: float = math.inf
    """Servers' work that the trainers' link can carry."""
    unheard: float = 0.0
    """Seconds in which trainers do not know of a server that answers."""
    lag: float = 0.0
    """Seconds over which the readings themselves are means."""
    now: float = 1000.0
    stalled: float = 0.0
    read: float = 0.0
    """Stall that is read."""
    state: ScalingState = field(default_factory=ScalingState)
    starting: list[tuple[float, int]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    @property
    def answering(self) -> int:
        return self._since(self.now)

    def _since(self, moment: float) -> int:
        """Servers that answer since then."""
        return self.servers - sum(n for at, n in self.starting if at > moment)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / READ)):
            self.now += READ
            asked = self._since(self.now - self.unheard)
            given = min(self.demand, asked, self.link)
            stall = 1 - given / self.demand if self.demand else 0.0
            self.stalled += (1 - math.exp(-READ / FORGETTING)) * (stall - self.stalled)
            self.read += (1 - math.exp(-READ / self.lag) if self.lag else 1.0) * (self.stalled - self.read)
            crowded = asked < min(self.demand, self.link)
            reading = FleetReading(
                servers=self.answering,
                asked=asked,
                wait=self.read * ((2.0 if crowded else 0.0) + self.queue),
                stalled=self.read,
                busy=min(1.0, given / self.answering),
            )
            wanted, self.state = wanted_servers(self.rule, self.state, reading, self.servers, self.now)
            if wanted > self.servers:
                self.starting.append((self.now + START_SECONDS, wanted - self.servers))
            self.servers = wanted
            self.targets.append(wanted)

    @property
    def changes(self) -> list[int]:
        steps = [b - a for a, b in zip([self.targets[0], *self.targets], self.targets, strict=False)]
        return [step for step in steps if step]


@pytest.mark.parametrize("queue", [0.0, 3.0, 600.0])
def test_trainers_that_are_the_bottleneck_get_no_more_servers(queue: float) -> None:
    fleet = Fleet(demand=2.5, servers=3, queue=queue)
    fleet.run(600)
    assert fleet.changes == []


def test_a_link_that_is_the_bottleneck_is_no_reason_either() -> None:
    fleet = Fleet(demand=10.0, link=2.5, servers=3)
    fleet.run(600)
    assert fleet.stalled > 0.7 and fleet.changes == []


@pytest.mark.parametrize("unheard", [30.0, 1e9])
def test_servers_that_trainers_do_not_know_are_not_added_to(unheard: float) -> None:
    """A fleet's list is asked for now and then; trainers with a list of their own never hear of a new server."""
    fleet = Fleet(demand=3.7, stalled=1 - 1 / 3.7, unheard=unheard)
    fleet.run(600)
    assert fleet.servers == 4 and len(fleet.changes) == 1


@pytest.mark.parametrize("sudden", [False, True])
@pytest.mark.parametrize("demand", [1.5, 2.0, 2.5, 3.7, 8.0, 15.0, 23.4])
def test_server_bound_load_has_the_best_size_within_a_minute_and_keeps_it(
    demand: float, sudden: bool
) -> None:
    """Also where trainers did not wait before: their means take some seconds, those over replicas some more."""
    fleet = Fleet(demand=demand, stalled=0.0 if sudden else 1 - 1 / demand, lag=3.0 if sudden else 0.0)
    fleet.run(64 if sudden and demand > 4 else 60)
    best = math.ceil(demand)
    assert abs(fleet.answering - best) <= 0.1 * best
    assert all(step > 0 for step in fleet.changes)
    settled = fleet.servers
    fleet.run(3600)
    assert fleet.servers == settled and all(step > 0 for step in fleet.changes)


def test_servers_that_idle_are_taken_away_slowly_and_not_asked_back() -> None:
    fleet = Fleet(demand=20.0, servers=24)
    fleet.run(60)
    fleet.demand = 5.0
    fleet.run(RULE.down_seconds - 20)
    assert fleet.servers == 24, "not at once"
    fleet.run(7200)
    assert all(step < 0 for step in fleet.changes)
    assert fleet.servers == math.ceil(5.0 / RULE.busy_share)


def test_a_number_that_was_too_few_is_not_tried_again_soon() -> None:
    rule = ScalingRule(lowest=1, highest=4, busy_share=1.0)
    fleet = Fleet(demand=1.99, rule=rule, stalled=0.5)
    fleet.run(60)
    assert fleet.servers == 2
    fleet.demand = 1.0
    fleet.run(rule.regret_seconds / 2)
    assert fleet.servers == 2
    fleet.demand = 0.2
    fleet.run(2 * rule.down_seconds)
    assert fleet.servers == 1, "so little work that it will do"


@pytest.mark.parametrize("seed", range(3))
def test_a_day_of_noisy_load_does_not_flap(seed: int) -> None:
    """An hour of each demand, which is 15% more or less every ten seconds: one direction, and then rest."""
    chance, fleet = random.Random(seed), Fleet(demand=1.0)
    fleet.run(READ)
    for _ in range(4):
        level, before = chance.uniform(0.1, 30.0), len(fleet.changes)
        for _ in range(360):
            fleet.demand = level * chance.uniform(0.85, 1.15)
            fleet.run(10)
        steps = fleet.changes[before:]
        assert len({step > 0 for step in steps}) <= 1, (level, steps)


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.integers(1, 50),
    st.integers(0, 50),
    st.lists(
        st.tuples(st.integers(-1, 60), NUMBERS, NUMBERS, NUMBERS, st.integers(0, 100), st.floats(0, 900))
    ),
)
def test_it_is_never_out_of_bounds(
    lowest: int, more: int, steps: list[tuple[int, float, float, float, int, float]]
) -> None:
    rule, state, now = ScalingRule(lowest=lowest, highest=lowest + more), ScalingState(), 0.0
    for servers, wait, stalled, busy, current, passes in steps:
        now += passes
        reading = FleetReading(servers=servers, asked=servers // 2, wait=wait, stalled=stalled, busy=busy)
        wanted, state = wanted_servers(rule, state, reading, current, now)
        assert rule.lowest <= wanted <= rule.highest
        if not reading.whole and rule.lowest <= current <= rule.highest:
            assert wanted == current, "what is not known changes nothing"
