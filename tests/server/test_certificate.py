"""The validity of certificates: read from their own bytes, and told before it is over."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import make_certificate

from hapi.server.lifecycle.certificate import Validity, validity_of

DAY = 86400.0


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Certificates that are good from yesterday to in five days, and from in two days to the year 2054."""
    spans = ((-1, 5), (2, 10_400))
    return [make_certificate(tmp_path_factory.mktemp("made"), *span).read_text() for span in spans]


@pytest.mark.slow
def test_the_validity_of_a_chain(chain: list[str]) -> None:
    now = time.time()
    single, long = (validity_of(text) for text in chain)
    assert single is not None and long is not None
    assert single.first == pytest.approx(now - DAY, abs=60) and single.last == pytest.approx(
        now + 5 * DAY, abs=60
    )
    assert long.last == pytest.approx(now + 10_400 * DAY, abs=60), "a year of four digits"
    assert validity_of("\n".join(chain)) == Validity(long.first, single.last)
    assert validity_of("no certificate") is None


@pytest.mark.parametrize(
    ("days", "problem"),
    [(-0.1, "not valid before 2"), (0.1, ""), (80.9, "expires on "), (75, ""), (90.1, "expired on 2")],
)
def test_problems(days: float, problem: str) -> None:
    found = Validity(1.7e9, 1.7e9 + 90 * DAY).problem(1.7e9 + days * DAY)
    assert found.startswith(problem) and bool(found) == bool(problem)


@given(at=st.integers(0, 1 << 30), byte=st.sampled_from([65, 47, 66, 122, 48]), cut=st.booleans())
def test_any_bytes_are_read(chain: list[str], at: int, byte: int, cut: bool) -> None:
    """Whatever stands there, which OpenSSL has taken, ends nothing."""
    text = chain[0][chain[0].index("-----BEGIN CERT") :]
    head, tail = text[: 30 + at % (len(text) - 60)], text[-30:]
    validity_of(head + tail if cut else head + chr(byte) + text[len(head) + 1 :])
