"""The choice of a codec at rest: raw until measured, then what pays on the disk; a plan overrules it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.encoded_tools import ROW_BYTES, encoded_at, put_rows, rectified

from hapi.cache import folder
from hapi.cache.disk_rates import DiskRates
from hapi.cache.writing import record_codec
from hapi.cache.writing.record_codec import PassTimes, RecordCodec
from hapi.codecs.names import CacheCodec

SLOW, FAST = DiskRates(2e6, 2e6), DiskRates(1e12, 1e12)
ROWS = rectified(np.arange(64))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_codec, "ENOUGH_BYTES", ROWS.nbytes)


def codec_of(wanted: CacheCodec, rates: DiskRates, itemsize: int = 4, room: float = 1.0) -> RecordCodec:
    return RecordCodec(wanted, itemsize, ROW_BYTES, room=room, reads=9, rates=lambda: rates)


def test_a_slow_disk_is_worth_a_codec_once_enough_has_come() -> None:
    codec = codec_of("auto", SLOW)
    assert codec.at(ROWS[:63]) == "none" and not codec.figures
    assert codec.at(ROWS) in ("zeros", "zeros+planes")
    assert [found.name for found in codec.figures] == ["zeros", "planes", "zeros+planes"]
    told = codec.to_json()
    assert told["codec"] == codec.name and [f["ratio"] > 1 for f in told["measured"]] == [True] * 3


def test_a_fast_disk_is_not() -> None:
    assert codec_of("auto", FAST).at(ROWS) == "none"


def test_nor_is_one_that_is_faster_than_the_training() -> None:
    """What the training takes anyway hides the disk; where the room is short, more fits encoded."""
    times = PassTimes(step=1.0, computed=2.0)
    assert codec_of("auto", SLOW).at(ROWS, times) == "none"
    assert codec_of("auto", SLOW, room=0.4).at(ROWS, times) in ("zeros", "zeros+planes")


def test_the_choice_follows_what_becomes_known() -> None:
    rates = [FAST]
    codec = RecordCodec("auto", 4, ROW_BYTES, room=1.0, reads=9, rates=lambda: rates[-1])
    assert codec.at(ROWS) == "none"
    rates.append(SLOW)
    assert codec.at(ROWS) != "none"


def test_what_never_shrinks_asks_for_no_disk() -> None:
    def never() -> DiskRates:
        raise AssertionError("the disk was measured")

    noise = np.random.default_rng(0).integers(1, 256, ROWS.shape).astype(np.uint8)
    codec = RecordCodec("auto", 4, ROW_BYTES, room=1.0, reads=1, rates=never)
    assert codec.at(noise) == "none" and codec.figures


def test_a_sample_from_elsewhere_is_what_a_plan_may_choose_from_until_rows_come() -> None:
    tried = codec_of("auto", SLOW)
    tried.at(ROWS)
    guessed = tuple(replace(found, ratio=7.0) for found in tried.figures)
    codec = codec_of("auto", SLOW)
    codec.expect(guessed)
    codec.follow("planes")
    assert codec.at(ROWS[:1]) == "planes" and codec.figures == guessed
    assert codec.at(ROWS) == "planes" and all(found.ratio != 7 for found in codec.figures)
    codec.expect(guessed)
    assert codec.figures != guessed, "what was measured on rows counts"


def test_a_named_one_is_taken_from_the_beginning() -> None:
    codec = codec_of("planes", FAST)
    assert codec.at(ROWS[:1]) == "planes"
    codec.follow("none")
    assert codec.at(ROWS) == "planes"
    none = codec_of("none", SLOW)
    assert none.at(ROWS) == "none" and not none.figures
    assert codec_of("zeros", SLOW, itemsize=16).at(ROWS) == "none", "complex numbers of doubles"


def test_a_plan_overrules_what_it_could_choose_from() -> None:
    codec = codec_of("auto", SLOW)
    codec.follow("none")
    assert codec.at(ROWS) != "none", "nothing was measured when that was planned"
    codec.follow("none")
    assert codec.at(ROWS) == "none"
    codec.follow("planes")
    assert codec.at(ROWS) == "planes"


def test_a_cache_tells_how_it_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = []

    def probe(path: Path) -> DiskRates:
        probes.append(path)
        return SLOW

    monkeypatch.setattr(folder, "measure_disk", probe)
    with encoded_at(tmp_path, "auto") as cache:
        assert cache.stored_as() is None
        put_rows(cache, range(32))
        raw = cache.stored_as()
        assert raw is not None and (raw.name, raw.ratio) == ("none", 1.0)
        put_rows(cache, range(60))
        assert cache.codec.name != "none" and probes == [tmp_path]
        mixed = cache.stored_as()
        assert mixed is not None and mixed.name == cache.codec.name and 1 < mixed.ratio < 1.7
        assert cache.rates().write is not None
    with encoded_at(tmp_path, "none") as cache:
        assert cache.stored_as() is None, "neither read nor tried"
        ids = np.arange(60)
        cache.read(ids, np.empty((60, ROW_BYTES), np.uint8), np.empty(60, np.int64))
        known = cache.stored_as()
        assert known is not None and known.name == mixed.name and known.ratio == mixed.ratio
