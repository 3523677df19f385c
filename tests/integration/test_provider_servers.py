"""Three server processes over one store: packs come from their providers, also while one of them is killed."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.free_ports import free_port
from support.harness import ServerProcess, server
from support.http_tools import TENSORS, Known, exchange, make_store, metric, pushed_model

from hapi.models.tensors import tensor_bytes
from hapi.repository.opening import open_model
from hapi.repository.packs.place import pack_id, pack_key, pack_path
from hapi.store.base import ReadPart
from hapi.store.http.ranges import HttpRanges
from hapi.store.open import open_store
from hapi.wire.rendezvous import ranking
from hapi.wire.transport.http import HttpTransport

pytestmark = pytest.mark.slow

DATA = os.urandom(4 << 20)
PACKS = [hashlib.sha256(bytes([n])).hexdigest()[:32] for n in range(40)]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[dict[str, ServerProcess]]:
    """Three servers that know each other, by their URLs; their store has packs, and a pushed model."""
    store = open_store(str(make_store(tmp_path / "store")))
    for pack in PACKS:
        store.put(pack_key(pack), DATA)
    with ExitStack() as ends:
        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(3)]
        providers = [part for url in urls for part in ("--providers", url)]
        running = {}
        for url in urls:
            own = ["--advertise", url, "--provider-replicas", "1"]
            port_number = int(url.rpartition(":")[2])
            running[url] = ends.enter_context(
                server(tmp_path / "store", *providers, *own, port=port_number, log=tmp_path / "log")
            )
        yield running


def read(url: str, pack: str, start: int = 100, length: int = 2 << 20) -> None:
    """Read a range of a pack from a server, and compare it."""
    transport = HttpTransport(url, timeout=240)
    reader = HttpRanges(transport, pack_path)
    try:
        part = ReadPart(pack_key(pack), start, memoryview(bytearray(length)))
        reader.read_many([part])
        assert bytes(part.out) == DATA[start : start + length]
    finally:
        transport.close()
        reader.close()


def source_bytes(url: str, source: str) -> float:
    """Bytes of packs that a server has read from ``source``."""
    text = exchange(int(url.rpartition(":")[2]), "GET", "/metrics").body.decode()
    name = f'hapi_pack_bytes_total{{source="{source}"}}'
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_packs_come_from_their_providers(three: dict[str, ServerProcess]) -> None:
    urls = list(three)
    for pack in PACKS[:10]:
        provider = ranking(urls, pack)[0]
        other = next(url for url in urls if url != provider)
        for asked, from_peer in ((other, 2 << 20), (provider, 0)):
            before = source_bytes(asked, "peer")
            read(asked, pack)
            assert source_bytes(asked, "peer") - before == from_peer


def test_a_provider_is_killed_in_the_middle(three: dict[str, ServerProcess]) -> None:
    """Readers go on with right bytes, from the store, and with the provider's bytes again once it is back."""
    urls = list(three)
    asked = urls[0]
    victim = urls[1]
    theirs = [pack for pack in PACKS if ranking(urls, pack)[0] == victim]
    assert len(theirs) >= 3
    errors: list[BaseException] = []
    done, killed = 0, threading.Event()

    def readers() -> None:
        nonlocal done
        try:
            for turn in range(60):
                read(asked, theirs[turn % len(theirs)])
                done = turn
                if turn == 20:
                    killed.wait(240)
        except BaseException as error:
            errors.append(error)

    reading = [threading.Thread(target=readers) for _ in range(3)]
    for thread in reading:
        thread.start()
    while done < 10 and not errors:
        killed.wait(0.01)
    three[victim].kill()
    killed.set()
    for thread in reading:
        thread.join(240)
        assert not thread.is_alive()
    assert not errors, errors[0]
    port = int(asked.rpartition(":")[2])
    assert metric(port, "hapi_provider_failures_total") >= 1
    before = source_bytes(asked, "peer")
    again = three[victim].restarted()
    try:
        for _ in range(600):
            read(asked, theirs[0])
            if source_bytes(asked, "peer") > before:
                break
            killed.clear()
            killed.wait(0.1)
        else:
            raise AssertionError("the provider that came back is not asked")
    finally:
        again.kill()


def test_a_models_tensors_come_from_its_packs_providers(
    three: dict[str, ServerProcess], tmp_path: Path
) -> None:
    """Each server gives the same tensors; the bytes that it does not provide come from the one that does."""
    known = Known(tmp_path / "store")
    request = known.tensors()
    tensors = open_model(known.store, "pushed").manifest.tensors
    first_of = {ranking(list(three), pack_id(tensors[name].pack))[0] for name in request["names"]}
    expected = [tensor_bytes(pushed_model().tensors.get(name).detach()) for name in request["names"]]
    for url, process in three.items():
        answer = exchange(process.port, "POST", TENSORS, request)
        assert answer.status == 200 and all(bytes(data) in answer.body for data in expected)
        assert (source_bytes(url, "peer") > 0) == (first_of != {url})
    three[min(first_of)].kill()
    for url in three.keys() - {min(first_of)}:
        answer = exchange(three[url].port, "POST", TENSORS, request)
        assert answer.status == 200 and all(bytes(data) in answer.body for data in expected)
        assert metric(three[url].port, "hapi_provider_failures_total") >= 1
