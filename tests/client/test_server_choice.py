"""Which of several servers gets a request: by a simulated crowd of requests, without a clock."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from hapi.client.transport.server_choice import AS_GOOD, DOUBT_SECONDS, Asked, ServerLoad, soonest

Speed = Callable[[int, float], float]
"""Seconds for a request by a server's number and the time."""


class Course:
    """A closed loop of ``window`` requests against servers that work one by one, or side by side."""

    def __init__(self, count: int, speed: Speed, *, window: int = 16, serial: bool = True) -> None:
        self.loads = [ServerLoad() for _ in range(count)]
        self.speed, self.window, self.serial = speed, window, serial
        self.answers: list[tuple[float, int, float]] = []
        """Time of each answer, its server, and how long it took."""
        self._free_at = [0.0] * count

    def run(self, seconds: float, choose: Callable[[list[ServerLoad], float], ServerLoad]) -> Course:
        pending: list[tuple[float, int, int, Asked]] = []
        now, number = 0.0, 0
        while now < seconds:
            while len(pending) < self.window:
                load = choose(self.loads, now)
                place = self.loads.index(load)
                load.begin()
                begin = max(now, self._free_at[place]) if self.serial else now
                self._free_at[place] = begin + self.speed(place, now)
                heapq.heappush(pending, (self._free_at[place], number, place, load.asked(0, 8, now)))
                number += 1
            now, _, place, asked = heapq.heappop(pending)
            self.loads[place].answered(asked, now)
            self.loads[place].end(now, asked)
            self.answers.append((now, place, now - asked.at))
        return self

    def shares(self, since: float = 0.0) -> list[float]:
        """Share of each server in the answers."""
        counts = Counter(place for at, place, _ in self.answers if at >= since)
        return [counts[place] / counts.total() for place in range(len(self.loads))]

    def longest_but_a_hundredth(self) -> float:
        """The 99th percentile of an answer's seconds."""
        times = sorted(took for _, _, took in self.answers)
        return times[int(0.99 * len(times))]

    def rate(self, since: float = 0.0) -> float:
        """Answers a second."""
        kept = [at for at, _, _ in self.answers if at >= since]
        return len(kept) / (kept[-1] - since)


def by_both(loads: list[ServerLoad], now: float) -> ServerLoad:
    return min(soonest(loads, 0, now), key=lambda load: load.in_flight)


def by_flight(loads: list[ServerLoad], now: float) -> ServerLoad:
    return min(loads, key=lambda load: load.in_flight)


def test_equal_servers_share_the_work() -> None:
    shares = Course(4, lambda place, now: 0.1).run(60, by_both).shares()
    assert shares == pytest.approx([0.25] * 4, abs=0.03)


def test_without_measurements_the_least_busy_are_asked() -> None:
    loads = [ServerLoad(in_flight=n) for n in (2, 0, 1, 0)]
    assert soonest(loads, 0, 0.0) == [loads[1], loads[3]]


@pytest.mark.slow_except("one by one")
@pytest.mark.parametrize("serial", [True, False], ids=["one by one", "side by side"])
def test_a_straggler_gets_its_share(serial: bool) -> None:
    """Ten times as slow as three others. By requests in flight alone, as many wait for it as for another."""

    def slow(place: int, now: float) -> float:
        return 1.0 if place == 3 else 0.1

    both = Course(4, slow, serial=serial).run(200, by_both)
    flight = Course(4, slow, serial=serial).run(200, by_flight)
    assert both.shares()[3] <= 1 / 31 < flight.shares()[3] * 1.1
    assert both.longest_but_a_hundredth() < flight.longest_but_a_hundredth() / 4
    assert both.rate() > 0.95 * flight.rate()


def test_speeds_of_any_ratio_are_used_to_the_full() -> None:
    """Servers of 1, 2, 4 and 8 requests a second: nearly 15 together, each as it can."""
    course = Course(4, lambda place, now: 1 / 2**place).run(200, by_both)
    assert course.rate(20) > 0.93 * 15
    assert course.shares(20)[3] == pytest.approx(8 / 15, abs=0.05)


def test_one_that_becomes_quick_is_found_again() -> None:
    """And one that becomes slow is left."""

    def changing(place: int, now: float) -> float:
        return 2.0 if (place == 0) == (now < 100) else 0.1

    course = Course(2, changing, window=4).run(400, by_both)
    first = [at for at, place, _ in course.answers if place == 0 and at < 100]
    assert max(after - before for before, after in pairwise(first)) < 8 * DOUBT_SECONDS
    assert course.shares(200)[0] > 0.9


def test_other_kinds_are_measured_apart() -> None:
    one, other = ServerLoad(), ServerLoad()
    for load, seconds in ((one, 5.0), (other, 0.5)):
        load.begin()
        load.answered(note := load.asked(1, 10, 0.0), seconds)
        load.end(seconds, note)
    assert soonest([one, other], 1, 5.0) == [other]
    assert soonest([one, other], 2, 5.0) == [one, other]


