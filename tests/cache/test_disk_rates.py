"""Rates of the cache's disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.feature_tools import COUNT, KEY, OTHER, content, features_at, found, labels, put

from hapi.cache import disk_rates
from hapi.cache import folder as folder_module
from hapi.cache.disk_rates import DiskRates, RateMeter, measure_disk
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.cache.writing.put_rates import PutRates
from hapi.wire.labels import SINGLE


def test_a_rate_is_that_of_the_last_stretch() -> None:
    meter = RateMeter()
    assert meter.rate is None
    for _ in range(100):
        meter.add(1 << 20, 0.001)
    assert meter.rate == pytest.approx((1 << 20) / 0.001)
    for _ in range(70):  # its fast part is full
        meter.add(1 << 20, 0.05)
    assert meter.rate == pytest.approx((1 << 20) / 0.05)
    meter.add(0, 1.0)  # a wait for what was written
    assert meter.rate == pytest.approx(64 * (1 << 20) / (64 * 0.05 + 1.0))


def test_the_time_of_reads_that_wait_for_each_other_counts_once() -> None:
    """Four threads read 1 MB each from a disk of 1 MB/s: each waits for those before it, up to four seconds."""
    now = [10.0]
    meter = RateMeter(lambda: now[0])
    for _ in range(4):
        meter.begin()
    for _ in range(4):
        now[0] += 1.0
        meter.end(1_000_000)
    assert meter.rate == pytest.approx(1e6)
    now[0] += 100.0  # none is under way
    meter.begin()
    now[0] += 1.0
    meter.end(0)  # one that failed
    assert meter.rate == pytest.approx(4e6 / 5)


def test_a_cache_measures_while_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with features_at(tmp_path) as cache:
        assert cache.rates() == DiskRates(None, None)
        write = os.pwritev

        def slow(*arguments: object) -> int:
            time.sleep(0.05)
            return write(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "pwritev", slow)
        put(cache, range(COUNT))
        rates = cache.rates()
        assert rates.write is not None and rates.write <= COUNT * 32 / 0.05 and rates.read is None
        for _ in range(50):
            found(cache)
        assert cache.rates().read is not None


def test_a_folder_is_probed_once_for_all_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = []

    def probe(path: Path) -> DiskRates:
        probed.append(path)
        return DiskRates(5.0, 3.0)

    monkeypatch.setattr(folder_module, "measure_disk", probe)
    folder = CacheFolder.open(tmp_path, 1 << 20)
    with FeatureCache(folder, KEY, COUNT, SINGLE) as one, FeatureCache(folder, OTHER, COUNT, SINGLE) as two:
        assert one.probed_rates() == two.probed_rates() == DiskRates(5.0, 3.0)
        assert one.rates() == DiskRates(None, None) and probed == [tmp_path]
        put(one, range(COUNT))
        one.flush()
        rates = one.probed_rates()
        assert rates.read == 5.0 and rates.write == one.rates().write != 3.0, "what is used tells more"


def test_the_rate_of_writing_is_that_of_whole_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of one, what the page cache took at once says nothing of the disk."""
    waits: list[int] = []

    def slow(descriptor: int) -> None:
        time.sleep(0.02)
        waits.append(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(disk_rates, "STRETCH_BYTES", 128)
    with features_at(tmp_path, budget=16 * 500) as cache:
        for sample in range(COUNT):
            put(cache, [sample])
            rate = cache.rates().write
            assert not waits or (rate is not None and rate <= 500 / 0.02)
    assert len(waits) > 5


def test_waits_and_the_work_between_them_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's wait for a segment is 20 ms; all else of a put is the writer's work."""
    waits: list[float] = []

    def slow(descriptor: int) -> None:
        began = time.monotonic()
        time.sleep(0.02)
        waits.append(time.monotonic() - began)

    monkeypatch.setattr(os, "fsync", slow)
    with features_at(tmp_path, budget=16 * 500) as cache:
        assert cache.writer_pace() == (0.0, 0.0)
        began = time.monotonic()
        for sample in range(COUNT):
            put(cache, [sample])
        seconds = time.monotonic() - began
        work, wait = cache.writer_pace()
    kept = COUNT * KEY.sample_bytes
    assert wait * kept >= 0.9 * sum(waits), "no more bytes than were kept"
    assert 0 < work * kept <= seconds - sum(waits) + 0.001


def test_the_writers_pace_counts_the_way_to_its_thread(tmp_path: Path) -> None:
    """A put of what was offered a second ago took that second, unless the put before it did."""
    with features_at(tmp_path) as cache:
        ids = np.arange(8)
        cache.put(ids, content(ids), labels(ids), None, time.monotonic() - 1.0)
        first = cache._putting._seconds
        assert 1.0 <= first < 60
        cache.put(ids + 8, content(ids + 8), labels(ids + 8), None, time.monotonic() - 3600.0)
        assert cache._putting._seconds - first < 3600, "the put before it had the writer for most of that"


def test_what_the_disk_was_not_at_work_for_tells_nothing_of_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache takes all at once; then the probe's rate counts."""
    monkeypatch.setattr(folder_module, "measure_disk", lambda path: DiskRates(5.0, 3.0))
    monkeypatch.setattr(disk_rates, "STRETCH_BYTES", 128)
    with features_at(tmp_path, budget=16 * 500) as cache:
        assert cache.disk_backlog() == (None, 0.0)
        cache.probed_rates()
        assert cache.disk_backlog().rate == 3.0
        monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(0.05))
        for sample in range(COUNT):
            put(cache, [sample])
        rate = cache.disk_backlog().rate
        assert rate is not None and rate != 3.0 and rate <= 500 / 0.05


