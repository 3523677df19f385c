"""Which connections keep their places when there are too many, and which time each of them has."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from hapi.errors import UsageError
from hapi.server.http.connections import (
    CLOSING_SECONDS,
    FIRST_REQUEST_SECONDS,
    HEALTH_SECONDS,
    ConnectionLimits,
    Connections,
    OpenConnection,
    network_of,
)
from hapi.server.http.listening import Listener
from hapi.server.lifecycle import descriptors
from hapi.server.lifecycle.descriptors import connection_limits
from hapi.server.settings import ServerSettings


class Door:
    """Connections of sockets that nobody reads, and a clock that stands still."""

    def __init__(self, total: int = 4, per_address: int = 5, reserve: int = 2) -> None:
        self.now = 0.0
        limits = ConnectionLimits(total=total, per_address=per_address, reserve=reserve)
        self.connections = Connections(limits, lambda: self.now)
        self.sockets: list[socket.socket] = []

    def come(self, address: str = "10.0.0.1") -> OpenConnection | None:
        sock = socket.socket()
        self.sockets.append(sock)
        return self.connections.admit(sock, address)

    def places(self, count: int, address: str = "10.0.0.1") -> list[OpenConnection]:
        found = [self.come(address) for _ in range(count)]
        assert all(place is not None and not place.over for place in found)
        return [place for place in found if place is not None]

    def close_ended(self) -> None:
        for place in list(self.connections._ended):
            self.connections.closed(place)


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    for sock in made.sockets:
        sock.close()


def test_strangers_make_room_the_oldest_first(door: Door) -> None:
    first, second, *_ = door.places(4)
    door.connections.authorise(first)
    new = door.come()
    assert new is not None and not new.over
    assert second.ended is not None and first.ended is None
    assert door.connections.refused == {"replaced": 1}
    door.close_ended()
    assert door.connections.open == 4


def test_those_that_were_authorised_stay(door: Door) -> None:
    for place in door.places(4):
        door.connections.authorise(place)
    new = door.come()
    assert new is not None and new.over == "full"
    second = door.come()
    third = door.come()  # the reserve is full too
    assert second is not None and third is not None
    assert new.ended == 0.0 and second.ended is third.ended is None
    assert door.connections.refused == {"full": 3}
    door.close_ended()
    assert door.connections.open == 6
    door.now = HEALTH_SECONDS
    door.connections.sweep()
    assert second.ended == third.ended == HEALTH_SECONDS
    door.close_ended()
    assert door.connections.open == 4
    door.connections.authorise(new)  # too late, and no matter
    door.connections.closed(new)
    assert door.connections.open == 4


def test_one_address_cannot_take_all() -> None:
    door = Door(total=8, per_address=2)
    mine = door.places(1, "10.0.0.2")[0]
    theirs = door.places(2)
    for place in theirs:
        door.connections.authorise(place)
    crowd = door.come()
    assert crowd is not None and crowd.over == "address"
    assert mine.ended is None
    door.connections.closed(theirs[0])
    door.places(1)


def test_a_crowd_of_one_address_replaces_its_own() -> None:
    door = Door(total=8, per_address=2)
    mine = door.places(1, "10.0.0.2")[0]
    theirs = []
    for _ in range(20):
        theirs += door.places(1)
        door.close_ended()
    assert mine.ended is None
    assert [place.ended is None for place in theirs].count(True) == 2


def test_a_first_request_has_its_time(door: Door) -> None:
    silent, asking, authorised = door.places(3)
    door.connections.asks(asking)
    door.connections.authorise(authorised)
    door.now = FIRST_REQUEST_SECONDS - 0.1
    late = door.places(1)[0]
    door.connections.sweep()
    assert silent.ended is None
    door.now = FIRST_REQUEST_SECONDS
    door.connections.sweep()
    assert silent.ended is not None
    assert asking.ended is authorised.ended is late.ended is None
    assert door.connections.refused == {"late": 1}


def test_new_ones_wait_for_those_that_are_being_closed(door: Door) -> None:
    for _ in range(6):
        assert not door.connections.awaits_closing()
        door.come()
    assert door.connections.awaits_closing()
    door.now = CLOSING_SECONDS
    assert not door.connections.awaits_closing()  # something went wrong: better to refuse than to wait
    assert door.come() is not None
    assert door.come() is None
    door.close_ended()
    assert not door.connections.awaits_closing()
    door.places(1)


def test_lost_sockets_give_their_place_back(door: Door) -> None:
    door.places(2)
    assert door.connections.open == 2
    door.sockets.clear()
    assert door.connections.open == 0


@pytest.mark.parametrize(
    ("address", "network"),
    [("10.1.2.3", "10.1.2.3"), ("::ffff:10.1.2.3", "10.1.2.3"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
     ("fe80::1%eth0", "fe80::/64"), ("", "")],
)  # fmt: skip
def test_what_is_one_address(address: str, network: str) -> None:
    assert network_of(address) == network


@pytest.mark.parametrize(
    ("settings", "open_files", "total", "per_address"),
    [({}, 256, 136, 68), ({}, 1 << 20, 4096, 2048), ({}, 64, 16, 8), ({"decode_processes": 8}, 256, 104, 52),
     ({"max_connections": 100}, 256, 100, 50), ({"max_connections_per_address": 1000}, 256, 136, 136),
     ({"max_connections": 1, "max_connections_per_address": 1}, 256, 1, 1)],
)  # fmt: skip
def test_descriptors_are_shared_out(
    settings: dict[str, int], open_files: int, total: int, per_address: int
) -> None:
    limits = connection_limits(ServerSettings(store="x", **settings), 4, open_files)  # type: ignore[arg-type]
    assert (limits.total, limits.per_address) == (total, per_address)


def test_more_connections_than_descriptors() -> None:
    with pytest.raises(UsageError, match="--max-connections 200 needs 320"):
        connection_limits(ServerSettings(store="x", max_connections=200), 4, 256)


def test_the_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(100, 300)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, wanted: limits.append(wanted))
    assert descriptors.raise_descriptor_limit() == 300
    assert limits[1:] == [(300, 300)]


def test_without_descriptors_who_waits_is_turned_away() -> None:
    door = Door()
    listener = Listener(socket.AF_INET, door.connections)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client = socket.create_connection(listener.getsockname(), timeout=5)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = listener._spare
    assert spare is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, hard))  # no number above the spare's can be given
    taken: list[int] = []
    try:
        with pytest.raises(OSError) as full:
            while True:
                taken.append(socket.socket().detach())
        assert full.value.errno == errno.EMFILE
        with pytest.raises(BlockingIOError):
            listener.accept()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert client.recv(1) == b""
    assert door.connections.refused == {"descriptors": 1}
    assert listener._spare == spare
    client.close()
    listener.close()
