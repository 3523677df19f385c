"""The model cache: loads once, keeps within its budget, never drops what is in use, frees what nobody holds."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.front_tools import Sizes, made_front
from support.front_tools import use as use_front
from support.threads import at_once

from hapi.server.device import model_cache
from hapi.server.device.model_cache import FrozenPrefix, ModelCache


def use(cache: ModelCache, key: str, nbytes: int = 10) -> FrozenPrefix:
    return use_front(cache, key, {key: nbytes})


def test_loads_once() -> None:
    cache = ModelCache(100)
    assert use(cache, "a") is use(cache, "a")
    assert (cache.hits, cache.misses, cache.resident_bytes) == (1, 1, 10)


def test_least_recently_used_goes_first() -> None:
    cache = ModelCache(25)
    first = use(cache, "a")
    use(cache, "b")
    use(cache, "a")
    use(cache, "c")
    assert cache.resident_bytes == 20
    assert use(cache, "a") is first
    assert cache.misses == 3
    use(cache, "b")
    assert cache.misses == 4


def test_in_use_is_never_dropped() -> None:
    cache = ModelCache(15)
    with cache.prefix("a", lambda: made_front(cache, {"a": 10})) as held:
        use(cache, "b")
        use(cache, "c")
        assert use(cache, "a") is held
    assert cache.resident_bytes <= 15


def test_without_reuse_nothing_stays() -> None:
    cache = ModelCache(100, reuse=False)
    assert use(cache, "a") is not use(cache, "a")
    assert cache.resident_bytes == 0


def test_concurrent_requests_load_once() -> None:
    cache = ModelCache(100)
    loads = []

    def load() -> FrozenPrefix:
        loads.append(1)
        time.sleep(0.05)
        return made_front(cache, {"a": 10})

    def request() -> None:
        with cache.prefix("a", load):
            pass

    at_once(8, lambda _: request())
    assert len(loads) == 1


def test_a_failed_load_is_tried_again() -> None:
    cache = ModelCache(100)

    def fails() -> FrozenPrefix:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), cache.prefix("a", fails):
        pass
    assert use(cache, "a").nbytes == 10


def test_idle_fronts_can_be_dropped_at_once() -> None:
    cache = ModelCache(100)
    use(cache, "idle")
    with cache.prefix("busy", lambda: made_front(cache, {"busy": 20})) as held:
        assert cache.drop_idle() == 10
        assert cache.drop_idle() == 0
        assert use(cache, "busy") is held
    assert cache.resident_bytes == 20


def test_least_recent_first_until_enough_is_free() -> None:
    cache = ModelCache(1000)
    for key in "abcd":
        use(cache, key)
    use(cache, "a")
    assert cache.evict(11) == 20
    assert cache.evict(0) == 0
    assert cache.resident_bytes == 20
    use(cache, "a")
    assert cache.misses == 4
    assert cache.evict(1000) == 20


def test_what_another_front_holds_is_not_freed() -> None:
    cache = ModelCache(1000)
    use_front(cache, "one", {"shared": 100, "x": 1})
    with cache.prefix("two", lambda: made_front(cache, {"shared": 100, "y": 2})) as two:
        assert (cache.resident_bytes, two.nbytes) == (103, 102)
        assert cache.evict(50) == 1
        assert cache.resident_bytes == 102
    assert cache.drop_idle() == 102


def test_many_fronts_over_the_same_weights_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "MAX_PREFIXES", 3)
    cache = ModelCache(1000)
    for number in range(10):
        use_front(cache, str(number), {"same": 5})
    assert (cache.resident_bytes, cache.misses) == (5, 10)
    for number in (7, 8, 9):
        use_front(cache, str(number), {"same": 5})
    assert (cache.hits, cache.misses) == (3, 10)


def identified(cache: ModelCache, sizes: Sizes, identity: str) -> FrozenPrefix:
    front = made_front(cache, sizes)
    front.identity = identity
    return front


def test_who_is_in_use_is_told_with_what_it_shares_counted_once() -> None:
    cache = ModelCache(1000)
    one, two = {"shared": 100, "x": 20}, {"shared": 100, "y": 10}
    with cache.prefix("1", lambda: identified(cache, one, "a")):
        with cache.prefix("2", lambda: identified(cache, two, "b")):
            assert cache.in_use() == (130, {"a", "b"}) and cache.prefix_bytes == 130
        assert cache.in_use() == (120, {"a"}) and cache.in_use({"b", "c"}) == (130, {"a", "b"})
        assert cache.has("b") and not cache.has("c")
        assert cache.evict(1000, also={"b"}) == 0, "one is used, the other is wanted"
        assert cache.evict(1000) == 10 and cache.prefix_bytes == 120
    assert cache.in_use() == (0, frozenset()) and cache.prefix_bytes == 120


def test_many_threads_with_loads_that_fail_and_no_room() -> None:
    """Each use loads and drops: a front that was loaded twice at once would be held for ever."""
    cache = ModelCache(0)

    def work(seed: int) -> None:
        dice = random.Random(seed)

        def fails(key: str) -> None:
            time.sleep(0.0002)
            if dice.random() < 0.3:
                raise ValueError("no")

        for _ in range(100):
            which = dice.choice(["ab", "bc", "abc"])
            try:
                with cache.prefix(which, lambda w=which: made_front(cache, dict.fromkeys(w, 7), fails)):  # type: ignore[misc]
                    pass
            except ValueError:
                pass

    at_once(8, work)
    assert (cache.resident_bytes, cache.loading_bytes, len(cache._loading)) == (0, 0, 0)


FRONTS = st.lists(st.sets(st.integers(0, 7), max_size=5), min_size=1, max_size=6)
STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "evict", "drop", "fail"]), st.integers(0, 40)), max_size=60
)


@pytest.mark.slow
@settings(max_examples=300)
@given(FRONTS, STEPS, st.integers(0, 60))
def test_any_sequence(fronts: list[set[int]], steps: list[tuple[str, int]], budget: int) -> None:
    """Against the definition: resident is what is in a front that the cache has, each tensor once."""
    sizes: list[Sizes] = [{str(t): 3 * t + 1 for t in tensors} for tensors in fronts]
    cache = ModelCache(budget)
    in_use: list[tuple[int, ExitStack]] = []

    def fails(key: str) -> None:
        raise ValueError(key)

    for step, number in steps:
        which = number % len(sizes)
        before = cache.resident_bytes
        if step == "begin":
            stack = ExitStack()
            stack.enter_context(cache.prefix(str(which), lambda w=which: made_front(cache, sizes[w])))
            in_use.append((which, stack))
        elif step == "end" and in_use:
            in_use.pop(number % len(in_use))[1].close()
            busy = _bytes(sizes, {w for w, _ in in_use})
            assert cache.resident_bytes <= max(budget, busy)
        elif step == "evict":
            freed = cache.evict(number)
            assert freed == before - cache.resident_bytes
            assert freed >= number or cache.resident_bytes == _bytes(sizes, {w for w, _ in in_use})
        elif step == "drop":
            assert cache.drop_idle() == before - cache.resident_bytes
            assert cache.resident_bytes == _bytes(sizes, {w for w, _ in in_use})
        elif step == "fail" and str(which) not in cache._prefixes:
            misses = cache.misses
            try:
                with cache.prefix(str(which), lambda w=which: made_front(cache, sizes[w], fails)):
                    pass
            except ValueError:
                assert (cache.resident_bytes, cache.misses) == (before, misses)
        assert cache.resident_bytes == _bytes(sizes, {int(key) for key in cache._prefixes})
        assert {str(w) for w, _ in in_use} <= set(cache._prefixes)
        assert cache.loading_bytes == 0
    for _, stack in in_use:
        stack.close()
    assert cache.resident_bytes <= budget
    cache.drop_idle()
    assert cache.resident_bytes == 0


def _bytes(sizes: list[Sizes], fronts: set[int]) -> int:
    held: Sizes = {}
    for which in fronts:
        held |= sizes[which]
    return sum(held.values())
