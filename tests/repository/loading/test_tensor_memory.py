"""Memory of loads: used again, bounded when idle, given back, and of no harm across a fork."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.loading_tools import some_tensors, write_pack

from hapi.errors import HostMemoryError
from hapi.process.direct_io import HUGE_PAGE
from hapi.repository.loading import memory
from hapi.repository.loading.load import load
from hapi.repository.loading.memory import SMALL_BYTES, TensorMemory
from hapi.repository.loading.pool import LoadingPool, process_pool
from hapi.repository.loading.regions import PAGE, Region
from hapi.repository.loading.staging import STAGE_BYTES, StagingArea
from hapi.store.open import open_store

MB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@given(st.lists(st.tuples(st.integers(SMALL_BYTES, 3 * MB), st.integers(0, 5)), max_size=40))
def test_blocks_never_overlap(steps: list[tuple[int, int]]) -> None:
    pool = TensorMemory(4 * MB, 60)
    held: list[torch.Tensor] = []
    for number, (nbytes, drop) in enumerate(steps):
        held.append(pool.take(nbytes))
        held[-1][0] = held[-1][-1] = held[-1][nbytes // 2] = number % 251
        if drop < len(held) and drop:
            del held[drop]
        assert pool.idle_bytes <= 4 * MB
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in held)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
        assert all(t.data_ptr() % 64 == 0 and int(t[0]) == int(t[-1]) == int(t[len(t) // 2]) for t in held)
    del held
    gc.collect()
    pool.trim()
    assert pool.idle_bytes == pool.mapped_bytes == 0


def test_freed_neighbours_become_one_block() -> None:
    pool = TensorMemory(64 * MB, 60)
    held = [pool.take(8 * MB, 64 * MB) for _ in range(8)]
    places = [tensor.data_ptr() for tensor in held]
    for number in (3, 1, 2, 0, 6, 7, 5, 4):
        held[number] = torch.empty(0)
    whole = pool.take(64 * MB)
    assert whole.data_ptr() == min(places) and pool.mapped_bytes == 64 * MB


def test_a_view_keeps_its_block() -> None:
    pool = TensorMemory(64 * MB, 60)
    part = pool.take(MB).fill_(7).view(torch.float32).reshape(512, 512)[3:4]
    for _ in range(5):
        assert pool.take(MB).fill_(1).data_ptr() != part.data_ptr() - 3 * 2048
    assert bool((part.view(torch.uint8) == 7).all())


def test_idle_memory_beyond_the_budget_leaves_the_process() -> None:
    pool = TensorMemory(8 * MB, 60)
    before = resident_bytes()
    big = pool.take(200 * MB).fill_(1)
    assert resident_bytes() - before >= 190 * MB
    del big
    assert pool.idle_bytes == 8 * MB
    assert resident_bytes() - before <= 40 * MB
    again = pool.take(200 * MB)
    assert pool.mapped_bytes == 200 * MB and again.numel() == 200 * MB


@pytest.mark.parametrize("parts", [1, 4])
def test_a_load_that_is_larger_than_the_budget_has_the_memory_of_the_one_before(parts: int) -> None:
    pool = TensorMemory(8 * MB, 60)

    def load_all() -> list[torch.Tensor]:
        left, size = 200 * MB, 200 * MB // parts
        return [pool.take(size, left - number * size).fill_(1) for number in range(parts)]

    tensors = load_all()
    held, first = resident_bytes(), tensors[0].data_ptr()
    del tensors
    again = [pool.take(200 * MB // parts, 200 * MB - number * (200 * MB // parts)) for number in range(parts)]
    assert again[0].data_ptr() == first and resident_bytes() > held - 8 * MB
    del again
    assert pool.idle_bytes == 8 * MB and resident_bytes() < held - 150 * MB


def test_idle_memory_that_does_not_fit_goes_before_more_is_mapped() -> None:
    pool = TensorMemory(8 * MB, 60)
    held = [pool.take(90 * MB).fill_(1) for _ in range(2)]
    before = resident_bytes()
    del held
    large = pool.take(180 * MB)
    assert resident_bytes() < before - 150 * MB and large.numel() == 180 * MB


def test_idle_memory_goes_after_a_while_and_the_keeper_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "TEND_SECONDS", 0.01)
    pool = TensorMemory(64 * MB, 0.05)
    held = pool.take(MB)
    keeper = pool._keeper
    assert keeper is not None
    time.sleep(0.1)
    assert keeper.is_alive() and pool.mapped_bytes > 0
    del held
    keeper.join(240)
    assert not keeper.is_alive() and pool.mapped_bytes == 0
    assert pool.take(MB).numel() == MB  # and begins anew


def test_memory_that_is_filled_ahead_serves_the_first_load() -> None:
    pool = TensorMemory(64 * MB, 60)
    pool.fill(32 * MB)
    before = resident_bytes()
    block = pool.take(32 * MB).fill_(1)
    assert resident_bytes() - before < 4 * MB and block.numel() == 32 * MB
    pool.fill(1 << 50)  # no more than the budget
    assert pool.mapped_bytes <= 128 * MB


def test_memory_that_the_system_refuses_is_a_clear_error() -> None:
    with pytest.raises(HostMemoryError, match="load less at a time"):
        TensorMemory(0, 60).take(1 << 60)


def test_tensors_die_in_any_thread_at_any_time() -> None:
    pool = TensorMemory(32 * MB, 60)
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for number in range(200):
                cycle: list[object] = [pool.take(SMALL_BYTES + 1000 * (number % 37)).fill_(seed)]
                cycle.append(cycle)  # only the collector, in the middle of anything, frees it
                if number % 50 == 0:
                    gc.collect()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    gc.collect()
    assert not failures and pool.idle_bytes <= 32 * MB
    pool.trim()
    assert pool.mapped_bytes == 0


@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_has_memory_of_its_own() -> None:
    pool = TensorMemory(64 * MB, 60)
    mine = pool.take(MB).fill_(3)
    lock = pool._lock
    lock.acquire()  # as another thread of the parent may hold it
    child = os.fork()
    if child == 0:
        code = 1
        try:
            theirs = pool.take(MB).fill_(4)
            sound = int(mine[5]) == 3 and theirs.data_ptr() != mine.data_ptr()
            del mine
            other = pool.take(MB).fill_(5)
            code = 0 if sound and int(theirs[7]) == 4 and int(other[0]) == 5 else 2
        finally:
            os._exit(code)
    lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(mine[5]) == 3 and process_pool() is process_pool()


def test_a_region_gives_back_the_end_of_a_block_first() -> None:
    region = Region(2 * HUGE_PAGE)
    start = region.cut(0, HUGE_PAGE)
    region.view(start, HUGE_PAGE)[:] = 9
    region.put_back(start, start + HUGE_PAGE, 1.0)
    assert region.is_free and region.idle_bytes == HUGE_PAGE
    assert region.give_back(0.5, 0) == 0 and region.idle_bytes == HUGE_PAGE  # it is too young
    assert region.give_back(2.0, 10 * PAGE + 5) == 10 * PAGE == region.idle_bytes
    assert region.view(0, PAGE)[0] == 9 and region.view(20 * PAGE, PAGE)[0] == 0


def test_readers_wait_for_a_staging_buffer() -> None:
    area = StagingArea(2, pinned=False)
    order = []
    with area.buffer() as first, area.buffer() as second:
        assert first is not second and len(first.view) == STAGE_BYTES

        def third() -> None:
            with area.buffer() as found:
                order.append(found)

        waiting = threading.Thread(target=third)
        waiting.start()
        waiting.join(0.05)
        assert order == [] and waiting.is_alive()
    waiting.join(240)
    assert order and order[0] in (first, second)


@pytest.mark.slow
def test_a_model_larger_than_the_pool_loads(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    tensors = [*some_tensors(3), ("w", torch.randn(8 * MB))]
    entries = write_pack(store, tensors)
    pool = LoadingPool(idle_limit=MB, buffers=1)
    for _ in range(2):
        loaded = list(load(store, entries, pool=pool))
        assert all(torch.equal(got, t) for (_, got), (_, t) in zip(loaded, tensors, strict=True))
        del loaded
    assert pool.memory.idle_bytes <= MB


def test_a_pool_that_is_off_keeps_nothing(tmp_path: Path) -> None:
    store, pool = open_store(str(tmp_path)), LoadingPool(on=False)
    list(load(store, write_pack(store, some_tensors(5, most=100_000)), pool=pool))
    assert pool.memory.mapped_bytes == 0
