"""When work is given up, when a server counts as stuck, and when it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from support.http_tools import until

from hapi.errors import StoreUnavailableError
from hapi.process.threads import Threads
from hapi.server.lifecycle.progress_watch import LOST_TO_ONE, ProgressWatch
from hapi.waiting import Interest, holding


@pytest.fixture
def watch() -> Iterator[ProgressWatch]:
    watching = ProgressWatch(0.2, 2)
    yield watching
    watching.close()


def test_wanted_work_is_not_given_up_but_stuck(watch: ProgressWatch, gate: threading.Event) -> None:
    pool, interest = watch.threads(2, "test-slots", of_slots=True), Interest("digits")
    assert watch.stuck() == ""
    work = pool.submit_in(interest, gate.wait)
    until(lambda: watch.stuck(), 5, "the standstill")
    assert "1 requests stand still" in watch.stuck() and not interest.given_up
    until(lambda: moves(pool, watch), 5, "the end of the standstill, as something moved")
    until(lambda: watch.stuck(), 5, "the standstill")
    gate.set()
    assert work.result(240)
    assert watch.stuck() == ""


def moves(pool: Threads, watch: ProgressWatch) -> bool:
    """Do some work; whether the server counts as well right after, before this thread stood still for too long."""
    assert pool.submit(pow, 2, 2).result(240) == 4
    return watch.stuck() == ""


@pytest.mark.parametrize("why", ["gone", "late"])
def test_unwanted_work_is_given_up(watch: ProgressWatch, gate: threading.Event, why: str) -> None:
    pool = watch.threads(1, "test-slots", of_slots=True)
    interest = Interest("digits", time.monotonic() if why == "late" else float("inf"))
    work = pool.submit_in(interest, gate.wait)
    if why == "gone":
        interest.set()
    until(lambda: watch.lost.count == 1, 5, "the loss of its thread")
    assert work.over.done() and watch.stuck() == ""
    assert pool.submit(pow, 2, 2).result(240) == 4
    gate.set()
    until(lambda: watch.lost.count == 0, 5, "its return")
    assert watch.lost.ever == 1


def test_who_rests_does_not_stand_still(watch: ProgressWatch, gate: threading.Event) -> None:
    pool, interest = watch.threads(1, "test-slots", of_slots=True), Interest("digits", time.monotonic())

    def send() -> None:
        with interest.paused():
            gate.wait(240)

    work = pool.submit_in(interest, send)
    interest.set()
    time.sleep(0.5)
    assert watch.stuck() == "" and not interest.given_up
    gate.set()
    work.result(240)


def test_a_waiter_hears_of_it_and_no_thread_is_lost(watch: ProgressWatch) -> None:
    pool, interest, lock = watch.threads(1, "test-slots", of_slots=True), Interest("digits"), threading.Lock()

    def enter() -> None:
        with holding(lock):
            pass

    with lock:
        work = pool.submit_in(interest, enter)
        interest.set()
        with pytest.raises(StoreUnavailableError):
            work.result(240)
    assert watch.lost.ever == 0


def test_beyond_the_bound_nothing_is_given_up(watch: ProgressWatch, gate: threading.Event) -> None:
    pool = watch.threads(4, "test-slots", of_slots=True)
    interests = [Interest(f"dataset {n}") for n in range(3)]
    for interest in interests[:2]:
        pool.submit_in(interest, gate.wait)
        interest.set()
    until(lambda: watch.lost.count == 2, 5, "two losses")
    assert "no more may be given up" in watch.stuck()
    pool.submit_in(interests[2], gate.wait)
    interests[2].set()
    time.sleep(0.5)
    assert not interests[2].given_up and watch.lost.count == 2
    gate.set()
    until(lambda: watch.lost.count == 0 and not watch.stuck(), 5, "the return of all")


def test_one_subject_is_refused_before_it_takes_all(gate: threading.Event) -> None:
    watch = ProgressWatch(0.1, 8)
    pool = watch.threads(4, "test-slots", of_slots=True)
    try:
        for _ in range(LOST_TO_ONE):
            watch.check("digits")
            interest = Interest("digits")
            pool.submit_in(interest, gate.wait)
            interest.set()
        until(lambda: watch.lost.count == LOST_TO_ONE, 5, "the losses")
        with pytest.raises(StoreUnavailableError, match="digits"):
            watch.check("digits")
        watch.check("photos")
        gate.set()
        until(lambda: watch.lost.count == 0, 5, "their return")
        watch.check("digits")
    finally:
        watch.close()
