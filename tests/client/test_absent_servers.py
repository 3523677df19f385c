"""Servers that cannot be reached are asked by threads of their own; requests go to the others meanwhile."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.tiny_http import answer, serving

from hapi.client.transport import absent_servers
from hapi.client.transport.absent_servers import is_there
from hapi.client.transport.hedging import Measured
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import (
    BusyError,
    DrainingError,
    ForeignAnswerError,
    HapiError,
    NotFoundError,
    TransportError,
    UnauthorizedError,
)
from hapi.wire.messages import READY_PATH
from hapi.wire.transport.base import Transport
from hapi.wire.transport.http import HttpTransport

REQUESTS = 300
MEASURED = Measured(kind=1, samples=lambda: 8)


class Machine:
    """A transport to a machine that is there, or gone: packets to it are swallowed."""

    def __init__(self, url: str, error: HapiError | None = None) -> None:
        self.url, self.error = url, error
        self.calls: list[str] = []
        self.requests = 0

    def call(self, method: str, path: str, document: Any = None) -> Any:
        self.calls.append(path)
        if self.error is not None:
            raise self.error
        return {}

    def request(self) -> str:
        self.requests += 1
        if self.error is not None:
            raise self.error
        return self.url

    def received_bytes(self) -> int | None:
        return None

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


def asking(machines: list[Machine]) -> bool:
    """Whether one is still asked, well after its longest pause."""
    before = [len(machine.calls) for machine in machines]
    threading.Event().wait(0.05)
    return [len(machine.calls) for machine in machines] != before


def attempt(transport: Transport) -> str:
    assert isinstance(transport, Machine)
    return transport.request()


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent_servers, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(absent_servers, "LONGEST_PAUSE", 0.004)


@pytest.fixture
def machines() -> list[Machine]:
    return [Machine(f"http://{name}:8099") for name in ("one", "two", "gone")]


@pytest.fixture
def pool(machines: list[Machine]) -> Iterator[ServerPool]:
    made = ServerPool(machines, retry_timeout=200.0)
    yield made
    made.close()
    until(lambda: not asking(machines))


def test_one_request_finds_out_and_no_other_waits(pool: ServerPool, machines: list[Machine]) -> None:
    """Whatever the pauses: a request to a machine that is gone may take as long as a connection's time limit."""
    gone = machines[2]
    gone.error = TransportError("no answer")
    for _ in range(REQUESTS):
        for server in pool._servers:
            server.well_at = 0.0  # the pause after its failure is over
        pool.run(attempt, measured=MEASURED)
    assert gone.requests == 1 and pool.retries == 1
    until(lambda: len(gone.calls) > 5)
    assert set(gone.calls) == {READY_PATH} and not machines[0].calls
    gone.error = None
    until(lambda: not pool._servers[2].absent)
    pool._servers[2].well_at = 0.0
    until(lambda: pool.run(attempt, measured=MEASURED) == gone.url)


class Swallowing(Machine):
    """A machine that answers nothing, and breaks no connection, until it is back."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.back = threading.Event()

    def call(self, method: str, path: str, document: Any = None) -> Any:
        assert self.back.wait(240)
        return super().call(method, path, document)

    def request(self) -> str:
        assert self.back.is_set(), "a request waits for a machine that is gone"
        return super().request()


def test_a_job_begins_with_those_that_are_there(machines: list[Machine]) -> None:
    """A dead machine in the list used to hold the first requests for a connection's time limit."""
    dead, refuses = Swallowing("http://dead:8099"), machines[2]
    refuses.error = DrainingError("it ends")
    pool = ServerPool([dead, *machines], retry_timeout=200.0)
    pool.find_absent(0.05)
    assert [server.absent for server in pool._servers] == [True, False, False, True]
    for _ in range(20):
        pool.run(attempt, measured=MEASURED)
    assert not refuses.requests and pool.retries == 0
    dead.back.set()
    refuses.error = None
    until(lambda: not any(server.absent for server in pool._servers))
    until(lambda: pool.run(attempt, measured=MEASURED) == dead.url)
    pool.close()
    until(lambda: not asking([dead, *machines]))


def test_one_that_joins_is_asked_for_features_when_it_answers(pool: ServerPool) -> None:
    """A name's new address may be a machine whose packets are swallowed yet: no request waits to find out."""
    new = Swallowing("http://new:8099")
    pool.join(new)
    for _ in range(20):
        pool.run(attempt, measured=MEASURED)
    assert pool.size == 4 and pool.retries == 0
    new.back.set()
    until(lambda: pool.run(attempt, measured=MEASURED) == new.url)
    assert new.calls == [READY_PATH]


def test_where_none_answers_all_are_tried(machines: list[Machine]) -> None:
    silent = [Swallowing(f"http://{name}:8099") for name in ("one", "two")]
    pool = ServerPool(silent)
    pool.find_absent(0.01)
    assert not any(server.absent for server in pool._servers)
    for machine in silent:
        machine.back.set()
    assert pool.run(attempt) == silent[0].url
    alone = ServerPool(machines[:1])
    alone.find_absent(200.0)
    assert not machines[0].calls, "the only server is asked by requests"
    for each in (pool, alone):
        each.close()


