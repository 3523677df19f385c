"""Packs through the servers of a list: who is asked, in what order, who is left alone, and the store in the end."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.http_tools import ServedApplication, exchange, metric, served, until
from support.tiny_http import serving

from hapi.errors import BadRequestError, NotFoundError, UsageError
from hapi.repository.packs.place import pack_key, pack_of, pack_path
from hapi.server.providers import peers as peers_module
from hapi.server.providers import stores
from hapi.server.providers.peers import Peers
from hapi.server.providers.stores import ProvidedPacks, make_providers
from hapi.server.settings import ServerSettings
from hapi.store.base import ReadPart, Then, nothing
from hapi.store.http.ranges import HttpRanges
from hapi.store.open import open_store
from hapi.store.remote import RemoteStore
from hapi.wire.messages import PEER_HEADER
from hapi.wire.rendezvous import ranking
from hapi.wire.transport.http import HttpTransport

DATA = os.urandom(3_000_000)
PACKS = [hashlib.sha256(bytes([n])).hexdigest()[:32] for n in range(12)]


class Store(RemoteStore):
    """A store in memory that counts what is read of its packs."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.bytes = 0

    def read_many(self, parts: Sequence[ReadPart], then: Then = nothing) -> None:
        self.bytes += sum(part.out.nbytes for part in parts)
        super().read_many(parts, then)


@pytest.fixture
def store() -> Store:
    store = Store(f"memory://{uuid.uuid4().hex}")
    for pack in PACKS:
        store.put(pack_key(pack), DATA)
    return store


def read(packs: ProvidedPacks, pack: str, start: int = 10, length: int = 2_000_000) -> bytes:
    part = ReadPart(pack_key(pack), start, memoryview(bytearray(length)))
    told: list[int] = []
    packs.read_many([part], told.append)
    assert told == [0]
    return bytes(part.out)


@contextmanager
def reader_of(
    store: Store, urls: Sequence[str], own: str | None = None, replicas: int = 2, memory: int = 0
) -> Iterator[ProvidedPacks]:
    """What a server with this list reads packs through."""
    settings = ServerSettings(
        store=store.url,
        providers=tuple(urls),
        advertise=own,
        provider_replicas=replicas,
        provider_memory=memory,
    )
    providers = make_providers(settings, store, None)
    try:
        assert isinstance(providers.packs, ProvidedPacks)
        yield providers.packs
    finally:
        providers.close()


@pytest.fixture
def two(store: Store) -> Iterator[list[ServedApplication]]:
    """Two servers over the store, which know nothing of each other."""
    with ExitStack() as ends:
        yield [ends.enter_context(served(store.url)) for _ in range(2)]  # type: ignore[arg-type]


def url_of(server: ServedApplication) -> str:
    return f"http://127.0.0.1:{server.port}"


