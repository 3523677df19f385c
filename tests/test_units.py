"""Reading and printing of sizes, bandwidths, durations and counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi import units
from hapi.errors import UsageError

ALL_PARSERS = [units.parse_bytes, units.parse_bandwidth, units.parse_duration, units.parse_count]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64MiB", 64 * 2**20),
        ("1.5GB", 1_500_000_000),
        (" 512 kB ", 512_000),
        ("512KiB", 512 * 1024),
        ("64mb", 64_000_000),
        ("4096", 4096),
        (4096, 4096),
        ("1e3", 1000),
        ("1_000B", 1000),
        ("0", 0),
        (".5KiB", 512),
    ],
)
def test_bytes(text: str | int, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("64M", "ambiguous; write MB"),
        ("64Gi", "ambiguous; write GB"),
        ("64Mb", "in bits"),
        ("64 Mbit", "in bits"),
        ("64 parsecs", "unknown unit"),
        ("-1MB", "negative"),
        ("1.5B", "not a whole number"),
        ("1e99", "out of range"),
        ("1e999999999", "cannot read"),
        ("", "cannot read"),
        ("MB", "cannot read"),
        ("1 2MB", "cannot read"),
        ("nan", "cannot read"),
        ("١MB", "cannot read"),
        (2**70, "out of range"),
        (True, "expected something like"),
        (None, "expected something like"),
    ],
)
def test_hostile_bytes(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part) as caught:
        units.parse_bytes(text, "--prefetch-bytes")
    assert str(caught.value).startswith("--prefetch-bytes: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1Gbps", 1e9),
        ("12 Gbit/s", 12e9),
        ("100Mb/s", 1e8),
        ("125MB/s", 1e9),
        ("1MiB/s", 8 * 2**20),
        ("50 mbps", 5e7),
        (1000000, 1e6),
        (2.5e6, 2.5e6),
        ("9600 bit/s", 9600.0),
    ],
)
def test_bandwidth(text: str | float, expected: float) -> None:
    assert units.parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    "text", ["0", "100", "0Gbps", "1G", "1 GB", "fast", "-1Gbps", "inf", math.inf, math.nan, "1Ms", "1G/s"]
)
def test_hostile_bandwidth(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--bandwidth: "):
        units.parse_bandwidth(text, "--bandwidth")


def test_a_bandwidth_needs_its_unit() -> None:
    with pytest.raises(UsageError, match=r"^bandwidth: '100' has no unit: 100Mbps or 100MB/s\?$"):
        units.parse_bandwidth("100")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.5s", 1.5),
        ("200ms", 0.2),
        ("10us", 1e-5),
        ("2min", 120),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("7", 7),
        (0.25, 0.25),
    ],
)
def test_duration(text: str | float, expected: float) -> None:
    assert units.parse_duration(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", ["1x", "1h1h", "s", "-3s", "1s tomorrow", "1e80", "1h!2m", ""])
def test_hostile_duration(text: str) -> None:
    with pytest.raises(UsageError, match=r"^duration: "):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("10k", 10_000), ("1.5M", 1_500_000), ("1_000", 1000), (7, 7)]
)
def test_count(text: str | int, expected: int) -> None:
    assert units.parse_count(text) == expected


@pytest.mark.parametrize("text", ["1.5", "1Ki", "ten", "-1", "1k5", "1_", "1__0"])
def test_hostile_count(text: str) -> None:
    with pytest.raises(UsageError, match=r"^count: "):
        units.parse_count(text)


@pytest.mark.parametrize("parse", ALL_PARSERS)
@given(text=st.text(max_size=60) | st.from_regex(r"[0-9eE.+_ ]{1,20}[kMGi]{0,2}[bB]?(ps|/s)?"))
def test_any_text_is_read_or_refused(parse: Callable[[str], float], text: str) -> None:
    try:
        value = parse(text)
    except UsageError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
    else:
        assert 0 <= value <= units.MAX_VALUE


@given(st.integers(0, 2**62))
def test_printed_bytes_read_back_within_rounding(size: int) -> None:
    number, unit = units.format_bytes(size).split()
    # One of a unit is read exactly; "1.07 GiB" itself need not be a whole number of bytes.
    assert abs(float(number) * units.parse_bytes(f"1{unit}") - size) <= 0.01 * size


@given(st.floats(1.0, 1e15))
def test_printed_bandwidth_reads_back_within_rounding(bandwidth: float) -> None:
    assert units.parse_bandwidth(units.format_bandwidth(bandwidth)) == pytest.approx(bandwidth, rel=0.06)


@given(st.floats(1e-6, 1e8))
def test_printed_duration_reads_back_within_rounding(seconds: float) -> None:
    tolerance = max(0.01 * seconds, 5e-7)
    assert abs(units.parse_duration(units.format_duration(seconds)) - seconds) <= tolerance


def test_printing() -> None:
    assert units.format_bytes(64 * 2**20) == "64.0 MiB"
    assert units.format_bytes(512) == "512 B"
    assert units.format_bytes(2**20 - 1) == "1.00 MiB"
    assert units.format_bytes(-1536) == "-1.50 KiB"
    assert units.format_bandwidth(1e9) == "1.00 Gbit/s"
    assert units.format_count(1_500_000) == "1.50M"
    assert units.format_count(999) == "999"
    assert [units.format_money(money) for money in (1234.5, 0.12, 0.0995, 0.0799, 0.00823, 1e-12, 0)] == [
        "1234.50", "0.12", "0.10", "0.0799", "0.00823", "0.000000000", "0.00",
    ]  # fmt: skip
    assert units.format_duration(0.99999) == "1.00 s"
    assert units.format_duration(125) == "2min 5s"
    assert units.format_duration(3725) == "1h 2min"
