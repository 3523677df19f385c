"""``GET /v1/packs/ID`` over real sockets: bytes, ranges, limits; from files and from a remote store."""

from __future__ import annotations

import hashlib
import socket
import ssl
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.certificates import self_signed
from support.http_tools import (
    ServedApplication,
    check_problem,
    exchange,
    metric,
    raw,
    served,
    until,
)

from hapi.repository.packs.place import pack_key, pack_path
from hapi.server.packs import streams
from hapi.store.base import ReadPart
from hapi.store.http.ranges import HttpRanges
from hapi.store.open import open_store
from hapi.wire.transport.http import HttpTransport

DATA = bytes(range(256)) * 20_000 + b"end"  # 5 MB: several pieces
PACK = hashlib.sha256(DATA).hexdigest()[:32]
PATH = f"/v1/packs/{PACK}"


@pytest.fixture(scope="module", params=["local", "remote"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with a pack; ``memory:`` stands for all that are behind obstore."""
    folder = str(tmp_path_factory.mktemp("store"))
    url = folder if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    open_store(url).put(pack_key(PACK), DATA)
    return url


@pytest.fixture(scope="module")
def application(store: str) -> Iterator[ServedApplication]:
    with served(store) as running:  # type: ignore[arg-type]
        yield running


def get(application: ServedApplication, span: str | None = None, path: str = PATH, **headers: str) -> Any:
    given = {**({"Range": span} if span else {}), **{k.replace("_", "-"): v for k, v in headers.items()}}
    return exchange(application.port, "GET", path, headers=given)


def test_the_whole_pack(application: ServedApplication) -> None:
    answer = get(application)
    assert (answer.status, answer.body == DATA) == (200, True)
    assert answer.headers["ETag"] == f'"{PACK}"'
    assert "immutable" in answer.headers["Cache-Control"]
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert answer.headers["X-Request-Id"]
    assert "Content-Range" not in answer.headers


@pytest.mark.parametrize(
    ("span", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-70000", 100, 70_001),
        ("bytes=5000000-", 5_000_000, len(DATA)),
        ("bytes=-3", len(DATA) - 3, len(DATA)),
        ("bytes=1-4194304", 1, 4_194_305),
    ],
)
def test_ranges(application: ServedApplication, span: str, start: int, stop: int) -> None:
    answer = get(application, span)
    assert (answer.status, answer.body == DATA[start:stop]) == (206, True)
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"
    assert answer.headers["Content-Length"] == str(stop - start)


def test_a_range_beyond_the_end_tells_the_size(application: ServedApplication) -> None:
    answer = get(application, f"bytes={len(DATA)}-")
    check_problem(answer, 416, str(len(DATA)))
    assert answer.headers["Content-Range"] == f"bytes */{len(DATA)}"
    check_problem(get(application, "bytes=0-1,3-4"), 416, "several ranges")


def test_conditions(application: ServedApplication) -> None:
    etag = f'"{PACK}"'
    assert get(application, If_None_Match=etag).status == 304
    assert get(application, If_None_Match='"x"').status == 200
    assert get(application, "bytes=0-9", If_Range=etag).status == 206
    assert get(application, "bytes=0-9", If_Range='"x"').status == 200


def test_head_tells_the_size(application: ServedApplication) -> None:
    answer = exchange(application.port, "HEAD", PATH, headers={"Range": "bytes=0-1"})
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["Content-Length"] == str(len(DATA))


def test_the_connection_is_kept(application: ServedApplication) -> None:
    """Also after a range and a 416: the answer's length is known."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", application.port, timeout=240)
    for span in ("bytes=0-9", f"bytes={len(DATA)}-", "bytes=-5"):
        connection.request("GET", PATH, headers={"Range": span})
        response = connection.getresponse()
        response.read()
        assert not response.will_close
    connection.close()


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../secret",
        "%2e%2e%2fsecret",
        "a" * 65,
        "A" * 32,
        PACK[:-1] + "g",
        PACK + ".safetensors",
        "%00" * 16,
    ],
)
def test_only_ids_of_packs_are_looked_up(application: ServedApplication, name: str) -> None:
    head = f"GET /v1/packs/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = raw(application.port, head.encode())
    assert answer.split(b" ", 2)[1] in (b"400", b"404"), answer[:200]
    assert b"secret" not in answer.partition(b"\r\n\r\n")[2] or b"detail" in answer


def test_an_unknown_pack(application: ServedApplication, store: str) -> None:
    detail = check_problem(get(application, path=f"/v1/packs/{'0' * 32}"), 404)
    assert store not in detail


def test_other_methods_are_refused(application: ServedApplication) -> None:
    check_problem(exchange(application.port, "POST", PATH, {}), 405, "GET")


def test_bytes_are_counted(application: ServedApplication) -> None:
    before = metric(application.port, "hapi_sent_bytes_total")
    get(application, "bytes=0-99999")
    assert metric(application.port, "hapi_sent_bytes_total") - before == 100_000
    text = exchange(application.port, "GET", "/metrics").body.decode()
    assert 'hapi_requests_total{route="/v1/packs/{pack}",status="206"}' in text
    assert 'route="/v1/packs"' in text and PACK not in text


