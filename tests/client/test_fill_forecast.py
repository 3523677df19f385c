"""Forecasts of a cache's filling: by the disk, by the training, over several epochs, and as a run's report has them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from hapi.arrays import IntArray
from hapi.cache.disk_rates import DiskBacklog, WriterPace
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.fill_forecast import FillForecast, FillState, seconds_left

MB = 1_000_000
STATE = FillState(
    wanted=400 * MB, waiting=0, coming=400 * MB, coming_seconds=8.0, epoch_seconds=8.0, hits_seconds=8.0,
    whole=400 * MB, batch=MB, line=64 << 20, pace=WriterPace(0.0, 0.0), segment=64 * MB, in_segment=0,
)  # fmt: skip


def test_a_disk_that_never_waits_fills_with_the_epoch() -> None:
    assert seconds_left(STATE) == pytest.approx(8.0)
    assert seconds_left(replace(STATE, pace=WriterPace(0.0, 1 / (500.0 * MB)))) == pytest.approx(8.0)
    assert seconds_left(replace(STATE, wanted=200 * MB)) == pytest.approx(4.0)  # the budget ends it


def test_a_slow_disk_takes_its_time_within_the_epoch_and_its_end() -> None:
    """The writer waits six times for 64 MB, the first of which came in 1.28 s; nobody waits for the last 16 MB."""
    assert seconds_left(replace(STATE, pace=WriterPace(0.0, 1 / (49.9 * MB)))) == pytest.approx(
        1.28 + 6 * 64 / 49.9
    )


def test_a_writer_that_works_slower_than_features_come_takes_its_time() -> None:
    """Encoding takes 20 ns a byte: 8 s for all, where they come in 2 s; without room in the line they come again."""
    slow = replace(
        STATE, coming_seconds=2.0, epoch_seconds=2.0, hits_seconds=2.0, pace=WriterPace(20e-9, 0.0)
    )
    assert seconds_left(replace(slow, line=1 << 40)) == pytest.approx(8.0)
    short = seconds_left(slow)
    assert short is not None and 8.0 <= short < 10.0
    both = seconds_left(replace(slow, line=1 << 40, pace=WriterPace(20e-9, 1 / (64.0 * MB))))
    assert both == pytest.approx(8.0 + 6)


def test_what_an_epoch_leaves_out_comes_in_the_next_one() -> None:
    slow = seconds_left(replace(STATE, pace=WriterPace(0.0, 1 / (15.0 * MB))))
    faster = seconds_left(replace(STATE, pace=WriterPace(0.0, 1 / (30.0 * MB))))
    assert slow is not None and faster is not None
    assert 16.0 < faster < slow < 40.0  # in epochs of 8 s


def test_a_line_that_takes_few_batches_keeps_less_of_an_epoch() -> None:
    slow = replace(STATE, pace=WriterPace(0.0, 1 / (15.0 * MB)))
    fine, coarse = seconds_left(slow), seconds_left(replace(slow, batch=60 * MB))
    assert fine is not None and coarse is not None and coarse > fine


def test_what_the_page_cache_took_comes_later() -> None:
    """A writer that did not wait yet: 400 MB, and 50 MB that are on their way; nobody waits for the last 16."""
    early = replace(STATE, disk=DiskBacklog(25.0 * MB, 50.0 * MB))
    assert seconds_left(early) == pytest.approx((50 + 400 - 16) / 25, rel=0.03)
    assert seconds_left(replace(early, disk=DiskBacklog(1e9, 0.0))) == pytest.approx(8.0)
    run = Fill(cache=Cache(disk=10.0 * MB))
    run.epoch(100, 100)
    found = run.forecast.to_json()
    assert found is not None
    assert found["forecasts"][0]["seconds"] == pytest.approx(0.13 + 77 / 10, rel=0.1), "but for a segment"


def test_epochs_that_lack_little_are_short() -> None:
    """Of a fifth the line has no room; the next epoch computes the batches that lack some, and reads the others."""
    state = replace(STATE, pace=WriterPace(25e-9, 0.0), coming_seconds=8.0, hits_seconds=0.0, line=0.0)
    one_by_one, batches, trained = map(
        seconds_left, (state, replace(state, rows=64), replace(state, hits_seconds=8.0))
    )
    assert one_by_one is not None and batches is not None and trained is not None
    assert 8.0 < one_by_one < batches < 0.8 * trained
    late = seconds_left(replace(state, begin_seconds=1.0))
    assert late is not None and late > one_by_one + 0.9


def test_an_epochs_end_waits_for_the_line_of_a_fast_disk_alone() -> None:
    """Half of what comes in 4 s waits at their end: on a fast disk 2 s more, else it goes on in the next epoch."""
    state = replace(
        STATE, wanted=600 * MB, coming=400 * MB, coming_seconds=4.0, epoch_seconds=4.0, hits_seconds=4.0,
        pace=WriterPace(20e-9, 0.0), line=1 << 40,
    )  # fmt: skip
    fast, slow = (seconds_left(replace(state, disk=DiskBacklog(rate, 0.0))) for rate in (1e9, 16.0 * MB))
    assert fast is not None and slow is not None
    assert fast == pytest.approx(4.0 + 4.0 + 4.0, rel=0.05), "what is left comes in a whole epoch"
    assert slow > 600 / 16 - 64 / 16 - 1


def test_what_a_pass_shows_of_its_rate_counts_in_the_next_one() -> None:
    """Samples come every 10 ms; the next pass begins after 2 s, and its first samples come in a burst."""
    run = Fill(cache=Cache(write=60.0 * MB))
    run.epoch(100, 50)
    run.now += 2.0
    run.epoch(50, 13)
    found = run.forecast.to_json()
    assert found is not None
    assert found["forecasts"][-1]["seconds"] > found["forecasts"][0]["seconds"]


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
    disk: float | None = None
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

    def disk_backlog(self) -> DiskBacklog:
        return DiskBacklog(self.disk, 0.0)


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
    run = Fill(cache=Cache(write=200.0 * MB))
    run.epoch(50, 50)
    run.cache.write = 10.0 * MB  # its fast part is full
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
