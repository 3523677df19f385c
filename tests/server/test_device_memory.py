"""The ledger of a device's memory: nobody gets more than there is, and nobody waits for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapi.errors import BadRequestError, DeviceMemoryError
from hapi.server.batching.forward_memory import ForwardMemory
from hapi.server.batching.policies import Weights
from hapi.server.device.memory_budget import DeviceMemory, MemoryRequest
from hapi.waiting import Interest

UNIT = 512


class Cache:
    """Weights as a model cache keeps them, by key; counts the most that was ever there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sizes: dict[str, int] = {}
        self.users: dict[str, int] = {}
        self.evicted: list[str] = []

    @property
    def prefix_bytes(self) -> int:
        with self.lock:
            return sum(self.sizes.values())

    def in_use(self, also: Collection[str] = ()) -> tuple[int, frozenset[str]]:
        with self.lock:
            keys = frozenset(k for k in self.sizes if self.users.get(k) or k in also)
            return sum(self.sizes[k] for k in keys), keys

    def evict(self, nbytes: int, also: Collection[str] = ()) -> int:
        freed = 0
        with self.lock:
            for key in list(self.sizes):
                if freed < nbytes and not self.users.get(key) and key not in also:
                    freed += self.sizes.pop(key)
                    self.evicted.append(key)
        return freed

    def use(self, weights: Weights) -> None:
        with self.lock:
            self.sizes[weights.key] = weights.nbytes
            self.users[weights.key] = self.users.get(weights.key, 0) + 1

    def leave(self, weights: Weights) -> None:
        with self.lock:
            self.users[weights.key] -= 1


def ask(
    samples: int = 16, each: int = UNIT, key: str = "m", nbytes: int = 0, low: int = 1, high: int = 16
) -> MemoryRequest:
    return MemoryRequest(
        key=(key, 1, (3,)),
        samples=samples,
        forward=ForwardMemory(layers=((0, each),)),
        weights=(Weights(key=key, nbytes=nbytes),),
        smallest=low,
        largest=high,
    )


def test_a_free_device_gives_the_largest_batch() -> None:
    memory = DeviceMemory(100 * UNIT, "adaptive", Cache())
    with memory.reserve(ask(), Interest()) as claim:
        assert claim.batch == 16 and memory.held_bytes == 16 * UNIT == memory.used_bytes
    assert memory.held_bytes == 0 and memory.waiting == 0


def test_a_small_budget_gives_a_smaller_batch() -> None:
    memory = DeviceMemory(10 * UNIT, "adaptive", Cache())
    with memory.reserve(ask(nbytes=3 * UNIT), Interest()) as claim:
        assert claim.batch == 7 and memory.used_bytes == 10 * UNIT


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    memory = DeviceMemory(10 * UNIT, "adaptive", Cache())
    with pytest.raises(
        DeviceMemoryError, match=rf"{11 * UNIT} bytes for one sample.*{10 * UNIT} of weights.*{10 * UNIT}"
    ):
        memory.reserve(ask(nbytes=10 * UNIT), Interest()).__enter__()
    assert memory.waiting == 0


def test_who_does_not_fit_now_waits_for_its_turn() -> None:
    memory = DeviceMemory(20 * UNIT, "fixed", Cache())
    first = memory.reserve(ask(low=16), Interest())
    first.__enter__()
    order: list[int] = []
    with ThreadPoolExecutor(3) as pool:
        for number in range(3):

            def work(number: int = number) -> None:
                with memory.reserve(ask(low=16), Interest()) as claim:
                    order.append(number)
                    assert claim.batch == 16

            pool.submit(work)
            wait_until(lambda expected=number + 1: memory.waiting == expected)
        assert not order
        first.__exit__(None, None, None)
    assert order == [0, 1, 2]


def wait_until(condition: object, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_client_that_goes_away_leaves_the_line() -> None:
    memory = DeviceMemory(20 * UNIT, "fixed", Cache())
    gone = Interest()
    with memory.reserve(ask(low=16), Interest()), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: memory.reserve(ask(low=16), gone).__enter__())
        wait_until(lambda: memory.waiting == 1)
        gone.set()
        with pytest.raises(BadRequestError, match="went away"):
            waiting.result(240)
    assert memory.waiting == 0 and memory.held_bytes == 0