def test_it_needs_a_token(store: str) -> None:
    with served(store, token="sixteen-letters!") as guarded:  # type: ignore[arg-type]
        check_problem(exchange(guarded.port, "GET", PATH), 401)
        headers = {"Authorization": "Bearer sixteen-letters!"}
        assert exchange(guarded.port, "GET", PATH, headers=headers).body == DATA


def test_answers_have_a_limit_and_the_server_drains(store: str) -> None:
    with served(store, max_response_bytes=1_000_000) as small:  # type: ignore[arg-type]
        check_problem(exchange(small.port, "GET", PATH), 413, "ranges")
        assert exchange(small.port, "GET", PATH, headers={"Range": "bytes=0-9"}).body == DATA[:10]
        small.application.draining = True
        check_problem(exchange(small.port, "GET", PATH), 503, "shutting down")


def test_a_deadline_ends_the_wait(application: ServedApplication) -> None:
    """Every slot is taken by a reader that reads nothing; the next request does not wait for ever."""
    readers = []
    try:
        for _ in range(streams.STREAMS + 1):
            reader = socket.create_connection(("127.0.0.1", application.port), 20)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            readers.append(reader)
        packs = application.application.packs
        until(lambda: packs.running >= streams.STREAMS, 20, "all slots")
        answer = exchange(application.port, "GET", PATH, headers={"X-Deadline-Seconds": "0.2"})
        check_problem(answer, (504, 429))
        assert application.application.admission.running == 0  # other requests have their own slots
        answer = exchange(application.port, "GET", PATH, headers={"X-Hapi-Peer": "1", "Range": "bytes=1-9"})
        assert answer.body == DATA[1:10]  # and so do other servers, which clients might wait for
    finally:
        for reader in readers:
            reader.close()
    until(lambda: packs.running == 0, 20, "the end of readers that left")


def test_a_silent_reader_loses_its_slot(store: str) -> None:
    with served(store, send_timeout=0.5) as server:  # type: ignore[arg-type]
        with socket.create_connection(("127.0.0.1", server.port), 20) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            until(lambda: metric(server.port, "hapi_dropped_readers_total") == 1, 20, "the drop")
        until(lambda: server.application.packs.running == 0, 20, "the free slot")


@pytest.mark.slow_except("local")
def test_over_tls(store: str, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with served(store, tls=context) as server:  # type: ignore[arg-type]
        transport = HttpTransport(f"https://127.0.0.1:{server.port}", ca_file=str(certificate))
        reader = HttpRanges(transport, pack_path)
        part = ReadPart(pack_key(PACK), 3, memoryview(bytearray(len(DATA) - 3)))
        reader.read_many([part])
        assert bytes(part.out) == DATA[3:]
        transport.close()
        reader.close()


def test_the_reader_and_the_route_fit(application: ServedApplication) -> None:
    transport = HttpTransport(f"http://127.0.0.1:{application.port}")
    reader = HttpRanges(transport, pack_path)
    ranges = [(0, 1), (1, 3_000_000), (3_100_000, 0), (4_000_000, len(DATA) - 4_000_000)]
    parts = [ReadPart(pack_key(PACK), start, memoryview(bytearray(length))) for start, length in ranges]
    reader.read_many(parts)
    assert all(bytes(p.out) == DATA[p.start : p.start + p.out.nbytes] for p in parts)
    transport.close()
    reader.close()


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_pack_that_was_cut_short_and_repaired(kind: str, tmp_path: Path) -> None:
    """A running server gives what a repair has written again."""
    url = str(tmp_path) if kind == "local" else f"memory://{uuid.uuid4().hex}"
    store = open_store(url)
    store.put(pack_key(PACK), DATA[:1000])
    with served(url) as server:  # type: ignore[arg-type]
        assert get(server, "bytes=0-9").status == 206
        check_problem(get(server, "bytes=1000-1999"), 416, "1000")
        store.put(pack_key(PACK), DATA)
        answer = get(server, "bytes=900-1999")
        assert (answer.status, answer.body == DATA[900:2000]) == (206, True)
        assert answer.headers["Content-Range"] == f"bytes 900-1999/{len(DATA)}"


def test_a_file_that_became_shorter_breaks_off(tmp_path: Path) -> None:
    """The reader gets an error, never other bytes in place of those that are gone."""
    store = open_store(str(tmp_path))
    large = bytes(64 << 20)
    store.put(pack_key(PACK), large)
    with served(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), 20) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        until(lambda: server.application.packs.running == 1, 20, "the answer")
        first = reader.recv(65536)
        with (tmp_path / pack_key(PACK)).open("r+b") as file:
            file.truncate(1 << 20)
        got = len(first)
        with pytest.raises(ConnectionError):
            while True:
                data = reader.recv(1 << 20)
                assert b"urn:hapi" not in data
                if not data:
                    raise ConnectionResetError
                got += len(data)
        assert got < len(large)
