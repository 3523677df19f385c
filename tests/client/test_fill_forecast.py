"""Forecasts of a cache's filling: by the disk, by the training, over several epochs, and as a run's report has them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from hapi.arrays import IntArray
from hapi.cache.disk_rates import WriterPace
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.fill_forecast import FillForecast, FillState, _epoch, seconds_left

MB = 1_000_000
STATE = FillState(
    wanted=400 * MB, waiting=0, coming=400 * MB, coming_seconds=8.0, epoch_seconds=8.0, batch=MB, line=64 << 20,
    pace=WriterPace(0.0, 0.0), segment=64 * MB, in_segment=0, behind=0.0,
)  # fmt: skip


def test_a_disk_that_never_waits_fills_with_the_epoch() -> None:
    assert seconds_left(STATE) == pytest.approx(8.0)
    assert seconds_left(replace(STATE, pace=WriterPace(0.0, 1 / (500.0 * MB)))) == pytest.approx(8.0)
    assert seconds_left(replace(STATE, wanted=200 * MB)) == pytest.approx(4.0)  # the budget ends it


def test_a_slow_disk_takes_its_time() -> None:
    """The writer waits for each 64 MB, which the disk begins with as they come, but not at the end of an epoch."""
    slow = replace(STATE, coming_seconds=20.0, wanted=800 * MB, coming=800 * MB, line=1 << 40)
    slow = replace(slow, pace=WriterPace(0.0, 1 / (20.0 * MB)))
    assert seconds_left(replace(slow, wanted=400 * MB)) == pytest.approx(6 * 64 / 20)
    assert seconds_left(replace(slow, wanted=400 * MB, behind=0.5)) == pytest.approx(6 * 64 / 20 + 0.5)
    assert seconds_left(slow) == pytest.approx(20.0)


def test_an_epoch_begins_behind_what_the_one_before_has_left_to_the_disk() -> None:
    state = replace(
        STATE, wanted=96 * MB, coming=48 * MB, coming_seconds=1.0, epoch_seconds=1.0, segment=40 * MB,
        pace=WriterPace(0.0, 1 / (16.0 * MB)),
    )  # fmt: skip
    kept, seconds, behind = _epoch(state)
    assert (kept, seconds, behind) == pytest.approx((48 * MB, 1.0, 48 / 16 - 1.0))
    assert _epoch(replace(state, behind=behind)) == pytest.approx((48 * MB, 1.0, 96 / 16 - 2.0))
    kept, _, _ = _epoch(replace(state, behind=10.0))
    assert kept == pytest.approx(40 * MB), "too much is on its way"


def test_a_writer_that_works_slower_than_features_come_takes_its_time() -> None:
    """Encoding takes 20 ns a byte: 8 s for all, where they come in 2 s; without room in the line they come again."""
    slow = replace(STATE, coming_seconds=2.0, epoch_seconds=2.0, pace=WriterPace(20e-9, 0.0))
    assert seconds_left(replace(slow, line=1 << 40)) == pytest.approx(8.0)
    short = seconds_left(slow)
    assert short is not None and 8.0 <= short < 10.0
    both = seconds_left(replace(slow, line=1 << 40, pace=WriterPace(20e-9, 1 / (64.0 * MB))))
    assert both == pytest.approx(8.0), "the disk is at work while the writer is"


def test_what_an_epoch_leaves_out_comes_in_the_next_one() -> None:
    slow = seconds_left(replace(STATE, pace=WriterPace(0.0, 1 / (15.0 * MB))))
    faster = seconds_left(replace(STATE, pace=WriterPace(0.0, 1 / (30.0 * MB))))
    assert slow is not None and faster is not None
    assert 8.0 < faster < slow < 400 / 15  # in epochs of 8 s


def test_a_line_that_takes_few_batches_keeps_less_of_an_epoch() -> None:
    """So that what one epoch nearly brings takes a second one of a minute."""
    slow = replace(STATE, wanted=190 * MB, epoch_seconds=60.0, pace=WriterPace(0.0, 1 / (15.0 * MB)))
    fine, coarse = seconds_left(slow), seconds_left(replace(slow, batch=60 * MB))
    assert fine is not None and coarse is not None and fine < 13 < 60 < coarse


def test_a_fill_that_does_not_end_has_no_forecast() -> None:
    never = replace(STATE, pace=WriterPace(0.0, 1e3), segment=1.0, coming=0.0, waiting=1.0, batch=1.0)
    assert seconds_left(never) is None
    ends_at_once = replace(STATE, segment=1.0, epoch_seconds=1e-6, coming=0.0)
    assert seconds_left(replace(ends_at_once, pace=WriterPace(0.0, 1e3))) is None


@dataclass
class Cache:
    """A cache that takes what it is told."""

    sample_bytes: int = MB
    segment_bytes: int = 10 * MB
    held: float = 0.0
    fits: float = 1.0
    write: float | None = None
    admits: bool = True

    @property
    def stored_bytes(self) -> float:
        return float(self.sample_bytes)

    def share(self, ids: IntArray) -> float:
        return self.held

    def room(self, samples: int) -> float:
        return self.fits

    def writer_pace(self) -> WriterPace:
        return WriterPace(0.0, 1 / self.write if self.write else 0.0)


@dataclass
class Fill:
    """A run of which each sample takes 10 ms."""

    now: float = 100.0
    cache: Cache = field(default_factory=Cache)
    ids: IntArray = field(default_factory=lambda: np.arange(100))

    def __post_init__(self) -> None:
        self.forecast, self.counts = FillForecast(lambda: self.now), KeptCounts()

    def epoch(self, samples: int, kept: int) -> None:
        self.counts = KeptCounts()
        self.forecast.begin_pass(self.cache, self.counts, self.ids)
        for number in range(samples):
            self.now += 0.01
            self.forecast.offered(self.cache, 1)
            if number < kept:
                self.counts.wrote(1, MB, 0)
                self.counts.kept_at = self.now
                self.cache.held += 0.01


def test_each_part_that_is_kept_makes_a_forecast() -> None:
    run = Fill()
    assert run.forecast.to_json() is None
    run.epoch(100, 100)
    found = run.forecast.to_json()
    assert found is not None and found["samples"] == 100 and found["seconds"] == pytest.approx(1.0)
    assert [one["part"] for one in found["forecasts"]] == [part / 8 for part in range(1, 8)]
    assert all(one["seconds"] == pytest.approx(1.0, rel=0.03) for one in found["forecasts"])


def test_the_rate_that_the_disk_has_by_then_counts() -> None:
    run = Fill(cache=Cache(sample_bytes=10 * MB, write=2000.0 * MB))
    run.epoch(50, 50)
    run.cache.write = 100.0 * MB  # its fast part is full
    run.epoch(50, 25)
    found = run.forecast.to_json()
    assert found is not None and found["seconds"] is None
    fast, slow = found["forecasts"][0]["seconds"], found["forecasts"][-1]["seconds"]
    assert fast == pytest.approx(1.0, rel=0.05) and slow > 2 * fast


def test_what_has_no_room_is_not_waited_for() -> None:
    run = Fill(cache=Cache(fits=0.3))
    run.epoch(100, 30)
    found = run.forecast.to_json()
    assert found is not None and found["samples"] == 30 and found["seconds"] == pytest.approx(0.3)


def test_a_cache_that_is_full_before_is_full() -> None:
    """Segments leave a little of the room unused."""
    run = Fill(cache=Cache(fits=0.4))
    run.epoch(100, 39)
    found = run.forecast.to_json()
    assert found is not None and found["seconds"] is None
    run.cache.admits = False
    run.epoch(61, 0)
    found = run.forecast.to_json()
    assert found is not None and found["seconds"] == pytest.approx(0.39)


def test_another_cache_is_another_fill() -> None:
    run = Fill()
    run.epoch(100, 50)
    run.cache = Cache(sample_bytes=10)
    run.forecast.offered(run.cache, 1)  # before its pass: not of this fill
    run.epoch(100, 100)
    found = run.forecast.to_json()
    assert found is not None and found["seconds"] == pytest.approx(1.0)
