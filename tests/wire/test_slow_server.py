"""How long an answer is waited for: pure, with a clock that is set."""

from __future__ import annotations

import pytest

from hapi.wire.transport.slow_server import (
    MOST_HEAD_BYTES,
    MOST_WASTE_BYTES,
    AnswerGuard,
    AnswerLimits,
    EndlessHeadError,
    SlowAnswerError,
)

LIMITS = AnswerLimits(silence=60, rate=1024, window=30, longest=1800)


class Answer:
    """An answer that comes byte by byte, as a response would tell its guard."""

    def __init__(self, limits: AnswerLimits = LIMITS) -> None:
        self.now = 100.0
        self.content = 0
        self.guard = AnswerGuard(limits, lambda: self.now)

    def comes(self, nbytes: int, seconds: float, content: int | None = None) -> None:
        """``nbytes`` after so many seconds of waiting for them."""
        self.now += seconds
        self.guard.waited += seconds
        self.guard.received += nbytes
        self.content += nbytes if content is None else content
        if self.now >= self.guard.next_look:
            self.guard.check()

    def frames(self) -> None:
        self.guard.frames(lambda: self.content)


def test_a_head_may_wait_for_the_server_but_not_drip() -> None:
    answer = Answer()
    answer.comes(1, 59, content=0)  # the server was computing
    for _ in range(11):
        answer.comes(1, 5, content=0)
    with pytest.raises(SlowAnswerError, match="head"):
        answer.comes(1, 5, content=0)


def test_a_head_has_an_end() -> None:
    answer = Answer()
    with pytest.raises(EndlessHeadError):
        for _ in range(3000):
            answer.comes(25, 0.0001, content=0)  # 100 Continue, again and again
    assert answer.guard.received <= MOST_HEAD_BYTES + 25


def test_a_document_that_drips_is_given_up() -> None:
    answer = Answer()
    answer.comes(200, 1, content=0)
    answer.guard.document()
    with pytest.raises(SlowAnswerError, match="--slow-server-rate") as caught:
        for _ in range(100):
            answer.comes(100, 1)
    assert answer.now < 140
    assert "3100 bytes in 31 s" in str(caught.value) or "3000 bytes in 30 s" in str(caught.value)


def test_a_slow_link_that_ten_requests_share_is_waited_for() -> None:
    """1 Mbit/s, of which one request gets now more and now less: 77 MB take almost two hours."""
    answer = Answer()
    answer.comes(300, 5, content=0)
    answer.frames()
    answer.guard.arriving(True)
    for turn in range(1230):
        answer.comes(64 << 10, 2 if turn % 5 else 20)
    answer.guard.arriving(False)
    answer.guard.end()
    answer.comes(5, 3)


def test_time_that_the_server_computes_between_frames_is_not_owed() -> None:
    answer = Answer()
    answer.comes(300, 5, content=0)
    answer.frames()
    for _ in range(20):
        answer.comes(1, 55)
        answer.guard.arriving(True)
        answer.comes(10_000, 1)
        answer.guard.arriving(False)


def test_frames_that_drip_are_given_up_also_when_each_takes_less_than_the_window() -> None:
    answer = Answer()
    answer.comes(300, 1, content=0)
    answer.frames()
    with pytest.raises(SlowAnswerError, match=r"bytes in 3\d s"):
        for _ in range(10):
            answer.comes(1, 5)
            answer.guard.arriving(True)
            for _ in range(20):
                answer.comes(10, 1)
            answer.guard.arriving(False)
    assert answer.now < 160


def test_an_answer_that_is_never_quite_silent_ends() -> None:
    """Every frame comes fast, and each just before the silence would count."""
    answer = Answer()
    answer.comes(300, 1, content=0)
    answer.frames()
    with pytest.raises(SlowAnswerError, match="--answer-timeout"):
        for _ in range(1000):
            answer.comes(1, 59)
            answer.guard.arriving(True)
            answer.comes(1000, 0.1)
            answer.guard.arriving(False)
    assert 1800 < answer.now - 100 < 1800 + 90


def test_between_chunks_little_may_come() -> None:
    answer = Answer()
    answer.comes(300, 1, content=0)
    answer.frames()
    answer.guard.arriving(True)
    with pytest.raises(EndlessHeadError):
        for _ in range(100):
            answer.comes(60_000, 1, content=1)
    assert answer.guard.received < MOST_WASTE_BYTES + 130_000


def test_what_follows_the_end_has_one() -> None:
    answer = Answer()
    answer.comes(300, 1, content=0)
    answer.frames()
    answer.comes(1 << 20, 1)
    answer.guard.end()
    with pytest.raises(EndlessHeadError):
        for _ in range(100):
            answer.comes(1000, 0.001, content=0)


def test_no_rate_is_demanded_when_it_is_zero() -> None:
    answer = Answer(AnswerLimits(rate=0))
    answer.comes(200, 1, content=0)
    answer.guard.document()
    for _ in range(20):
        answer.comes(1, 59)
