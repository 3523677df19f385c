"""A name with several addresses is several servers, which come and go; one with a single address is as it is."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.certificates import self_signed
from support.tiny_http import answer, serving, tls_server

from hapi.client.transport.addresses import ServerAddresses, resolve
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import BadRequestError, NotFoundError, UsageError
from hapi.wire.transport.base import Transport
from hapi.wire.transport.http import HttpTransport, LoopbackTransport

NAME = "http://store:8099"


class Names:
    """A resolver that says what a test wants."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked = 0

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        assert (host, port) == ("store", 8099)
        return list(self.addresses)


def transport_of(url: str, address: str | None) -> Transport:
    return LoopbackTransport(lambda *_: (200, {}, iter([b"{}"])), url if address is None else address)


def followed(names: Names, url: str = NAME, hurried: float = 0.002, seconds: float = 0.002) -> ServerPool:
    """A pool whose servers are those of ``url``, by ``names``."""
    made = ServerAddresses([url], transport_of, names, seconds=seconds, hurried=hurried)
    pool = ServerPool(made.transports, check=made.failed)
    made.follow(pool)
    return pool


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_several_addresses_are_several_servers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hapi.client"):
        pool = followed(Names("10.0.0.1", "10.0.0.2", "10.0.0.3"), seconds=60)
    assert pool.urls == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert caplog.messages == [f"{NAME}: 3 servers, 10.0.0.1, 10.0.0.2, 10.0.0.3"]
    pool.close()


def test_a_url_that_is_written_twice_is_one_server() -> None:
    urls = [NAME, f"{NAME}/", "http://STORE:8099", "http://store:8098"]
    assert len(ServerAddresses(urls, transport_of, lambda *_: []).transports) == 2


@pytest.mark.parametrize("addresses", [["10.0.0.1"], []], ids=["one", "none"])
def test_one_address_stays_the_name(addresses: list[str]) -> None:
    pool = followed(names := Names(*addresses))
    until(lambda: names.asked > 3)
    assert pool.urls == [NAME]
    pool.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_what_needs_no_look_up_has_none(host: str) -> None:
    pool = followed(names := Names("10.0.0.1", "10.0.0.2"), f"http://{host}:8099")
    assert (pool.size, names.asked) == (1, 0)
    pool.close()


def test_addresses_come_and_go() -> None:
    """A rolling restart; and names that are gone for a while, which changes nothing."""
    pool = followed(names := Names("10.0.0.1", "10.0.0.2"))
    for addresses in (["10.0.0.2", "10.0.0.3"], [], ["10.0.0.4"], ["10.0.0.4", "10.0.0.5"]):
        before, names.addresses, names.asked = sorted(pool.urls), addresses, 0
        until(lambda: names.asked > 2)
        assert sorted(pool.urls) == (addresses or before)
    pool.close()


def test_a_name_that_gets_more_addresses_is_followed() -> None:
    pool = followed(names := Names("10.0.0.1"))
    names.addresses.append("10.0.0.2")
    until(lambda: sorted(pool.urls) == ["10.0.0.1", "10.0.0.2"])
    pool.close()


def test_a_server_of_two_names_is_one_and_stays_while_a_name_has_it() -> None:
    found = {"a": ["10.0.0.1", "10.0.0.2"], "b": ["10.0.0.2", "10.0.0.3"]}
    asked = list[str]()

    def names(host: str, port: int) -> list[str]:
        asked.append(host)
        return list(found[host])

    made = ServerAddresses(
        ["http://a:8099", "http://b:8099"], transport_of, names, seconds=0.002, hurried=0.002
    )
    pool = ServerPool(made.transports)
    made.follow(pool)
    assert pool.urls == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    for changed, left in (
        ({"a": ["10.0.0.1", "10.0.0.4"]}, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]),
        ({"b": ["10.0.0.4", "10.0.0.3"]}, ["10.0.0.1", "10.0.0.3", "10.0.0.4"]),
        ({"a": ["10.0.0.1", "10.0.0.3"]}, ["10.0.0.1", "10.0.0.3", "10.0.0.4"]),
    ):
        found |= changed
        asked.clear()
        until(lambda: asked.count("b") > 2)
        assert sorted(pool.urls) == left
    pool.close()


def test_a_server_that_leaves_finishes_its_requests() -> None:
    pool = followed(names := Names("10.0.0.1", "10.0.0.2"))

    def attempt(transport: Transport) -> str:
        names.addresses = [a for a in ("10.0.0.1", "10.0.0.2", "10.0.0.3") if a != transport.url]
        until(lambda: transport.url not in pool.urls)
        transport.call("GET", "/v1")
        return transport.url

    assert pool.run(attempt) not in pool.urls and pool.retries == 0
    pool.close()


