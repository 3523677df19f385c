"""The pool of resident weights: one copy of each content, however many ask for it at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Iterator

import pytest
import torch
from support.threads import at_once

from hapi.server.device.weight_pool import WeightPool


def give(missing: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for key in missing:
        yield key, torch.full((10,), ord(key[0]), dtype=torch.uint8)


def sizes(keys: str) -> dict[str, int]:
    return dict.fromkeys(keys, 10)


def test_what_is_resident_is_not_loaded_again() -> None:
    pool, asked = WeightPool(), []

    def load(missing: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        asked.append("".join(missing))
        return give(missing)

    first, second = pool.take(sizes("abc"), load), pool.take(sizes("bcde"), load)
    assert asked == ["abc", "de"]
    assert first["b"] is second["b"] and second["e"][0] == ord("e")
    assert pool.resident_bytes == 50 and pool.loading_bytes == 0
    assert pool.release("abc") == 10
    assert pool.resident_bytes == 40
    assert pool.release("bcde") == 40
    assert pool.resident_bytes == 0


def test_nothing_stays_of_a_load_that_fails() -> None:
    pool = WeightPool()
    pool.take(sizes("a"), give)

    def fails(missing: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        assert pool.loading_bytes == 20
        yield "b", torch.zeros(10, dtype=torch.uint8)
        assert (pool.resident_bytes, pool.loading_bytes) == (20, 10)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        pool.take(sizes("abc"), fails)
    assert (pool.resident_bytes, pool.loading_bytes) == (10, 0)
    assert pool.release("a") == 10


@pytest.mark.parametrize("given", ["a", "abx", "aab"])
def test_a_loader_gives_what_it_was_asked_for(given: str) -> None:
    pool = WeightPool()
    with pytest.raises(KeyError):
        pool.take(sizes("ab"), lambda missing: give(given))
    assert (pool.resident_bytes, pool.loading_bytes) == (0, 0)


def test_a_load_under_way_is_waited_for_and_taken_over_when_it_fails() -> None:
    pool = WeightPool()
    begun, release = threading.Event(), threading.Event()
    outcome: list[str] = []

    def fails(missing: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from give("a")
        begun.set()
        release.wait(240)
        raise ValueError("no")

    def first() -> None:
        try:
            pool.take(sizes("ab"), fails)
        except ValueError:
            outcome.append("failed")

    asked: list[str] = []

    def load(missing: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        asked.append("".join(missing))
        return give(missing)

    one = threading.Thread(target=first)
    one.start()
    assert begun.wait(240)
    two = threading.Thread(target=lambda: pool.take(sizes("abc"), load))
    two.start()
    while asked != ["c"]:
        time.sleep(0.001)
    release.set()
    for thread in (one, two):
        thread.join(240)
        assert not thread.is_alive()
    assert outcome == ["failed"] and asked == ["c", "b"]
    assert pool.resident_bytes == 30 and pool.release("abc") == 30


def test_many_threads_load_each_content_once() -> None:
    pool = WeightPool()
    loaded: list[str] = []
    keys = "abcdefghijklmnop"

    def load(missing: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in give(missing):
            time.sleep(0.0005)
            loaded.append(key)
            yield key, tensor

    def work(seed: int) -> None:
        pool.take(sizes("".join(random.Random(seed).sample(keys, 9))), load)

    at_once(16, work)
    assert len(loaded) == len(set(loaded)) and set(loaded) <= set(keys)
    assert pool.resident_bytes == 10 * len(loaded)


def test_many_threads_with_loads_that_fail() -> None:
    pool = WeightPool()
    keys = "abcdefghijkl"

    def work(seed: int) -> None:
        dice = random.Random(seed)

        def load(missing: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
            for key, tensor in give(missing):
                if dice.random() < 0.2:
                    raise ValueError("no")
                yield key, tensor

        for _ in range(60):
            chosen = "".join(dice.sample(keys, 5))
            try:
                held = pool.take(sizes(chosen), load)
            except ValueError:
                continue
            assert all(held[key][0] == ord(key) for key in chosen)
            pool.release(held)

    at_once(8, work)
    assert (pool.resident_bytes, pool.loading_bytes) == (0, 0)
