"""Rates of a cache's puts beside those of its disk, on a clock of their own."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

import pytest
from support.feature_tools import COUNT, features_at, put

from hapi.cache import records
from hapi.cache.writing import put_rates
from hapi.cache.writing.put_rates import PutRates


class Disk:
    """A clock, and a disk that is at work on what was put."""

    def __init__(self, rates: PutRates) -> None:
        self.now, self.rates, self.sync = 100.0, rates, 0.0

    def put(self, nbytes: int, seconds: float = 0.0) -> None:
        began, self.now = self.now, self.now + seconds
        self.rates.put(nbytes, began)

    def fsync(self, descriptor: int) -> None:
        self.now += self.sync

    def wait(self, seconds: float) -> None:
        self.sync = seconds
        self.rates.wait(-1, 0)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk(PutRates(behind=True))
    monkeypatch.setattr(put_rates.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(os, "fsync", found.fsync)
    return found


def test_a_disk_that_is_waited_for_was_at_work_all_the_time(disk: Disk) -> None:
    """It writes while the writer encodes: 400 bytes in 1 s of work and 3 s of waiting are 100 a second."""
    disk.put(200, 0.25)
    disk.now += 0.5
    disk.put(200, 0.25)
    disk.wait(3.0)
    assert disk.rates.rate == pytest.approx(100) and disk.rates.waits.rate == pytest.approx(400 / 3)
    assert disk.rates.waited_seconds == pytest.approx(3.0)


def test_a_disk_that_had_time_to_spare_is_not_slower_than_what_came(disk: Disk) -> None:
    disk.put(400, 0.5)
    disk.now += 10.0
    disk.wait(0.5)
    assert disk.rates.rate == pytest.approx(400 / 1.0) and disk.rates.waits.rate == pytest.approx(400 / 0.5)


def test_what_was_closed_before_it_was_full_counts_where_the_disk_was_still_at_work_on_it(disk: Disk) -> None:
    disk.put(100)
    disk.wait(1.0)
    disk.put(200)
    disk.rates.close()
    disk.put(100)
    disk.rates.close()
    disk.now += 1.0
    disk.put(100)
    disk.wait(3.0)  # 400 bytes in 4 s, where this segment alone would be 100 in 3
    assert disk.rates.rate == pytest.approx((100 + 100) / (1.0 + 1.0))


def test_a_long_pause_does_not_make_the_disk_slower(disk: Disk) -> None:
    disk.put(200)
    disk.rates.close()
    disk.now += 1000.0
    disk.put(100)
    disk.wait(1.0)
    assert disk.rates.waits.rate == pytest.approx(100)


def test_a_hurried_put_waits_no_longer(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[int, int]] = []

    def wait(descriptor: int, start: int, count: int) -> None:
        waited.append((start, count))
        if len(waited) == 2:
            hurried.enter_context(disk.rates.hurried())

    monkeypatch.setattr(put_rates, "wait_written", wait)
    disk.put(100)
    with contextlib.ExitStack() as hurried:
        disk.rates.wait(-1, 20 << 20)
        assert waited == [(0, 4 << 20), (4 << 20, 4 << 20)] and disk.rates.waits.rate is None
    disk.rates.close()
    disk.put(100)
    disk.wait(2.0)
    assert disk.rates.rate == pytest.approx(200 / 2.0), "both were on their way"


def test_a_put_may_not_go_on_where_too_much_is_on_its_way(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[bool] = []
    monkeypatch.setattr(put_rates, "wait_written", lambda *_: waits.append(disk.rates.waits_now))
    disk.put(1000)
    disk.rates.close()
    disk.put(100)
    with disk.rates.hurried(999):
        disk.rates.wait(-1, 20)
    assert waits == [True] and not disk.rates.waits_now


def test_a_write_that_the_kernel_holds_up_is_a_wait(disk: Disk) -> None:
    """The page cache takes no more than the disk writes: 400 bytes in 4 s, nearly all of them inside of writes."""
    for seconds in (0.05, 3.65):
        with disk.rates.writing(200):
            disk.now += seconds
            assert disk.rates.held_up_seconds == pytest.approx(max(0.0, seconds - 0.1), abs=1e-3)
        disk.rates.put(200, disk.now - seconds)
    assert disk.rates.waited_seconds == disk.rates.held_up_seconds == pytest.approx(3.55, abs=1e-3)
    disk.wait(0.3)
    assert disk.rates.at_work.rate == pytest.approx(400 / 4)
    assert disk.rates.held_up_seconds == pytest.approx(3.85, abs=1e-3)
    disk.put(100, 1.0)
    disk.wait(0.3)  # which is less than half of this segment's time
    assert disk.rates.at_work.rate == pytest.approx(400 / 4)


def test_a_cache_behind_hands_its_bytes_to_the_disk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(records, "begin_writing", lambda _, start, count: begun.append((start, count)))
    with features_at(tmp_path) as cache:
        for sample in range(COUNT):
            put(cache, [sample])
    assert begun[0][0] == 0 and len(begun) == COUNT
    assert all(start == before + count for (before, count), (start, _) in itertools.pairwise(begun))
