"""The simulated choice of servers, by an index, beside the client's own over the whole list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hapi.client.transport.server_choice import ServerLoad, soonest
from hapi.cluster.simulation.training.choice import KnownServer, KnownServers, ServerList
from hapi.errors import TransportError

COUNT = 7
LISTED = ServerList.of([SimpleNamespace(name=f"s{number}", alive=True) for number in range(COUNT)], "model")  # type: ignore[misc]


class WholeList:
    """The client's rule over all servers, one by one."""

    def __init__(self) -> None:
        self.loads = [ServerLoad() for _ in range(COUNT)]
        self.well_at = [0.0] * COUNT
        self.chosen = 0
        self.asked: set[int] = set()

    def choose(self, split: int, tried: set[int], now: float) -> int | None:
        well = [number for number in range(COUNT) if self.well_at[number] <= now]
        fresh = [number for number in well if number not in tried] or well
        if not fresh:
            return None
        best = soonest([self.loads[number] for number in fresh], split, now, self.chosen)
        chosen = min(
            (number for number in fresh if self.loads[number] in best),
            key=lambda n: (self.loads[n].until_free, LISTED.places[n] if split else 0),
        )
        self.chosen += 1
        self.loads[chosen].begin(self.chosen)
        self.asked.add(chosen)
        return chosen


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.floats(0.01, 3),
            st.booleans(),
            st.sets(st.integers(0, COUNT - 1)),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_the_index_chooses_as_the_whole_list(steps: list[tuple[int, float, bool, set[int], bool]]) -> None:
    index, plain, now = KnownServers(LISTED), WholeList(), 0.0
    flying: list[tuple[KnownServer, Any, Any]] = []
    for split, seconds, fails, tried, waits in steps:
        now += seconds
        if flying and not waits:
            known, *both = flying.pop(0)
            number = known.number
            for load, asked in zip((known, plain.loads[number]), both, strict=True):
                load.end(now, asked)
                if not fails:
                    load.answered(asked, now)
            if fails:
                known.failed(TransportError("gone"), now, 1.0)
                plain.well_at[number] = known.well_at
        tried &= plain.asked  # a server that failed a request was asked
        expected = plain.choose(split, tried, now)
        chosen = index.choose(split, tried, now)
        assert (None if chosen is None else chosen.number) == expected
        if chosen is not None:
            flying.append(
                (chosen, chosen.asked(split, 8, now), plain.loads[chosen.number].asked(split, 8, now))
            )


def test_a_server_that_is_gone_gets_one_request() -> None:
    """As the client's does, which asks it by a thread of its own until it answers."""
    servers: Any = [SimpleNamespace(name=name, alive=name != "gone") for name in ("one", "two", "gone")]
    known, chosen, now = KnownServers(ServerList.of(servers, "model")), list[str](), 0.0

    def requests() -> None:
        """Three at a time."""
        flying = [server for _ in servers if (server := known.choose(0, (), now)) is not None]
        for server in flying:
            server.end(now)
            if not server.server.alive:
                server.failed(TransportError("no answer"), now, 1.0)
        chosen.extend(server.server.name for server in flying)

    for _ in range(200):
        now += 1.0
        requests()
    assert chosen.count("gone") == 1
    servers[2].alive = True
    for _ in range(20):
        now += 1.0
        requests()
    assert chosen.count("gone") > 1


def test_the_only_server_is_asked_again_and_again() -> None:
    servers: Any = [SimpleNamespace(name="gone", alive=False)]
    known, now = KnownServers(ServerList.of(servers, "model")), 0.0
    for _ in range(5):
        server = known.choose(0, (), now)
        assert server is not None
        server.end(now)
        server.failed(TransportError("no answer"), now, 1.0)
        assert known.choose(0, (), now) is None
        now = known.well_at()
