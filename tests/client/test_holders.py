"""Which server keeps which samples: the same one for every batch, epoch and job; and what becomes of crowded ones."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import PATIENCE

from hapi.arrays import IntArray
from hapi.client.transport.holders import FEWEST_ROWS, Holders
from hapi.client.transport.server_choice import CROWDED
from hapi.client.transport.server_pool import ServerPool
from hapi.wire.references import DatasetReference
from hapi.wire.rendezvous import ranking
from hapi.wire.transport.base import Transport
from hapi.wire.transport.http import LoopbackTransport

DATASET = DatasetReference(name="flowers", version="0" * 64)
URLS = [f"http://10.0.0.{n}:8099" for n in range(1, 4)]


def of_servers(urls: list[str], ids: IntArray, *, count: int = 10_000, most: int = 128) -> dict[int, str]:
    """Server of each sample that a batch asks for, by its id."""
    found: dict[int, str] = {}
    for held in Holders(lambda: urls, count, 64).divided(DATASET, ids, most):
        for sample in ids[held.rows]:
            found[int(sample)] = ranking(urls, held.content)[0]
    return found


@given(
    st.integers(1, 9), st.integers(1, 400), st.integers(1, 300), st.integers(300, 30_000), st.integers(0, 99)
)
def test_every_row_is_asked_for_once_in_requests_that_servers_keep(
    servers: int, rows: int, most: int, count: int, seed: int
) -> None:
    urls = [f"http://10.0.0.{n}:8099" for n in range(servers)]
    ids = np.random.default_rng(seed).integers(0, count, rows)
    found = Holders(lambda: urls, count, 64).divided(DATASET, ids, most)
    assert sorted(np.concatenate([held.rows for held in found])) == list(range(rows))
    assert all((np.diff(held.rows) > 0).all() and len(held.rows) <= most for held in found)
    assert [int(held.rows[0]) for held in found] == sorted(int(held.rows[0]) for held in found)
    smallest = min(len(held.rows) for held in found)
    assert smallest >= min(rows, most, FEWEST_ROWS) // (2 if most < 2 * FEWEST_ROWS else 1)


def test_a_sample_has_one_server_whatever_the_batch_and_the_job() -> None:
    random = np.random.default_rng(0)
    known: dict[int, str] = {}
    shares: Counter[str] = Counter()
    for _ in range(60):  # epochs and jobs in orders of their own
        for sample, server in of_servers(URLS, random.permutation(10_000)[:128]).items():
            assert known.setdefault(sample, server) == server
            shares[server] += 1
    assert max(shares.values()) < 1.25 * min(shares.values()), "nearly even"


def test_a_server_that_leaves_moves_its_own_samples_alone() -> None:
    ids = np.arange(10_000)
    before, after = of_servers(URLS, ids, most=10_000), of_servers(URLS[:2], ids, most=10_000)
    assert {before[s] for s in before if before[s] != after[s]} == {URLS[2]}
    names = list(URLS)
    holders = Holders(lambda: names, 10_000, 64)
    assert len(holders.divided(DATASET, ids[:5000:8], 1000)) == 3
    del names[2]
    assert len(holders.divided(DATASET, ids[:5000:8], 1000)) == 2, "it sees that one has left"


def test_few_rows_go_together() -> None:
    """Ten for each of three servers would be kept by none of them."""
    (held,) = Holders(lambda: URLS, 10_000, 64).divided(DATASET, np.arange(0, 30 * 300, 300), 128)
    assert len(held.rows) == 30


@pytest.mark.slow
def test_neighbours_have_one_server() -> None:
    """Of a large dataset as many as the store is read in at a time."""
    found = of_servers(URLS, np.arange(0, 1 << 20, 4), count=1 << 20, most=1 << 20)
    assert all(found[sample] == found[sample // 64 * 64] for sample in found)


# -- the choice --------------------------------------------------------------------------------------------------------


def pool_of(urls: list[str]) -> ServerPool:
    def never(method: str, path: str, body: bytes) -> None:
        raise AssertionError("the tests' attempts ask no server")

    return ServerPool([LoopbackTransport(never, url) for url in urls], retry_timeout=240)  # type: ignore[arg-type]


@pytest.mark.parametrize(("under_way", "places"), [(2, [0, 0]), (4, [0, 0, 0, 1])])
def test_the_holder_is_asked_unless_it_is_crowded(under_way: int, places: list[int]) -> None:
    """With as many requests there that it would take three times as long as an idle server, the next in the ranking."""
    pool, asked, all_in = pool_of(URLS), list[str](), threading.Barrier(under_way + 1)

    def attempt(transport: Transport) -> None:
        asked.append(transport.url)
        all_in.wait(PATIENCE)

    threads = []
    for number in range(under_way):
        threads.append(threading.Thread(target=pool.run, args=(attempt,), kwargs={"held": "block"}))
        threads[-1].start()
        while len(asked) <= number:
            threads[-1].join(0.01)
    all_in.wait(PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
    order = ranking(URLS, "block")
    assert CROWDED == 3.0
    assert asked == [order[place] for place in places]


def test_a_holder_that_is_away_is_not_asked() -> None:
    pool = pool_of(URLS)
    order = ranking(URLS, "block")
    pool.leave(order[0])
    assert pool.run(lambda transport: transport.url, held="block") == order[1]