def test_bytes_on_their_way_to_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = PutRates(behind=True)
    assert rates.on_its_way(1.0) == 0
    rates.put(1000, time.monotonic())
    assert 0 <= rates.on_its_way(1e9) <= 1000 and rates.on_its_way(1e-9) == pytest.approx(1000)
    rates.close()
    rates.put(500, time.monotonic())
    assert rates.on_its_way(1e-9) == pytest.approx(1500)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    rates.wait(-1, 0)
    assert rates.on_its_way(1e-9) == 0


def test_the_probe_measures_and_leaves_nothing(tmp_path: Path) -> None:
    rates = measure_disk(tmp_path / "not" / "there", 1 << 20)
    assert rates.read is not None and rates.write is not None and min(rates.read, rates.write) > 0
    assert not list(tmp_path.iterdir())


class ProbedDisk:
    """A disk with a clock: what is waited for takes its time, and so does what is synchronized."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
        self.now, self.pieces, self._seconds, self.synchronizing = 0.0, 0, seconds, 0.0
        monkeypatch.setattr(disk_rates.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(disk_rates, "wait_written", self.wait)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def wait(self, descriptor: int, start: int, count: int) -> None:
        self.now += self._seconds(self.pieces)
        self.pieces += 1

    def fsync(self, descriptor: int) -> None:
        self.now += self.synchronizing


def test_the_probe_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = ProbedDisk(monkeypatch, lambda piece: 0.04)
    assert measure_disk(tmp_path).write == pytest.approx((1 << 20) / 0.04)
    assert disk.pieces <= disk_rates.WRITE_SECONDS / 0.04 + disk_rates._AHEAD + 1
    disk = ProbedDisk(monkeypatch, lambda piece: 1.0)
    assert measure_disk(tmp_path).write == pytest.approx(1 << 20) and disk.pieces <= 2, "a slow one at once"
    disk = ProbedDisk(monkeypatch, lambda piece: 1e-4)
    measure_disk(tmp_path)
    assert disk.pieces == disk_rates.PROBE_BYTES >> 20


def test_what_a_disk_takes_at_once_first_is_not_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ProbedDisk(monkeypatch, lambda piece: 0.001 if piece < 4 else 0.05)
    assert measure_disk(tmp_path).write == pytest.approx((1 << 20) / 0.05)


def test_a_probe_that_stood_still_before_its_last_piece_counts_as_a_whole() -> None:
    """On a busy machine one piece may take nearly all of the time, and the next one less than a clock can tell."""
    pieces = [(0, 0.0), (1 << 20, 0.3), (2 << 20, 0.3 + 5e-5)]
    assert disk_rates._steady_rate(pieces) == pytest.approx((2 << 20) / 0.3, rel=1e-3)


def test_a_system_that_waits_for_nothing_is_synchronized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ProbedDisk(monkeypatch, lambda piece: 1e-6)
    disk.synchronizing = 2.0
    assert measure_disk(tmp_path).write == pytest.approx(disk_rates.PROBE_BYTES / 2.0, rel=1e-3)


def test_a_disk_that_keeps_up_is_no_slower_than_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe beside other work may find any disk slow; what was kept at once says otherwise."""
    monkeypatch.setattr(folder_module, "measure_disk", lambda path: DiskRates(5.0, 3.0))
    monkeypatch.setattr(disk_rates, "STRETCH_BYTES", 128)
    now = [0.0]
    monkeypatch.setattr("hapi.cache.writing.put_rates.time.monotonic", lambda: now[0])
    rates = PutRates(behind=True)
    monkeypatch.setattr(os, "fsync", lambda descriptor: now.__setitem__(0, now[0] + 0.1))
    for _ in range(3):
        began, now[0] = now[0], now[0] + 1.0
        rates.put(500, began)
        rates.wait(-1, 0)
    assert rates.at_work.rate is None and rates.at_least.rate == pytest.approx(500 / 1.1)
    with features_at(tmp_path, budget=16 * 500) as cache:
        cache.probed_rates()
        cache.puts.at_least.add(500, 1.1)
        assert cache.disk_backlog().rate == pytest.approx(500 / 1.1)


def test_a_probe_that_cannot_write_knows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert measure_disk(tmp_path) == DiskRates(None, None)
