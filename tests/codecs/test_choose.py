"""The choice of a codec: a pure function of measured figures."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from hapi.codecs.choose import RAW, CodecFigures, Route, Shelf, choose, pays_below
from hapi.codecs.measure import measure

PLANES = CodecFigures(name="planes", ratio=1.2, encode_rate=0.7e9, decode_rate=2e9)
BOTH = CodecFigures(name="zeros+planes", ratio=2.0, encode_rate=0.4e9, decode_rate=1e9)
FIGURES = (PLANES, BOTH)


@pytest.mark.parametrize(
    ("link_rate", "name"),
    [(125e6, "zeros+planes"), (500e6, "planes"), (1250e6, "none"), (1e3, "zeros+planes")],
)
def test_the_shortest_pipeline_is_chosen(link_rate: float, name: str) -> None:
    assert choose(FIGURES, Route(link_rate=link_rate)).name == name


def test_a_busy_server_has_no_time_to_encode() -> None:
    busy = Route(link_rate=125e6, encoder_busy=1 / 126e6)
    assert choose(FIGURES, busy) is RAW


def test_a_slower_encoder_changes_the_choice() -> None:
    assert choose(FIGURES, Route(link_rate=300e6, encoder_speed=0.5)).name == "planes"
    assert choose(FIGURES, Route(link_rate=300e6, encoder_speed=0.1)) is RAW


DISK = Shelf(write_rate=100e6, read_rate=120e6, reads=9)


def test_a_slow_disk_is_worth_a_codec() -> None:
    assert choose(FIGURES, DISK).name == "zeros+planes"
    assert choose(FIGURES, replace(DISK, read_rate=3e9, write_rate=1e9)) is RAW


def test_what_is_read_behind_the_training_anyway_stays_raw() -> None:
    """A training that takes longer than the disk loses what decoding takes, unless the room is short."""
    slow = replace(DISK, training=1 / 50e6, computing=1 / 10e6)
    assert choose(FIGURES, slow) is RAW
    assert choose(FIGURES, replace(slow, room=2.0)) is RAW
    assert choose(FIGURES, replace(slow, room=0.5)).name == "zeros+planes"
    assert choose([PLANES], replace(slow, room=0.9)).name == "planes"


def test_more_passes_are_worth_more_encoding() -> None:
    slow = CodecFigures(name="planes", ratio=1.3, encode_rate=0.05e9, decode_rate=4e9)
    assert choose([slow], replace(DISK, reads=1)) is RAW
    assert choose([slow], replace(DISK, reads=30)) is slow


def test_a_gain_of_one_per_cent_is_none() -> None:
    tiny = CodecFigures(name="planes", ratio=1.009, encode_rate=math.inf, decode_rate=math.inf)
    assert choose([tiny], Route(link_rate=1e6)) is RAW
    assert choose([], Route(link_rate=1e6)) is RAW


@pytest.mark.parametrize("codec", FIGURES)
def test_a_codec_pays_below_a_rate(codec: CodecFigures) -> None:
    rate = pays_below(codec)
    assert choose([codec], Route(link_rate=0.99 * rate)) is codec
    assert choose([codec], Route(link_rate=1.02 * rate)) is RAW
    assert pays_below(RAW) == 0


def test_measured_on_samples() -> None:
    values = np.maximum(np.random.default_rng(0).standard_normal(200_000).astype(np.float32), 0)
    ticks = itertools.count(0, 1)
    zeros, planes = measure([values.tobytes()] * 2, 4, ("zeros", "planes"), clock=lambda: float(next(ticks)))
    assert 1.8 < zeros.ratio < 2
    assert planes.ratio > 1.4
    assert zeros.encode_rate == values.nbytes
    assert zeros.decode_rate == values.nbytes


def test_what_does_not_shrink_has_the_ratio_one() -> None:
    (figures,) = measure([np.random.default_rng(0).bytes(1 << 18)], 4, ("zeros",))
    assert figures.ratio == 1
    assert choose([figures], Route(link_rate=1.0)) is RAW
