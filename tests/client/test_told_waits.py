"""The first plan of a job on servers that others keep busy: it goes by the waits that they tell, then by its own."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.http_tools import EXTRACT, Known, ServedApplication, make_store, request_bytes, served, until
from support.planning_tools import JOB, best_of, planning_in, run_epoch, truth

from benchmarks.split.world import World
from hapi.client.planning.change_hold import ChangeHold
from hapi.client.planning.split_range import blank_profile
from hapi.client.session import Session
from hapi.client.settings import SessionSettings
from hapi.client.transport.server_pool import ServerPool
from hapi.client.transport.told_waits import told_waits
from hapi.profiler.profile import Profile
from hapi.profiler.stages.crowd import with_waits
from hapi.wire.transport.http import LoopbackTransport

OWN = 4 * (5 * 4 * 0.004)
"""Seconds of a server's work on four requests of :data:`JOB`, five samples each, at the last split."""


def shared(waits: list[float], **server: Any) -> float:
    profile = truth(1e9, server=replace(truth().server, **{"concurrency": 4, **server}))
    free = replace(profile.server_tier, decode_seconds=0.0, overhead_seconds=0.0, codec_seconds_per_byte=0.0)
    return with_waits(replace(profile, server_tier=free), JOB, waits).server.share


def test_the_share_is_the_part_of_the_work_between_two_requests() -> None:
    assert shared([0.0]) == 1.0
    assert shared([OWN]) == pytest.approx(0.5)
    assert shared([3 * OWN]) == pytest.approx(0.25)
    assert shared([0.0, 3 * OWN]) == pytest.approx(0.625), "of two servers one is idle"


def test_what_was_measured_before_does_not_count_beside_it() -> None:
    """Neither the share of another day, nor a wait in the price of each request."""
    crowded = replace(truth(), server=replace(truth().server, share=0.2, waiting_seconds=3.0))
    now = with_waits(crowded, JOB, [0.0]).server
    assert (now.share, now.waiting_seconds) == (1.0, 0.0)
    assert with_waits(crowded, JOB, []) == crowded, "servers of the version before tell nothing"


def test_each_of_several_ranks_has_its_part() -> None:
    two = replace(truth(), ranks=2, server=replace(truth().server, share=0.5))
    assert with_waits(two, JOB, [0.0]).server.share == 0.5


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=5), st.floats(0, 1e9))
def test_a_longer_wait_leaves_no_more(waits: list[float], more: float) -> None:
    before, after = shared(waits), shared([wait + more for wait in waits])
    assert 0 < after <= before <= 1


def test_a_crowded_servers_first_cut_is_earlier_and_stays_where_it_was_told_truly() -> None:
    """What is measured then says the same: nothing is counted twice, and the split does not move again."""
    idle = truth(1e9)
    told = with_waits(idle, JOB, [3 * OWN])
    world = World(idle)
    world.share, world.slot_share = 0.4, lambda split: told.server.share
    planning = planning_in(world, profile=told)
    first = planning.split
    assert first < best_of(World(idle))
    assert "other jobs leave" in planning.changes[0].why
    for epoch in range(3):
        assert set(run_epoch(planning, world, epoch)) == {first}
    assert len(planning.changes) == 1


def test_a_crowd_that_is_gone_is_forgotten_in_a_few_batches() -> None:
    """The first plan is believed until measurements differ; it is held no longer than any other."""
    idle = truth(1e9)
    world = World(idle)
    planning = planning_in(world, profile=with_waits(idle, JOB, [20 * OWN]))
    assert planning.split < best_of(world)
    splits = run_epoch(planning, world, 0, batches=30)
    assert splits[-1] == best_of(world)
    assert splits.index(splits[-1]) <= 2 * ChangeHold.FIRST + 4


