"""The model cache: loads once, keeps within its budget, never drops what is in use."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from hapi.server.model_cache import Front, ModelCache


def front(nbytes: int) -> Front:
    return Front(nn.Identity(), (1,), torch.float32, nbytes)  # type: ignore[arg-type]


def use(cache: ModelCache, key: str, nbytes: int = 10) -> Front:
    with cache.front(key, lambda: front(nbytes)) as found:
        return found


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
    with cache.front("a", lambda: front(10)) as held:
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

    def load() -> Front:
        loads.append(1)
        time.sleep(0.05)
        return front(10)

    def request() -> None:
        with cache.front("a", load):
            pass

    threads = [threading.Thread(target=request) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(loads) == 1


def test_a_failed_load_is_tried_again() -> None:
    cache = ModelCache(100)

    def fails() -> Front:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), cache.front("a", fails):
        pass
    assert use(cache, "a").nbytes == 10


def test_idle_fronts_can_be_dropped_at_once() -> None:
    cache = ModelCache(100)
    use(cache, "idle")
    with cache.front("busy", lambda: front(20)) as held:
        assert cache.drop_idle() == 10
        assert cache.drop_idle() == 0
        assert use(cache, "busy") is held
    assert cache.resident_bytes == 20