@pytest.mark.parametrize("keys", [("old", "new"), ("new", "old")])
def test_idle_weights_go_when_the_room_is_needed_and_not_before(keys: tuple[str, str]) -> None:
    """Whichever of them would go first."""
    cache = Cache()
    memory = DeviceMemory(20 * UNIT, "fixed", cache)
    for key in keys:
        weights = Weights(key=key, nbytes=8 * UNIT)
        cache.use(weights)
        cache.leave(weights)
    with memory.reserve(ask(key="new", nbytes=8 * UNIT, samples=4, low=4, high=4), Interest()):
        assert cache.evicted == [] and memory.used_bytes == 20 * UNIT
    with memory.reserve(ask(key="new", nbytes=8 * UNIT, samples=8, low=8, high=8), Interest()):
        assert cache.evicted == ["old"], "not those that are about to be used"
        assert memory.used_bytes == 16 * UNIT


def test_shared_weights_count_once() -> None:
    memory = DeviceMemory(20 * UNIT, "adaptive", Cache())
    one = ask(nbytes=10 * UNIT, samples=4)
    with memory.reserve(one, Interest()), memory.reserve(one, Interest()) as second:
        assert second.batch == 4 and memory.used_bytes == 18 * UNIT
    assert memory.used_bytes == 0


def test_out_of_memory_lowers_the_next_batch() -> None:
    memory = DeviceMemory(100 * UNIT, "adaptive", Cache())
    one = ask()
    assert memory.out_of_memory(one.key, 16) == 8
    with memory.reserve(one, Interest()) as claim:
        assert claim.batch == 8


def test_peaks_that_were_seen_correct_the_prediction() -> None:
    memory = DeviceMemory(100 * UNIT, "fixed", Cache())
    one = ask(low=16)
    with memory.reserve(one, Interest()):
        memory.passed(one.key, 16, 0.1, 3 * 16 * UNIT)
    with memory.reserve(one, Interest()) as claim:
        assert claim.held_bytes == 3 * 16 * UNIT
    assert memory.report().under == 1
    memory.passed(("unknown", 1, (1,)), 4, 0.1, 1)  # of a request that was forgotten meanwhile
    memory.passed(one.key, 16, 0.1, None)


def test_auto_looks_for_the_flat_part_and_stays_there() -> None:
    memory = DeviceMemory(10**6 * UNIT, "auto", Cache())
    seconds = {16: 0.010, 32: 0.006, 64: 0.0052, 128: 0.00515}
    given = []
    for _ in range(30):
        with memory.reserve(ask(samples=128, low=1, high=1000), Interest()) as claim:
            given.append(claim.batch)
            for _ in range(128 // claim.batch):
                memory.passed(("m", 1, (3,)), claim.batch, claim.batch * seconds[claim.batch], None)
    assert set(given) == {16, 32, 64, 128} and set(given[-10:]) == {64}, "the smallest within 2% of the best"


def test_auto_gives_way_when_memory_is_short() -> None:
    memory = DeviceMemory(70 * UNIT, "auto", Cache())
    for batch in (16, 32, 64):
        for _ in range(8):
            memory.passed(("m", 1, (3,)), batch, batch * (0.01 if batch < 64 else 0.009), None)
    one = ask(samples=64, low=1, high=64)
    with memory.reserve(one, Interest()) as first:
        assert first.batch == 64
        with memory.reserve(ask(samples=4, low=1, high=64), Interest()) as second:
            assert second.batch == 4


@settings(max_examples=15)
@given(
    st.sampled_from(["fixed", "adaptive", "auto"]),
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 4), st.sampled_from("abc"), st.integers(1, 16)),
        min_size=4,
        max_size=40,
    ),
    st.integers(0, 2**32),
)
def test_never_beyond_the_budget_and_everybody_gets_through(
    policy: str, asked: list[tuple[int, int, str, int]], seed: int
) -> None:
    sizes = {"a": 0, "b": 3 * UNIT, "c": 9 * UNIT}
    cache, budget = Cache(), 16 * UNIT
    memory = DeviceMemory(budget, policy, cache)
    pauses = random.Random(seed)
    over: list[int] = []

    def work(item: tuple[int, int, str, int]) -> int:
        samples, units, key, high = item
        one = ask(samples, units * UNIT, key, sizes[key], 1, high)
        with memory.reserve(one, Interest()) as claim:
            cache.use(one.weights[0])
            memory.loaded(claim)
            if memory.used_bytes > budget:
                over.append(memory.used_bytes)
            time.sleep(pauses.random() * 0.002)
            cache.leave(one.weights[0])
        return claim.batch

    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(work, asked, timeout=240))
    assert not over
    assert all(1 <= batch <= min(item[0], item[3]) for batch, item in zip(batches, asked, strict=True))
    assert memory.held_bytes == 0 and memory.waiting == 0
