"""A job at a name whose addresses change under it, as those of a Kubernetes headless service do; or at a list."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from support.harness import server, wait_for
from support.http_tools import make_store
from support.tiny_http import answer, serving

import hapi
from hapi.client import connect
from hapi.client.transport.addresses import ServerAddresses
from hapi.client.transport.server_pool import ServerPool

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-twenty-and-more-characters"
"""Without one a server answers to loopback names only."""
ADDRESSES = [f"127.0.0.{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("kind", ["name", "list"])
def test_servers_of_a_name_restart_one_after_the_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = make_store(tmp_path / "store"), ADDRESSES[:2]
    looked_up = partial(ServerAddresses, resolve=lambda host, port: list(found), seconds=0.05, hurried=0.05)

    def listed(connection: socket.socket, request: bytes) -> bool:
        document = {"servers": [f"http://{address}:{first.port}" for address in found]}
        return answer(json.dumps(document).encode())(connection, request)

    monkeypatch.setattr(connect, "ServerAddresses", looked_up)
    with ExitStack() as ends:
        first = ends.enter_context(server(folder, "--host", ADDRESSES[0], HAPI_TOKEN=TOKEN))
        for address in ADDRESSES[1:]:
            ends.enter_context(server(folder, "--host", address, port=first.port, HAPI_TOKEN=TOKEN))
        fleet = ends.enter_context(serving(listed))
        url = f"http://store.invalid:{first.port}" if kind == "name" else f"fleet+{fleet.url}"
        settings = hapi.SessionSettings(
            server=(url,), dataset="digits", model="resnet18",
            weights="random", image_size=32, split="maxpool", bs=10, request_size=5, cache="off", timeout=600,
        )  # fmt: skip
        session = ends.enter_context(hapi.Session.open(settings, token=TOKEN))
        pool: ServerPool = session._servers

        def answering(epoch: int) -> set[str]:
            """The server processes that answered in an epoch."""
            assert len(list(session.epoch(epoch))) == 4
            return set(session.last.traffic.answered_by(100))

        before = answering(0)
        assert len(before) == pool.size == 2
        found.append(ADDRESSES[2])
        wait_for(lambda: pool.size == 3 and not pool._servers[-1].absent, 30, "the new address")
        found.remove(ADDRESSES[0])
        wait_for(lambda: pool.size == 2, 30, "the end of the old one")
        assert first.stop() == 0
        after = answering(1)
        assert len(after) == 2 and len(after & before) == 1 and session.retries == 0