def asked(server: ServedApplication) -> float:
    """Requests for packs that a server has answered."""
    text = exchange(server.port, "GET", "/metrics").body.decode()
    lines = [
        line for line in text.splitlines() if line.startswith('hapi_requests_total{route="/v1/packs/{pack}"')
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_each_pack_comes_from_its_provider(store: Store, two: list[ServedApplication]) -> None:
    urls = [url_of(server) for server in two]
    by_url = dict(zip(urls, two, strict=True))
    with reader_of(store, urls) as packs:
        for pack in PACKS:
            first, second = (by_url[url] for url in ranking(urls, pack))
            before = asked(first), asked(second)
            assert read(packs, pack) == DATA[10:2_000_010]
            until(lambda: asked(first) == before[0] + 1, 20, "the count")  # noqa: B023 - over within the turn
            assert asked(second) == before[1]
        assert packs.counts() == {"peer": 12 * 2_000_000, "memory": 0, "store": 0}
    assert store.bytes == 0


def test_what_is_no_pack_comes_from_the_store(store: Store, two: list[ServedApplication]) -> None:
    store.put("models/a", DATA)
    key, told = "models/a", list[int]()
    with reader_of(store, [url_of(server) for server in two]) as packs:
        parts = [
            ReadPart(key, 0, memoryview(bytearray(1000))),
            ReadPart(pack_key(PACKS[0]), 0, memoryview(bytearray(1000))),
            ReadPart(key, 5, memoryview(bytearray(10))),
            ReadPart(pack_key(PACKS[1]), 7, memoryview(bytearray(0))),
        ]
        packs.read_many(parts, told.append)
        assert all(bytes(p.out) == DATA[p.start : p.start + p.out.nbytes] for p in parts)
        assert sorted(told) == [0, 1, 2, 3]
        assert store.bytes == 1010
        assert packs.get(key) == DATA and packs.size(key) == len(DATA)


def test_a_provider_asks_only_those_before_itself(store: Store, two: list[ServedApplication]) -> None:
    """The first of a pack reads it from the store, the second asks the first, one that provides nothing asks both."""
    urls = [url_of(server) for server in two]
    pack = PACKS[0]
    first, second = ranking(urls, pack)
    for own, from_store in ((first, True), (second, False), (None, False)):
        before = store.bytes
        with reader_of(store, urls, own) as packs:
            assert read(packs, pack) == DATA[10:2_000_010]
        assert (store.bytes > before) == from_store


def test_dead_providers_are_passed_over_and_left_alone(
    store: Store, two: list[ServedApplication], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = "http://127.0.0.1:9"  # discard: nobody listens
    urls = [url_of(two[0]), dead]
    pack = next(p for p in PACKS if ranking(urls, p)[0] == dead)
    now = [0.0]
    with reader_of(store, urls) as packs:
        monkeypatch.setattr(packs._peers, "_clock", lambda: now[0])
        assert read(packs, pack) == DATA[10:2_000_010]
        assert packs._peers.failures == 1
        assert read(packs, pack) == DATA[10:2_000_010]
        assert packs._peers.failures == 1  # not asked again so soon
        now[0] += peers_module.FIRST_PAUSE
        read(packs, pack)
        assert packs._peers.failures == 2
        now[0] += peers_module.FIRST_PAUSE
        read(packs, pack)
        assert packs._peers.failures == 2  # the second pause is longer
        assert store.bytes == 0


def test_without_any_provider_there_is_the_store(store: Store) -> None:
    with reader_of(store, ["http://127.0.0.1:9", "http://127.0.0.1:13"], replicas=2) as packs:
        assert read(packs, PACKS[0]) == DATA[10:2_000_010]
        assert store.bytes == 2_000_000
        assert packs.counts()["store"] == 2_000_000


def silent(connection: socket.socket, request: bytes) -> bool:
    """Never answer."""
    del connection, request
    time.sleep(1.5)
    return False


def other_bytes(connection: socket.socket, request: bytes) -> bool:
    """Answer well, with bytes that are not the pack's."""
    match = re.search(rb"bytes=(\d+)-(\d+)", request)
    if match is None:
        return False
    start, stop = int(match[1]), int(match[2]) + 1
    head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {stop - start}\r\n"
    head += f"Content-Range: bytes {start}-{stop - 1}/{len(DATA)}\r\n\r\n"
    connection.sendall(head.encode() + bytes(stop - start))
    return True


def test_a_hung_provider_times_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "SILENCE_SECONDS", 0.3)
    with serving(silent) as hung, reader_of(store, [hung.url]) as packs:
        assert read(packs, PACKS[0]) == DATA[10:2_000_010]
        assert read(packs, PACKS[0]) == DATA[10:2_000_010]
        assert packs._peers.failures == 1


HAS_NOT_GOT_IT = json.dumps(NotFoundError("no such pack").to_problem())


@pytest.mark.parametrize(
    ("status", "body"),
    [
        ("404 Not Found", HAS_NOT_GOT_IT),
        ("404 Not Found", ""),  # of something else than a hapi-server
        ("401 Unauthorized", ""),
        ("500 Internal", ""),
        ("429 Busy", ""),
        ("301 Moved", ""),
    ],
)
def test_a_provider_that_says_no_is_passed_over(store: Store, status: str, body: str) -> None:
    def no(connection: socket.socket, request: bytes) -> bool:
        del request
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        return True

    with serving(no) as refusing, reader_of(store, [refusing.url]) as packs:
        assert read(packs, PACKS[0]) == DATA[10:2_000_010]
        requests = len(refusing.requests)
        assert requests >= 1 and all(f"{PEER_HEADER}: 1".encode() in r for r in refusing.requests)
        read(packs, PACKS[0])
        # Only one that has not got it is asked again at once.
        assert (len(refusing.requests) > requests) == (body == HAS_NOT_GOT_IT)


def test_a_provider_that_sent_wrong_bytes_is_not_believed_again(store: Store) -> None:
    """The reader compares checksums; it says so, and reads once more."""
    with serving(other_bytes) as lying, reader_of(store, [lying.url]) as packs:
        key = pack_key(PACKS[0])
        assert read(packs, PACKS[0], 0, 1000) == bytes(1000)
        assert packs.distrust(key, 0, 1000)
        assert read(packs, PACKS[0], 0, 1000) == DATA[:1000]
        assert not packs.distrust(key, 0, 1000)  # now it is the store's own damage
        requests = len(lying.requests)
        assert read(packs, PACKS[1], 0, 1000) == DATA[:1000]
        assert len(lying.requests) == requests


def test_a_read_that_ends_well_later_forgives_nothing(store: Store) -> None:
    """Of two reads at once one finds wrong bytes: the other one's end does not make the server well."""
    left = threading.Event()

    def late(connection: socket.socket, request: bytes) -> bool:
        left.wait(240)
        return other_bytes(connection, request)

    with serving(late) as lying, reader_of(store, [lying.url]) as packs:
        reading = threading.Thread(target=read, args=(packs, PACKS[0]))
        reading.start()
        until(lambda: lying.requests, 20, "the request")
        packs._peers.leave(lying.url)
        left.set()
        reading.join(240)
        assert not packs._peers.to_ask(PACKS[1])


def test_what_a_server_provides_is_kept_and_given_to_others(store: Store) -> None:
    """Two servers of one list: the store is read once, whoever asks."""
    with ExitStack() as ends:
        port = ends.enter_context(served(store.url)).port  # type: ignore[arg-type]
        own = f"http://127.0.0.1:{port}"
        with reader_of(store, [own], own, memory=8 << 20) as packs:
            for _ in range(3):
                assert read(packs, PACKS[0]) == DATA[10:2_000_010]
            assert store.bytes == 2 << 20
            counts = packs.counts()
            assert (counts["store"], counts["memory"] > 0, counts["peer"]) == (2 << 20, True, 0)
            assert packs.distrust(pack_key(PACKS[0]), 0, 10)
            read(packs, PACKS[0])
            assert store.bytes == 4 << 20


def test_one_that_is_asked_asks_no_third(store: Store) -> None:
    """Each of two servers thinks that the other one provides everything: a request ends at the second."""
    asked_paths: list[bytes] = []

    def third(connection: socket.socket, request: bytes) -> bool:
        del connection
        asked_paths.append(request)
        return False

    with serving(third) as other, served(store.url, providers=(other.url,)) as middle:  # type: ignore[arg-type]
        path = pack_path(pack_key(PACKS[0]))
        answer = exchange(middle.port, "GET", path, headers={PEER_HEADER: "1", "Range": "bytes=5-9"})
        assert (answer.status, answer.body) == (206, DATA[5:10])
        assert not asked_paths
        answer = exchange(middle.port, "GET", path, headers={"Range": "bytes=5-9"})
        assert (answer.status, answer.body) == (206, DATA[5:10])
        assert asked_paths
        assert metric(middle.port, "hapi_provider_failures_total") == 1


def test_files_of_a_local_store_are_not_offered_past_the_providers(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put(pack_key(PACKS[0]), DATA)
    transport = HttpTransport("http://127.0.0.1:9")
    peers = Peers([("http://127.0.0.1:9", HttpRanges(transport, pack_path))], None, 1)
    packs = ProvidedPacks(stores.OwnPacks(store, peers, 0), peers)
    key = pack_key(PACKS[0])
    assert packs.open_file(key) is None
    assert read(packs, PACKS[0]) == DATA[10:2_000_010]
    descriptor = packs.open_file(key)
    assert descriptor is not None  # the other one is left alone now
    os.close(descriptor)
    peers.close()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"advertise": "http://a:1"}, "give the servers"),
        ({"advertise": "http://a:1", "providers": ("http://b:1",)}, "not one of --providers"),
        ({"providers": ("b:1",)}, "expected http://HOST:PORT"),
    ],
)
def test_wrong_lists_are_refused_at_the_start(store: Store, settings: dict[str, object], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        make_providers(ServerSettings(store=store.url, **settings), store, None)  # type: ignore[arg-type]


def test_addresses_of_packs() -> None:
    assert pack_of(pack_key(PACKS[0])) == PACKS[0]
    assert pack_path(pack_key(PACKS[0])) == f"/v1/packs/{PACKS[0]}"
    for key in ("repository/packs/x.safetensors", f"packs/{PACKS[0]}.safetensors", "models/a", PACKS[0]):
        assert pack_of(key) is None
    with pytest.raises(BadRequestError, match="is no key of a pack"):
        pack_path("models/a")