def test_after_a_failure_it_is_looked_up_soon() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    made = ServerAddresses([NAME], transport_of, names, seconds=3600, hurried=0.002)
    pool = ServerPool(made.transports, check=made.failed)
    made.follow(pool)
    time.sleep(0.05)
    assert names.asked == 1
    made.failed()
    until(lambda: names.asked == 2)
    pool.close()


def found(*addresses: tuple[int, str]) -> Callable[..., list[tuple[object, ...]]]:
    return lambda *_, **__: [(family, 1, 6, "", (address, 80)) for family, address in addresses]


def test_a_machine_with_both_kinds_of_address_is_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    v4, v6 = socket.AF_INET, socket.AF_INET6
    for given, expected in (
        ([(v6, "::1"), (v4, "127.0.0.1")], 1),
        ([(v6, "fd::1"), (v6, "fd::2"), (v4, "10.0.0.1"), (v4, "10.0.0.2"), (v4, "10.0.0.2")], 2),
    ):
        monkeypatch.setattr(socket, "getaddrinfo", found(*given))
        assert len(resolve("store", 80)) == expected


def test_a_name_that_is_not_known_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert resolve("store", 80) == []


# -- lists of fleets -----------------------------------------------------------------------------------------------


class Listed:
    """A fleet's list that says what a test wants; nothing: it does not answer."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.asked = 0

    def __call__(self, address: str) -> list[str]:
        self.asked += 1
        assert address == "http://head:8000"
        if not self.urls:
            raise NotFoundError("no server takes work")
        return list(self.urls)


def at_list(listed: Listed) -> ServerPool:
    made = ServerAddresses(
        ["fleet+http://head:8000"], transport_of, listed=listed, seconds=0.002, hurried=0.002
    )
    pool = ServerPool(made.transports, check=made.failed)
    made.follow(pool)
    return pool


def test_servers_of_a_list_come_and_go() -> None:
    """Also a list that does not answer for a while, which changes nothing."""
    first, second, third = (f"http://10.0.0.{n}:8099" for n in (1, 2, 3))
    pool = at_list(listed := Listed(first, second, first))
    assert pool.urls == [first, second]
    listed.urls = [second, third]
    until(lambda: pool.urls == [second, third])
    listed.urls, before = [], listed.asked
    until(lambda: listed.asked > before + 2)
    assert pool.urls == [second, third]
    listed.urls = [first]
    until(lambda: pool.urls == [first])
    pool.close()


def test_a_server_that_cannot_join_keeps_no_other_out(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (f"http://10.0.0.{n}:8099" for n in (1, 2))

    def make(url: str, address: str | None) -> Transport:
        if url == "http://wrong":
            raise UsageError("--ca-file goes with https")
        return transport_of(url, address)

    made = ServerAddresses(
        ["fleet+http://head:8000"], make, listed=(listed := Listed(first)), seconds=0.002, hurried=0.002
    )
    pool = ServerPool(made.transports, check=made.failed)
    made.follow(pool)
    listed.urls = ["http://wrong", second]
    until(lambda: pool.urls == [second])
    assert "http://wrong cannot join: --ca-file goes with https" in caplog.text
    pool.close()


def test_a_list_that_is_not_there_is_told_at_the_start() -> None:
    with pytest.raises(NotFoundError, match="no server takes work"):
        at_list(Listed())
    with (
        serving(answer(b'{"store": 1}')) as other,
        pytest.raises(BadRequestError, match="no list of servers"),
    ):
        ServerAddresses([f"fleet+{other.url}"], transport_of)
    with pytest.raises(UsageError, match="expected http"):
        ServerAddresses(["fleet+head"], transport_of)


# -- what the server sees ------------------------------------------------------------------------------------------


def test_the_host_stays_the_name() -> None:
    with serving(answer(b"{}")) as server:
        port = server.url.rsplit(":", 1)[1]
        transport = HttpTransport(f"http://store.invalid:{port}/base/", address="127.0.0.1")
        assert transport.url == f"http://127.0.0.1:{port}/base"
        assert transport.call("GET", "/v1") == {}
        assert f"Host: store.invalid:{port}".encode() in server.requests[0]
        transport.close()


@pytest.mark.slow
def test_the_certificate_is_checked_for_the_name(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "DNS:store.invalid")
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    with serving(answer(b"{}"), tls_server(both)) as server:
        port = server.url.rsplit(":", 1)[1]
        good = HttpTransport(f"https://store.invalid:{port}", ca_file=str(certificate), address="127.0.0.1")
        assert good.call("GET", "/v1") == {}
        other = HttpTransport(f"https://other.invalid:{port}", ca_file=str(certificate), address="127.0.0.1")
        with pytest.raises(UsageError, match=r"for another name than 'other\.invalid'"):
            other.call("GET", "/v1")
