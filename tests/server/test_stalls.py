"""What trainers wait, as the server keeps it by tenant and job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.errors import BadRequestError
from hapi.server.scheduling.stalls import KEPT_SECONDS, MOST_JOBS, Stalls
from hapi.wire.messages import STALL_HEADER, stall_of


def told(stalls: Stalls, job: str, share: float | None, now: float, times: int = 1) -> None:
    for _ in range(times):
        stalls.begin("t", job, share, now)
        stalls.end("t", job, share, now)


def test_a_tenant_has_the_mean_of_its_jobs() -> None:
    stalls = Stalls()
    told(stalls, "a", 0.0, 1.0, times=50)
    told(stalls, "b", 1.0, 1.0)
    assert stalls.share("t", 1.0) == 0.5
    assert stalls.share("another", 1.0) == 0.0 == stalls.share("nobody", 1.0)


def test_a_job_follows_what_it_tells() -> None:
    stalls = Stalls()
    told(stalls, "a", 1.0, 1.0)
    told(stalls, "a", 0.0, 2.0)
    assert 0.0 < stalls.share("t", 2.0) < 1.0
    told(stalls, "a", 0.0, 3.0, times=30)
    assert stalls.share("t", 3.0) < 0.01


def test_a_job_that_is_gone_is_forgotten_and_one_that_waits_here_is_not() -> None:
    stalls = Stalls()
    told(stalls, "gone", 1.0, 0.0)
    stalls.begin("t", "waits", 0.5, 0.0)
    assert stalls.share("t", KEPT_SECONDS - 1) == 0.75
    assert stalls.share("t", 100 * KEPT_SECONDS) == 0.5
    stalls.end("t", "waits", 0.5, 100 * KEPT_SECONDS)
    assert stalls.shares(["t"], 102 * KEPT_SECONDS) == []


def test_one_that_tells_nothing_counts_for_none() -> None:
    stalls = Stalls()
    told(stalls, "", None, 1.0)
    assert stalls.shares(["t"], 1.0) == []


def test_tenants_that_are_no_more_are_forgotten() -> None:
    stalls = Stalls()
    stalls.begin("t", "a", 1.0, 1.0)
    stalls.keep(frozenset(["another"]))
    stalls.end("t", "a", 1.0, 2.0)
    assert stalls.share("t", 2.0) == 0.0


@given(st.lists(st.tuples(st.sampled_from(["begin", "end"]), st.integers(0, 2 * MOST_JOBS), st.floats(0, 1))))
def test_memory_and_shares_are_bounded(moves: list[tuple[str, int, float]]) -> None:
    stalls = Stalls()
    for number, (move, job, share) in enumerate(moves):
        getattr(stalls, move)("t", str(job), share, float(number))
        assert len(stalls.shares(["t"], float(number))) <= MOST_JOBS
        assert 0.0 <= stalls.share("t", float(number)) <= 1.0


@pytest.mark.parametrize("text", ["nan", "inf", "-0.5", "1.001", "1e3", "9" * 400, "", "0.5 ", "½"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match=STALL_HEADER):
        stall_of(text)


def test_a_share_is_read() -> None:
    assert [stall_of(t) for t in (None, "0", "0.250", "1.000")] == [None, 0.0, 0.25, 1.0]
