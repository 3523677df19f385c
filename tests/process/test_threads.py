"""Pools that get over threads which do not come back, and waits that end with the work."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from hapi import waiting
from hapi.clocks import BusyClock
from hapi.errors import DrainingError, ShortageError, StoreUnavailableError
from hapi.process.threads import Lost, Threads, Work
from hapi.waiting import Interest


@pytest.fixture
def lost() -> Lost:
    return Lost(2)


@pytest.fixture
def pool(lost: Lost) -> Iterator[Threads]:
    threads = Threads(2, "test-pool", lost)
    yield threads
    threads.close()


def until(condition: object, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def names() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("test-pool")]


# -- pools ---------------------------------------------------------------------------------------------------------


def test_results_errors_and_order(pool: Threads) -> None:
    assert [pool.submit(pow, 2, n).result(240) for n in range(4)] == [1, 2, 4, 8]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(240)
    assert len(names()) <= 2


def test_what_has_not_begun_can_be_cancelled(pool: Threads, gate: threading.Event) -> None:
    busy = [pool.submit(gate.wait) for _ in range(2)]
    until(lambda: all(work.running() for work in busy))
    queued = pool.submit(pow, 2, 3)
    assert queued.cancel() and queued.over.done()
    gate.set()
    assert all(work.result(240) for work in busy)


def test_closed_pools_take_nothing_and_their_threads_end(pool: Threads, gate: threading.Event) -> None:
    at_work = [pool.submit(gate.wait) for _ in range(2)]
    until(lambda: all(work.running() for work in at_work))
    queued = pool.submit(pow, 2, 3)
    pool.close()
    assert queued.cancelled()
    with pytest.raises(DrainingError):
        queued.outcome()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(pow, 2, 3)
    gate.set()
    assert [work.result(240) for work in at_work] == [True, True]
    until(lambda: not names())


def test_a_lost_thread_is_replaced_and_comes_back(pool: Threads, lost: Lost, gate: threading.Event) -> None:
    interests = [Interest("digits"), Interest("photos")]
    hung = [pool.submit_in(interest, gate.wait) for interest in interests]
    behind = pool.submit(pow, 2, 5)
    until(lambda: len(pool.running()) == 2)
    assert pool.lose_given_up(0) == 0 and not behind.done()
    for interest in interests:
        interest.give_up()
    assert pool.lose_given_up(0) == 2 and pool.lose_given_up(0) == 0
    assert behind.result(240) == 32
    assert (lost.count, lost.ever, lost.of("digits"), lost.of("else")) == (2, 2, 1, 0)
    assert all(work.over.done() and not work.done() for work in hung)
    with pytest.raises(StoreUnavailableError, match="digits"):
        hung[0].outcome()
    gate.set()
    assert [work.result(240) for work in hung] == [True, True] == [work.outcome() for work in hung]
    until(lambda: lost.count == 0)
    assert pool.submit(pow, 3, 2).result(240) == 9 and lost.ever == 2
    until(lambda: len(names()) <= 2)


def test_no_more_are_lost_than_may_be(lost: Lost, gate: threading.Event) -> None:
    pool = Threads(3, "test-pool", lost)
    interests = [Interest(str(n)) for n in range(3)]
    hung = [pool.submit_in(interest, gate.wait) for interest in interests]
    until(lambda: len(pool.running()) == 3)
    for interest in interests:
        interest.give_up()
    assert pool.lose_given_up(0) == 2 and len(pool.running()) == 1
    assert sum(work.over.done() for work in hung) == 2
    gate.set()
    until(lambda: lost.count == 0)
    pool.close()


def test_what_work_holds_is_let_go(pool: Threads) -> None:
    class Thing:
        pass

    thing, gc_was_on = Thing(), gc.isenabled()
    gone = weakref.ref(thing)
    gc.disable()
    try:
        work = pool.submit(lambda held: held is not None, thing)
        assert work.result(240)
        del thing
        until(lambda: gone() is None)
        thing = Thing()
        gone = weakref.ref(thing)

        def fail(held: Thing) -> None:
            raise ValueError(str(held))

        failed = pool.submit(fail, thing)
        assert isinstance(failed.exception(240), ValueError)
        del thing, failed
        until(lambda: gone() is None)
    finally:
        if gc_was_on:
            gc.enable()


def test_a_system_without_threads(pool: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ShortageError, match="threads"):
            pool.submit(pow, 2, 2)
    assert pool.submit(pow, 2, 2).result(240) == 4


def test_many_at_once(pool: Threads) -> None:
    with ThreadPoolExecutor(8) as crowd:
        works = list(crowd.map(lambda n: pool.submit(pow, n, 2), range(500)))
    assert [work.result(240) for work in works] == [n * n for n in range(500)]
    assert len(names()) <= 2


# -- waits ---------------------------------------------------------------------------------------------------------


def test_work_inherits_the_interest(pool: Threads) -> None:
    interest = Interest("digits")

    def outer() -> tuple[Interest | None, Interest | None]:
        return waiting.current(), pool.submit(waiting.current).result(240)

    assert pool.submit_in(interest, outer).result(240) == (interest, interest)
    assert waiting.current() is None and pool.submit(waiting.current).result(240) is None


@pytest.mark.parametrize("what", ["lock", "condition", "future"])
def test_waits_end_with_the_work(pool: Threads, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.01)
    lock, condition, never = threading.Lock(), threading.Condition(), Future[int]()
    interest = Interest("dataset 'digits'")

    def wait() -> None:
        if what == "lock":
            with waiting.holding(lock):
                raise AssertionError("it was held")
        if what == "condition":
            with condition:
                while True:
                    waiting.wait(condition)
        waiting.result(never)

    with lock:
        work = pool.submit_in(interest, wait)
        time.sleep(0.05)
        interest.set()  # only stops at its next step
        time.sleep(0.05)
        assert not work.done()
        interest.give_up()
        with pytest.raises(StoreUnavailableError, match="'digits'"):
            work.result(240)


def test_a_timeout_of_the_work_itself_is_its_result() -> None:
    failed: Future[int] = Future()
    failed.set_exception(TimeoutError("its own"))
    with waiting.working_in(Interest()), pytest.raises(TimeoutError, match="its own"):
        waiting.result(failed)


def test_resting_is_no_standing_still() -> None:
    interest = Interest()
    began = interest.moved_at
    assert interest.standing_still(began + 5) == 5
    with waiting.working_in(interest), waiting.paused():
        assert interest.standing_still(began + 5) == 0
    assert interest.standing_still(interest.moved_at + 3) == 3


def test_actions_at_giving_up() -> None:
    interest, done = Interest(), list[int]()
    with interest.when_given_up(lambda: done.append(0)):
        pass
    with interest.when_given_up(lambda: done.append(1)):
        interest.give_up()
        interest.give_up()
    with waiting.working_in(interest), waiting.when_given_up(lambda: done.append(2)):
        assert done == [1, 2]
    assert done == [1, 2] and interest.is_set()


def test_a_clock_is_not_busy_with_what_was_given_up() -> None:
    clock, interest = BusyClock(), Interest()
    with waiting.working_in(interest), clock.running():
        interest.give_up()
        busy = clock.seconds
        time.sleep(0.02)
        assert clock.seconds == busy
    with clock.running():
        time.sleep(0.01)
    assert clock.seconds >= busy + 0.01


def test_what_comes_in_is_movement() -> None:
    interest = Interest()
    interest.moved_at -= 100
    with waiting.working_in(interest):
        waiting.moved()
    assert interest.standing_still(time.monotonic()) < 50
    waiting.moved()


def test_no_pool_that_is_joined_at_exit_is_left_in_the_server() -> None:
    """The interpreter waits for threads of concurrent.futures, whatever they wait for."""
    folder = Path(waiting.__file__).parent
    wrong = [p.name for p in folder.glob("server/**/*.py") if "ThreadPoolExecutor" in p.read_text()]
    assert not wrong, f"{wrong}: use hapi.process.threads.Threads, which gets over threads that hang"


def test_a_thread_outlives_lack_of_memory_around_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(work: object) -> bool:
        raise MemoryError

    pool = Threads(1, "test")
    with monkeypatch.context() as patched:
        patched.setattr(Work, "set_running_or_notify_cancel", short)
        with pytest.raises(MemoryError):
            pool.submit(lambda: 1).result(240)
    assert pool.submit(lambda: 2).result(240) == 2
    pool.close()
