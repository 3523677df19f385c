"""Splits of a plan are named to the servers before features are asked for there; nothing depends on the answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
from support.local_job import Silent, open_session, trainer_of

from hapi.client.loading.job import ExtractionJob
from hapi.client.planning.change_hold import ChangeHold
from hapi.client.planning.warm_up import WarmUp
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import NotFoundError
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.wire.frames import Buffer
from hapi.wire.messages import EXTRACT_PATH
from hapi.wire.transport.http import LoopbackTransport
from hapi.wire.warm_up import WARM_PATH, WarmUpRequest

Answer = tuple[int, Mapping[str, str], Iterator[Buffer]]


class Server:
    """Answers as ``service`` does, or, as an older one, does not know the request; keeps what it was asked."""

    def __init__(self, service: Service, *, older: bool = False) -> None:
        self._handle, self._older = loopback_handler(service), older
        self.asked: list[tuple[str, int]] = []

    def __call__(self, method: str, path: str, body: bytes) -> Answer:
        if path in (WARM_PATH, EXTRACT_PATH):
            self.asked.append((path, json.loads(body)["split"]))
        if path == WARM_PATH and self._older:
            error = NotFoundError("no such path")
            return error.status, {}, iter([json.dumps(error.to_problem()).encode()])
        return self._handle(method, path, body)

    def named(self) -> Counter[int]:
        return Counter(split for path, split in self.asked if path == WARM_PATH)


def test_a_split_is_named_once_to_all_servers(service: Service) -> None:
    servers = [Server(service), Server(service, older=True)]
    transports = [LoopbackTransport(server, f"http://{n}") for n, server in enumerate(servers)]
    with open_session(service, split="auto") as session:
        context, pool = session.job_context, ServerPool(transports)
        warm_up = WarmUp(pool)
        assert warm_up.name(context.job(0)) is None, "nothing is loaded for split 0"
        for split in (5, 12, 5):
            thread = warm_up.name(context.job(split))
            if thread is not None:
                thread.join()
        assert [server.named() for server in servers] == [{5: 1, 12: 1}, {5: 1, 12: 1}]
        pool.close()
        thread = warm_up.name(context.job(7))
        assert thread is not None
        thread.join()


@pytest.mark.slow
def test_the_next_split_of_a_profile_is_named_before_it_is_asked_for(service: Service) -> None:
    server, changes = Server(service), {"split": "oracle", "epochs": 1, "prefetch_bytes": 0, "bs": 2}

    def name(_: WarmUp, job: ExtractionJob) -> None:
        server.asked.append((WARM_PATH, job.split))

    with mock.patch.object(WarmUp, "name", name), open_session(server, **changes) as session:
        trainer_of(session, Silent(), **changes).run()
    later = list(dict.fromkeys(split for path, split in server.asked if path == EXTRACT_PATH))[1:]
    assert len(later) >= 3
    assert all(server.asked.index((WARM_PATH, s)) < server.asked.index((EXTRACT_PATH, s)) for s in later)


def test_a_change_that_the_hold_delays_is_known() -> None:
    hold = ChangeHold()
    assert hold.allows(3)
    assert hold.delayed is None
    hold.begin()
    assert not hold.allows(5)
    assert hold.delayed == 5
    for _ in range(ChangeHold.FIRST):
        hold.batch_done()
    assert hold.allows(5)
    assert hold.delayed is None


def test_the_document_is_the_servers(service: Service) -> None:
    with open_session(service, split="auto", frozen_precision="bf16") as session:
        job = session.job_context.job(12)
        assert job.model is not None
        asked: list[Any] = []

        def handle(method: str, path: str, body: bytes) -> Answer:
            asked.append(WarmUpRequest.from_json(json.loads(body)))
            return 200, {}, iter([b'{"state": "loading"}'])

        thread = WarmUp(ServerPool([LoopbackTransport(handle)])).name(job)
        assert thread is not None
        thread.join()
        named = WarmUpRequest(model=job.model, split=12, split_name=job.split_name, precision="bf16")
        assert asked == [named]