def test_a_wait_that_was_measured_goes_with_the_crowd() -> None:
    """A profile of a crowded day has it in the price of each request."""
    crowded = replace(
        truth(1e9), server=replace(truth().server, concurrency=4, share=0.25, waiting_seconds=2.0)
    )
    world = World(truth(1e9))
    planning = planning_in(world, profile=crowded)
    run_epoch(planning, world, 0, batches=30)
    assert planning.profile is not None
    assert (planning.profile.server.share, planning.profile.server.waiting_seconds) == (1.0, 0.0)
    assert planning.split == best_of(world)


# -- what servers tell -------------------------------------------------------------------------------------------------


def pool_of(*answers: Any) -> ServerPool:
    def transport(number: int, answer: Any) -> LoopbackTransport:
        def handle(method: str, path: str, body: bytes) -> Any:
            assert (method, path) == ("GET", "/v1")
            status, document = answer if isinstance(answer, tuple) else (200, answer)
            content = json.dumps(document).encode()
            headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
            return status, headers, iter([content])

        return LoopbackTransport(handle, f"http://10.0.0.{number}:8099")

    return ServerPool([transport(number, answer) for number, answer in enumerate(answers)])


def test_only_what_is_told_counts() -> None:
    """Nothing of older servers, of those that fail, and of those that tell nonsense; no server is waited for long."""
    strange: list[Any] = [{}, [], {"wait": None}, {"wait": True}, {"wait": "long"}, (503, {}), (404, {})]
    assert told_waits(pool_of(*strange)) == []
    assert told_waits(pool_of({"wait": 2.5}, {}, {"wait": 0}, {"wait": -1.0})) == [2.5, 0.0, 0.0]
    assert told_waits(pool_of({"wait": 1e300})) == [3600.0]


# -- a running server --------------------------------------------------------------------------------------------------


@contextmanager
def crowd(server: ServedApplication, known: Known, requests: int) -> Iterator[None]:
    """Requests whose clients do not read: one holds the only slot, the others wait."""
    body = json.dumps(known.extract([n % 40 for n in range(40_000)], split=4)).encode()
    admission = server.application.admission
    with ExitStack() as stack:
        for _ in range(requests):
            sock = stack.enter_context(contextlib.closing(socket.socket()))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(request_bytes(EXTRACT, body))
        until(lambda: (admission.running, admission.queued) == (1, requests - 1), 60, "a crowd")
        yield


def opened(server: ServedApplication, **changes: Any) -> Session:
    return Session.open(
        SessionSettings(
            server=(f"http://127.0.0.1:{server.port}",), dataset="digits", model="resnet18", weights="random:0",
            image_size=32, split="auto", bs=8, request_size=8, cache="off", alternate="off", **changes,
        )
    )  # fmt: skip


@pytest.mark.slow
def test_the_first_cut_on_a_crowded_server_is_moved(tmp_path: Path) -> None:
    """A layer takes a microsecond there and four here, so that an idle server gets most of them, whatever machine this
    is."""
    folder = make_store(tmp_path / "store")
    known, path = Known(folder), tmp_path / "profile.json"
    limits = {"max_running": 1, "cos_batch": 8, "threads": 1, "slow_reader_rate": 0, "send_timeout": 600}
    with served(folder, **limits) as server:
        with opened(server) as session:
            assert session.planning is not None
            blank: Profile = blank_profile(session.planning.sizes)
        layers = tuple(replace(x, server_seconds=1e-6, client_seconds=4e-6) for x in blank.layers)
        fast = replace(blank.link, bits_per_second=1e13)
        replace(blank, layers=layers, link=fast).save(str(path))

        def first_plan() -> tuple[int, str]:
            with opened(server, profile=str(path)) as session:
                assert session.planning is not None
                return session.split, session.planning.changes[0].why

        idle, why = first_plan()
        assert idle > 4 and why == "from the given profile"
        with crowd(server, known, 5):
            split, why = first_plan()
            assert split < idle and "other jobs leave" in why
        server.idle()
        assert first_plan() == (idle, "from the given profile")