def test_where_all_are_gone_requests_find_the_first_that_comes_back(
    pool: ServerPool, machines: list[Machine]
) -> None:
    for machine in machines:
        machine.error = TransportError("no answer")

    def checked(transport: Transport) -> str:
        if sum(m.requests for m in machines) > 5:
            machines[1].error = None
        return attempt(transport)

    assert pool.run(checked) == machines[1].url
    assert all(machine.requests for machine in machines)


@pytest.mark.parametrize("error", [BusyError("full"), DrainingError("it ends"), UnauthorizedError("wrong")])
def test_one_that_answers_is_not_absent(pool: ServerPool, machines: list[Machine], error: HapiError) -> None:
    machines[2].error = error
    with pytest.raises(type(error)):
        pool.run(attempt, only=machines[2].url, once=True)
    assert not pool._servers[2].absent and not machines[2].calls


def test_one_that_is_named_is_asked_all_the_same(pool: ServerPool, machines: list[Machine]) -> None:
    machines[2].error = TransportError("no answer")
    with pytest.raises(TransportError):
        pool.run(attempt, only=machines[2].url, once=True)
    assert pool._servers[2].absent
    for _ in range(3):  # nobody waits for what is asked once, as of each server
        with pytest.raises(TransportError):
            pool.run(attempt, only=machines[2].url, once=True)
    assert machines[2].requests == 1
    machines[2].error = None
    assert pool.run(attempt, only=machines[2].url) == machines[2].url
    assert not pool._servers[2].absent


def test_patience_ends_although_one_is_absent(machines: list[Machine]) -> None:
    machines[0].error = machines[1].error = BusyError("full", retry_after=0.01)
    machines[2].error = TransportError("no answer")
    pool = ServerPool(machines, retry_timeout=0.05)
    with pytest.raises(HapiError):
        pool.run(attempt)
    pool.close()


def test_another_one_is_hoped_for_when_the_last_is_no_server(
    pool: ServerPool, machines: list[Machine]
) -> None:
    """What answers in place of a server ends no job while others are away for a moment."""
    for machine in machines[:2]:
        machine.error = TransportError("no answer")
        with pytest.raises(TransportError):
            pool.run(attempt, only=machine.url, once=True)
    machines[2].error = ForeignAnswerError("a page of something else")

    def checked(transport: Transport) -> str:
        if machines[2].requests:
            machines[0].error = None
            until(lambda: not pool._servers[0].absent)
            pool._servers[0].well_at = 0.0
        return attempt(transport)

    assert pool.run(checked) == machines[0].url


def test_one_that_left_is_asked_no_more(pool: ServerPool, machines: list[Machine]) -> None:
    gone = machines[2]
    gone.error = TransportError("no answer")
    with pytest.raises(TransportError):
        pool.run(attempt, only=gone.url, once=True)
    until(lambda: gone.calls)
    assert pool.leave(gone.url)
    until(lambda: not asking(machines))


def test_the_only_server_is_asked_by_requests(machines: list[Machine]) -> None:
    pool, only = ServerPool(machines[:1], retry_timeout=0.0), machines[0]
    only.error = TransportError("no answer")
    with pytest.raises(TransportError):
        pool.run(attempt)
    assert not pool._servers[0].absent and not only.calls
    pool.close()


@pytest.mark.parametrize(
    ("error", "there"),
    [
        (None, True),
        (NotFoundError("a balancer that hides it"), True),
        (ForeignAnswerError("a page"), True),
        (DrainingError("it ends"), False),
        (TransportError("no answer"), False),
    ],
)
def test_who_counts_as_there(error: HapiError | None, there: bool) -> None:
    assert is_there(Machine("http://one:8099", error)) is there  # type: ignore[arg-type]


def test_servers_that_left_keep_no_connection() -> None:
    """A fleet that changes for days: descriptors do not add up, and what they sent still counts."""
    body = b'{"x": "' + b"y" * 1000 + b'"}'
    with serving(answer(body)) as stays, serving(answer(body)) as comes:
        pool = ServerPool([HttpTransport(stays.url)])
        counts, descriptors = list[int](), list[int]()
        for _ in range(20):
            pool.join(HttpTransport(comes.url))
            until(lambda: not pool._servers[-1].absent)
            assert pool.run(lambda t: t.call("GET", "/v1")["x"], only=comes.url)
            assert pool.leave(comes.url, at_once=False)
            descriptors.append(connections_to(comes.port))
            counts.append(pool.received_bytes() or 0)
        assert max(descriptors) == 0
        assert all(after - before > 1000 for before, after in pairwise(counts))
        pool.close()


def test_one_that_leaves_at_work_is_closed_when_it_has_finished() -> None:
    with serving(answer(b"{}")) as stays, serving(answer(b"{}")) as leaves:
        pool = ServerPool([HttpTransport(stays.url), HttpTransport(leaves.url)])

        def work(transport: Transport) -> Any:
            assert pool.leave(leaves.url, at_once=False)
            return transport.call("GET", "/v1")

        assert pool.run(work, only=leaves.url) == {} and pool.retries == 0
        assert connections_to(leaves.port) == 0
        pool.close()


def connections_to(port: int) -> int:
    """This process's client sockets that are connected to a port of loopback."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as duplicate:
                found += duplicate.getpeername()[1] == port
    return found
