"""Which server a client asks: a content's provider, the next of its ranking, or the least busy one."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from hapi.client.transport.server_pool import ServerPool
from hapi.errors import TransportError
from hapi.wire.rendezvous import ranking
from hapi.wire.transport.base import Transport
from hapi.wire.transport.http import LoopbackTransport

URLS = [f"http://10.0.0.{n}:8099" for n in range(1, 6)]


def pool_of(urls: list[str] = URLS) -> ServerPool:
    def never(method: str, path: str, body: bytes) -> Any:
        raise AssertionError("the tests' attempts ask no server")

    return ServerPool([LoopbackTransport(never, url) for url in urls], retry_timeout=240)


def url_of(transport: Transport) -> str:
    return transport.url


def test_a_contents_provider_is_asked() -> None:
    pool = pool_of()
    for number in range(50):
        content = f"model-{number}"
        assert pool.run(url_of, provider_of=content) == ranking(URLS, content)[0]
        assert pool.run(url_of, resident=content) == ranking(URLS, content)[0]


def test_lists_in_another_order_and_spelling_agree() -> None:
    pool = pool_of([url.replace("http://", "HTTP://") + "/" for url in reversed(URLS)])
    for number in range(20):
        found = pool.run(url_of, provider_of=f"model-{number}")
        assert found.rstrip("/").lower() == ranking(URLS, f"model-{number}")[0]


def test_fail_over_is_in_the_order_of_the_ranking() -> None:
    pool, asked = pool_of(), list[str]()

    def attempt(transport: Transport) -> str:
        asked.append(transport.url)
        if len(asked) < 5:
            raise TransportError("away")
        return transport.url

    pool.run(attempt, provider_of="m")
    assert asked == ranking(URLS, "m")


@pytest.mark.parametrize("kind", ["provider_of", "resident"])
def test_a_busy_provider_keeps_tensors_and_gives_features_away(kind: str) -> None:
    """Four requests at a time: tensors all go to the provider, features to as many servers."""
    pool, found, all_in = pool_of(), list[str](), threading.Barrier(4)

    def attempt(transport: Transport) -> None:
        all_in.wait(240)
        found.append(transport.url)

    threads = [threading.Thread(target=pool.run, args=(attempt,), kwargs={kind: "m"}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    order = ranking(URLS, "m")
    assert sorted(found) == sorted([order[0]] * 4 if kind == "provider_of" else order[:4])


def test_without_a_content_the_first_free_server_is_asked() -> None:
    pool = pool_of()
    assert Counter(pool.run(url_of) for _ in range(5)) == {URLS[0]: 5}
