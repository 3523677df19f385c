"""Rendezvous hashing: each side finds the same servers, evenly, and few contents move when the list changes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import UsageError
from hapi.wire.rendezvous import ranking
from hapi.wire.transport.urls import canonical_url

SERVERS = [f"http://10.0.0.{n}:8099" for n in range(1, 11)]
servers_lists = st.lists(st.sampled_from(SERVERS), min_size=1, max_size=10, unique=True)
contents = st.text(max_size=40)


@given(servers_lists, contents, st.randoms(use_true_random=False))
def test_the_order_of_the_list_and_repetitions_mean_nothing(
    servers: list[str], content: str, mixer: random.Random
) -> None:
    mixed = [*servers, servers[0]]
    mixer.shuffle(mixed)
    assert ranking(mixed, content) == ranking(servers, content)
    assert sorted(ranking(servers, content)) == sorted(servers)


@given(servers_lists.filter(lambda servers: len(servers) > 1), contents, st.data())
def test_a_server_that_leaves_takes_only_its_own_place(
    servers: list[str], content: str, data: st.DataObject
) -> None:
    """The others keep their order: contents of one that is gone go to the next of their ranking, and no other moves."""
    gone = data.draw(st.sampled_from(servers))
    left = [server for server in servers if server != gone]
    assert ranking(left, content) == [server for server in ranking(servers, content) if server != gone]


def test_a_server_that_joins_takes_its_share_from_all() -> None:
    before, after = SERVERS[:9], SERVERS
    moved: Counter[str] = Counter()
    count = 20_000
    for number in range(count):
        old, new = ranking(before, f"pack {number}")[0], ranking(after, f"pack {number}")[0]
        if old != new:
            assert new == SERVERS[9]
            moved[old] += 1
    # A binomial of 20,000 at a tenth has a deviation of 42, one of its ninths of 15: six of them are never seen.
    assert abs(moved.total() - count / 10) < 6 * 42
    assert all(abs(moved[server] - count / 90) < 6 * 15 for server in before)


@pytest.mark.parametrize("place", [0, 1, 9])
def test_load_is_even_at_every_place_of_the_ranking(place: int) -> None:
    count = 20_000
    found = Counter(ranking(SERVERS, f"{number:032x}")[place] for number in range(count))
    assert all(abs(found[server] - count / 10) < 6 * 42 for server in SERVERS)


def test_contents_with_one_first_server_have_different_second_ones() -> None:
    """What a dead server had is spread over all others."""
    rankings = [ranking(SERVERS, f"model-{number}") for number in range(10_000)]
    seconds = Counter(order[1] for order in rankings if order[0] == SERVERS[0])
    assert min(seconds[server] for server in SERVERS[1:]) > seconds.total() / 9 * 0.6


def test_it_is_the_same_in_another_process_and_for_ever() -> None:
    """Servers of different versions must agree: these are written down."""
    expected = [ranking(SERVERS[:4], content) for content in ("a", "b", "digits@1")]
    code = (
        "from hapi.wire.rendezvous import ranking\n"
        f"print([ranking({SERVERS[:4]!r}, c) for c in ('a', 'b', 'digits@1')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == repr(expected)
    assert [[server[14:-5] for server in order] for order in expected] == [
        ["3", "2", "1", "4"],
        ["4", "2", "3", "1"],
        ["1", "2", "3", "4"],
    ]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://Server", "http://server:80"),
        ("http://server:80/", "http://server:80"),
        ("HTTPS://server/hapi/", "https://server:443/hapi"),
        ("http://[::1]:8099", "http://[::1]:8099"),
    ],
)
def test_urls_are_written_in_one_way(url: str, expected: str) -> None:
    assert canonical_url(url) == canonical_url(expected) == expected


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(UsageError, match="expected http://HOST:PORT"):
        canonical_url("server:8099")