def test_a_small_rest_of_an_answer_counts_little() -> None:
    load = ServerLoad()
    load.begin()
    for samples, seconds in ((100, 1.0), (1, 0.5)):
        load.answered(load.asked(0, samples, 0.0), seconds)
    found = load.sample_seconds(0)
    assert found is not None and found < 0.02
    load.answered(load.asked(0, 0, 0.0), 100.0)
    assert load.sample_seconds(0) == found


def test_silence_tells_as_an_answer_does() -> None:
    """Two of each server's requests are in flight; one is silent for longer than its answers took."""
    quick, slow = ServerLoad(), ServerLoad()
    for load in (quick, slow):
        load.begin()
        load.answered(note := load.asked(0, 8, 0.0), 1.0)
        load.end(1.0, note)
    notes = []
    for load in (slow, slow, quick, quick):
        load.begin()
        notes.append(load.asked(0, 8, 10.0 if load is slow else 13.0))
    assert soonest([quick, slow], 0, 11.0) == [quick, slow]
    assert soonest([quick, slow], 0, 14.0) == [quick]
    assert soonest([quick, slow], 1, 14.0) == [quick, slow], "of the other kind nothing is known"
    for load, note in zip((slow, slow), notes[:2], strict=True):
        load.end(14.0, note)
    assert slow.overdue_seconds(0, 99.0) == 0.0 and soonest([quick, slow], 0, 14.0) == [slow]


def test_the_one_whose_oldest_request_was_sent_first_is_free_first() -> None:
    loads = [ServerLoad() for _ in range(3)]
    for load, at in zip(loads, (2.0, 1.0, 3.0), strict=True):
        load.begin()
        load.asked(0, 8, at)
    assert min(loads, key=lambda load: load.until_free) is loads[1]
    loads[1].begin()
    assert min(loads, key=lambda load: load.until_free) is loads[0]
    assert ServerLoad().until_free < loads[0].until_free


def test_about_equal_ones_are_all_returned() -> None:
    loads = [ServerLoad() for _ in range(3)]
    for load, seconds in zip(loads, (1.0, AS_GOOD * 0.99, AS_GOOD * 1.05), strict=True):
        load.begin()
        load.answered(note := load.asked(0, 1, 0.0), seconds)
        load.end(seconds, note)
    assert soonest(loads, 0, 1.3) == loads[:2]


# -- beside Prequal's rule -----------------------------------------------------------------------------------------


class Tellings:
    """What each server of a :class:`Course` told with its last answers: requests there, and their median seconds."""

    def __init__(self, count: int) -> None:
        self.depths: list[int] = [0] * count
        self.seconds: list[list[float]] = [[] for _ in range(count)]
        self.seen: list[int] = []

    def rule(self, loads: list[ServerLoad], now: float) -> ServerLoad:
        """The quickest of those that are not hot, as Prequal's defaults have it; the least busy of hot ones alone."""
        fresh = [number for number, told in enumerate(self.seconds) if not told]
        if fresh:
            return min((loads[number] for number in fresh), key=lambda load: load.in_flight)
        limit = sorted(self.seen[-64:])[int(2**-0.25 * (len(self.seen[-64:]) - 1))]
        cold = [number for number, load in enumerate(loads) if load.in_flight <= limit]
        if not cold:
            return min(loads, key=lambda load: load.in_flight)
        return loads[
            min(cold, key=lambda number: sorted(self.seconds[number])[len(self.seconds[number]) // 2])
        ]

    def follow(self, course: Course) -> Course:
        """Note what the answers tell, each at its end."""
        for number, load in enumerate(course.loads):
            answered = load.answered

            def telling(asked: Asked, now: float, number: int = number, tell: Any = answered) -> None:
                self.depths[number] = course.loads[number].in_flight - 1
                self.seen.append(self.depths[number])
                self.seconds[number] = [*self.seconds[number], now - asked.at][-16:]
                tell(asked, now)

            load.answered = telling  # type: ignore[method-assign]
        return course


def test_prequals_rule_on_a_short_list_is_worse_than_answer_times() -> None:
    """Told depths and latencies, known at once: the quickest of four is asked until it is slower than the slow one."""

    def slow(place: int, now: float) -> float:
        return 1.0 if place == 3 else 0.1

    tellings = Tellings(4)
    theirs = tellings.follow(Course(4, slow)).run(200, tellings.rule)
    ours = Course(4, slow).run(200, by_both)
    assert theirs.longest_but_a_hundredth() > 1.5 * ours.longest_but_a_hundredth()
    assert theirs.rate() == pytest.approx(ours.rate(), rel=0.05)
