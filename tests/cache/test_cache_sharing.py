"""A sample cache that several threads and processes use at a time, and that some of them leave by a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_tools import (
    COUNT,
    cache_at,
    crash,
    files,
    found,
    samples_of,
    size,
)
from support.threads import at_once


def test_threads_that_put_and_get(tmp_path: Path) -> None:
    with cache_at(tmp_path / "cache", budget=200_000) as cache:

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(30):
                ids = random.choice(COUNT, 20, replace=False).tolist()
                here = found(cache, ids)
                cache.put(samples_of(ids))
                assert found(cache, ids) >= here

        at_once(4, work)
        assert found(cache, range(COUNT)) == set(range(COUNT))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 1), st.lists(st.integers(0, 60), min_size=1, max_size=12)),
        st.tuples(st.just("get"), st.integers(0, 1), st.lists(st.integers(0, 60), max_size=12)),
        st.tuples(st.sampled_from(["flush", "crash", "close"]), st.integers(0, 1), st.just([])),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=30)
@given(STEPS, st.sampled_from([3_000, 9_000, 1 << 20]))
def test_any_steps_of_two_processes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, list[int]]], budget: int
) -> None:
    """What was ever put may be there. What one has put must be: for it at once, for others when it flushes or dies."""
    path = tmp_path_factory.mktemp("model") / "cache"
    caches = [cache_at(path, budget=budget) for _ in range(2)]
    ever: set[int] = set()
    sealed: set[int] = set()
    own: list[set[int]] = [set(), set()]
    for step, who, ids in steps:
        cache = caches[who]
        if step == "put":
            here = found(cache, range(61))
            cache.put(samples_of(ids))
            ever |= set(ids)
            own[who] |= found(cache, range(61)) - here
            assert found(cache, range(61)) - here <= set(ids)
            if budget == 1 << 20:
                assert found(cache, ids) == set(ids)
        elif step == "get":
            assert (sealed | own[who]) & set(ids) <= found(cache, ids) <= ever
        else:
            if step == "crash":
                crash(cache)
            else:
                cache.flush() if step == "flush" else cache.close()
            sealed |= own[who]
            own[who] = set()
            if step != "flush":
                caches[who] = cache_at(path, budget=budget)
        assert size(path) <= budget
        assert found(caches[who], range(61)) >= sealed
    for cache in caches:
        cache.close()
    with cache_at(path, budget=budget) as last:
        assert found(last, range(61)) >= sealed


_WRITER = """
import sys
from pathlib import Path
from support import cache_tools as t
cache = t.cache_at(Path(sys.argv[1]), budget=int(sys.argv[2]))
print("ready", flush=True)
import numpy as np
random = np.random.default_rng(int(sys.argv[3]))
while True:
    ids = random.choice(t.COUNT, 8, replace=False).tolist()
    t.found(cache, ids)
    cache.put(t.samples_of(ids))
    if random.random() < 0.2:
        cache.flush()
"""


@pytest.mark.slow
def test_processes_killed_while_they_write(tmp_path: Path) -> None:
    """Whatever moment the kill comes at, what is there then is right, within the budget, and nothing is left over."""
    path, budget = tmp_path / "cache", 60_000
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[1]), str(Path(__file__).parent), *sys.path]
        ),
    }
    for turn in range(6):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(path), str(budget), str(2 * turn + n)],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for n in range(2)
        ]  # fmt: skip
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        time.sleep(0.02 * (1 + turn))
        for writer in writers:
            writer.kill()
            _, errors = writer.communicate()
            assert errors == "" and writer.returncode == -9
        assert size(path) <= budget
        with cache_at(path, budget=budget) as cache:
            before = found(cache, range(COUNT))
            cache.put(samples_of(range(COUNT)))
            cache.flush()
            assert found(cache, range(COUNT)) >= before
            assert not files(path, "open-")
            assert size(path) <= budget
    assert len(before) > COUNT // 4
