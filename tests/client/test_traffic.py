"""What a pass measures at the border: the link's rate from the kernel's counter, and sums per split."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.reports import report_with
from support.threads import at_once

from hapi.client.loading import link_stats
from hapi.client.loading.link_stats import ANSWERS_KEPT, Forward, Traffic
from hapi.client.transport import link_meter
from hapi.client.transport.link_meter import RATES_KEPT, LinkMeter
from hapi.errors import BadRequestError
from hapi.wire.report import STAGES, RequestReport


class Link:
    """A clock and a kernel counter that only move when told."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.arrived: int | None = 5000

    def passes(self, seconds: float, nbytes: int = 0) -> None:
        self.now += seconds
        if self.arrived is not None:
            self.arrived += nbytes


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    made = Link()
    clock = SimpleNamespace(monotonic=lambda: made.now, thread_time=lambda: made.now / 10)
    for module in (link_stats, link_meter):
        monkeypatch.setattr(module, "time", clock)
    return made


def meter_of(link: Link) -> LinkMeter:
    return LinkMeter(lambda: link.arrived)


def test_one_payload_is_one_stretch(link: Link) -> None:
    meter = meter_of(link)
    link.passes(7.0, 999)  # before its beginning
    meter.begin()
    link.passes(0.5, 4000)
    meter.end(1)  # what was read of it does not matter when the kernel tells
    assert meter.rates() == [(4000, 0.5)]
    link.passes(9.0, 1_000_000)  # nobody receives
    assert meter.rates() == [(4000, 0.5)]


def test_what_comes_at_once_after_a_pause_is_not_the_links_rate(link: Link) -> None:
    """A token bucket that has filled up meanwhile lets a burst pass."""
    meter = meter_of(link)
    for _ in range(2):
        meter.begin()
        link.passes(0.001, 64 << 10)
        meter.flowing()
        link.passes(0.1, 80 << 10)
        meter.end(144 << 10)
        link.passes(5.0, 0)
    assert meter.rates() == [(144 << 10, pytest.approx(0.1 * 144 / 80))] * 2
    meter.begin()
    link.passes(0.02, 80 << 10)  # the first had come before anybody looked
    meter.flowing()
    link.passes(0.1, 80 << 10)
    meter.end(144 << 10)
    assert meter.rates()[2:] == [(144 << 10, pytest.approx(0.1 * 144 / 80))]


def test_what_follows_must_be_enough_to_tell_a_rate(link: Link) -> None:
    meter = meter_of(link)
    meter.begin()
    link.passes(0.4, 64 << 10)
    meter.flowing()
    link.passes(0.1, 1 << 10)
    meter.end(65 << 10)
    assert meter.rates() == [(65 << 10, 0.5)]
    link.arrived = None  # what was read is told at the end only
    meter.begin()
    link.passes(0.4)
    meter.flowing()
    link.passes(0.1)
    meter.end(200 << 10)
    assert meter.rates()[1:] == [(200 << 10, 0.5)]
    meter.flowing()  # nobody receives
    link.arrived = 1 << 30
    meter.begin()
    link.passes(0.4, 64 << 10)
    meter.flowing()
    link.passes(0.1)
    link.arrived = None  # a connection is closed just now
    meter.end(200 << 10)
    assert meter.rates()[2:] == [(200 << 10, 0.5)]


def test_a_link_that_goes_on_has_no_first_part(link: Link) -> None:
    meter = meter_of(link)
    meter.begin()
    meter.begin()
    link.passes(0.5, 100 << 10)
    meter.end(100 << 10)
    link.passes(0.25, 100 << 10)
    meter.flowing()
    link.passes(0.25, 150 << 10)
    meter.end(250 << 10)
    assert meter.rates() == [(100 << 10, 0.5), (250 << 10, 0.5)]


def test_payloads_at_the_same_time_share_the_link(link: Link) -> None:
    """Two at once are one stretch while it is short, and the first's end begins another once it is long."""
    meter = meter_of(link)
    meter.begin()
    link.passes(0.02, 100)
    meter.begin()
    link.passes(0.03, 300)
    meter.end(200)
    assert meter.rates() == []
    link.passes(0.01, 100)
    meter.end(300)
    assert meter.rates() == [(500, pytest.approx(0.06))]
    meter.begin()
    meter.begin()
    link.passes(0.25, 1000)
    meter.end(1000)
    link.passes(0.5, 9000)
    meter.end(9000)
    assert meter.rates()[1:] == [(1000, 0.25), (9000, 0.5)]


def test_where_the_kernel_does_not_tell_what_was_read_counts(link: Link) -> None:
    link.arrived = None
    meter = meter_of(link)
    meter.begin()
    link.passes(0.5)
    meter.end(800)
    assert meter.rates() == [(800, 0.5)]


@pytest.mark.parametrize("before", [10**12, None])
def test_a_counter_that_comes_or_goes_in_between_is_not_mixed_with_what_was_read(
    link: Link, before: int | None
) -> None:
    """A connection that is closed just now hides the kernel's count for a moment."""
    link.arrived = before
    meter = meter_of(link)
    meter.begin()
    link.passes(0.5)
    link.arrived = None if before else 10**12
    meter.end(800)
    assert meter.rates() == [(800, 0.5)]


def test_a_counter_that_falls_is_no_rate(link: Link) -> None:
    meter = meter_of(link)
    meter.begin()
    link.passes(0.5, -3000)
    meter.end(800)
    assert meter.rates() == []
    meter.begin()
    link.passes(0.5, 500)
    meter.end(500)
    assert meter.rates() == [(500, 0.5)]


def test_no_time_or_no_bytes_is_no_rate(link: Link) -> None:
    meter = meter_of(link)
    meter.begin()
    link.passes(0.0, 500)
    meter.end(500)
    meter.begin()
    link.passes(0.5, 0)
    meter.end(0)
    assert meter.rates() == []


def test_only_what_ended_since_is_told(link: Link) -> None:
    meter = meter_of(link)
    for nbytes in (100, 200, 300):
        meter.begin()
        link.passes(0.5, nbytes)
        meter.end(nbytes)
    assert meter.rates(1001.0) == [(300, 0.5)]
    assert meter.rates(1000.5) == [(200, 0.5), (300, 0.5)]
    assert meter.rates(link.now) == []


def test_rates_are_bounded(link: Link) -> None:
    meter = meter_of(link)
    for _ in range(RATES_KEPT + 10):
        meter.begin()
        link.passes(0.5, 1)
        meter.end(1)
    assert len(meter.rates()) == RATES_KEPT


def test_many_threads_at_once() -> None:
    """Every byte is in exactly one stretch, whoever ends when."""
    lock, total = threading.Lock(), 0

    def arrived() -> int:
        with lock:
            return total

    meter = LinkMeter(arrived)

    def receive() -> None:
        nonlocal total
        for _ in range(200):
            meter.begin()
            with lock:
                total += 10
            meter.end(10)

    at_once(8, lambda _: receive())
    assert sum(n for n, _ in meter.rates()) <= 8 * 200 * 10
    assert all(n > 0 and s > 0 for n, s in meter.rates())
    meter.begin()
    with lock:
        total += 77
    meter.end(77)
    assert meter.rates()[-1][0] == 77  # nobody is left half begun


# -- sums ----------------------------------------------------------------------------------------------------------

REPORT = report_with(
    work=(10.0, 12.0), others=(4.0, 5.0), process=(20.0, 23.0), clock=(100.0, 104.0), layers=(0.5, 0.25)
)


def test_requests_add_up_by_split() -> None:
    traffic = Traffic()
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    traffic.answered(2, 6, replace(REPORT, layers=(), cos_batch=4), 500, 0.05, 0.1)
    traffic.answered(0, 3, replace(REPORT, layers=(), cos_batch=0, busy=(1.5, 9.0)), 500, 0.05, 0.1)
    share = traffic.shares()[2]
    assert (share.requests, share.samples, share.cos_batch) == (2, 16, 16)
    assert share.server_cpu_seconds["forward"] == 0.5 and share.server_wall_seconds["read"] == 1.0
    assert (share.server_others_seconds, share.server_clock_seconds) == (2.0, 8.0)
    assert (share.server_work, share.server_process) == ({"a": (10.0, 12.0)}, {"a": (20.0, 23.0)})
    assert (traffic.requests, traffic.cos_batch, traffic.stages()["send"]) == (3, 16, 1.5)
    assert traffic.server_seconds() == 8.0  # one server: from its first request's begin to its last one's end


def test_clocks_that_a_restart_set_back_count_nothing_below_zero() -> None:
    traffic = Traffic()
    back = (50.0, 3.0)
    traffic.answered(2, 10, replace(REPORT, work=back, others=back, process=back, clock=back), 500, 0.05, 0.1)
    share = traffic.shares()[2]
    assert share.server_work == share.server_process == {"a": (50.0, 50.0)}
    assert share.server_others_seconds == share.server_clock_seconds == 0
    traffic.answered(2, 10, replace(REPORT, server="b", busy=(0.0, 0.5)), 500, 0.05, 0.1)  # the new process
    assert traffic.server_seconds() == 1.0  # each by its own clock


def test_a_copy_of_the_sums_does_not_change() -> None:
    traffic = Traffic()
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    before = traffic.shares()
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    traffic.answered(3, 10, REPORT, 500, 0.05, 0.1)
    assert list(before) == [2] and before[2].samples == 10
    assert before[2].server_cpu_seconds["forward"] == 0.25


def test_forward_passes_are_known_by_request() -> None:
    traffic = Traffic()
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    traffic.answered(3, 6, replace(REPORT, layers=(), pages=700), 500, 0.05, 0.1)
    traffic.answered(0, 6, replace(REPORT, layers=(), cos_batch=0), 500, 0.05, 0.1)  # stored bytes
    timed = Forward(split=2, samples=10, seconds=0.5, cpu_seconds=0.25, pages=12, layers=(0.5, 0.25))
    assert traffic.take_forwards() == [timed, replace(timed, split=3, samples=6, pages=700, layers=())]
    assert traffic.take_forwards() == []
    for samples in range(ANSWERS_KEPT + 5):
        traffic.answered(2, samples, REPORT, 500, 0.05, 0.1)
    assert [forward.samples for forward in traffic.take_forwards()] == list(range(5, ANSWERS_KEPT + 5))


def test_frames_arrive(link: Link) -> None:
    traffic = Traffic(lambda: link.arrived)
    arrival = traffic.arrival(3, "")
    arrival.begin()
    link.passes(0.5, 700)
    arrival.end(700)
    refused = traffic.arrival(3, "")
    refused.end(90)  # a header that was refused: no payload began
    share = traffic.shares()[3]
    assert (share.bytes_received, share.receive_cpu_seconds) == (790, pytest.approx(0.05))
    assert traffic.link.rates() == [(700, 0.5)] and traffic.bytes_received == 790


def test_bounds_of_what_crossed(link: Link) -> None:
    """A frame is not sent before it is made: the server's seconds before that were none of the link's."""
    traffic = Traffic(lambda: link.arrived)
    one = replace(REPORT, first=0.7, cos_batch=10)
    traffic.answered(2, 10, one, 1000, 0.8, 1.0)
    assert traffic.link.bounds() == [(1000, pytest.approx(1.0 - 0.7))]
    two = replace(one, cos_batch=9)  # frames: the first went before the second was made
    traffic.answered(2, 10, two, 1000, 0.8, 1.0)
    traffic.answered(2, 10, one, 1000, 0.1, 0.2)  # clocks that do not agree
    assert traffic.link.bounds()[1:] == [(1000, 1.0), (1000, pytest.approx(0.01))]
    traffic.answered(0, 10, replace(one, cos_batch=0), 1000, 0.1, 0.2)
    assert traffic.link.bounds()[3:] == [(1000, 0.2)] and traffic.link.bounds(link.now) == []


def test_a_requests_way_is_the_shortest_that_one_took() -> None:
    """What came later waited for other answers, which is the link's work and counted as that."""
    traffic = Traffic()
    for began, first in ((0.9, 0.5), (0.75, 0.5), (2.0, 0.25)):
        traffic.answered(2, 10, replace(REPORT, first=first), 1000, began, 3.0)
    traffic.answered(3, 10, replace(REPORT, first=0.5), 1000, 0.25, 3.0)  # clocks that do not agree
    shares = traffic.shares()
    assert shares[2].request_seconds == pytest.approx(0.25) and shares[3].request_seconds == 0.0
    assert Traffic().shares() == {}


# -- what a server may say -----------------------------------------------------------------------------------------

HOSTILE: list[Any] = [float("nan"), "nan", None, {}, [], "x", "1e", [[1]]]
EXTREME: list[Any] = [float("inf"), -float("inf"), 1e300, -1e300, 10**400, -5]


def reported(field: str, value: Any) -> dict[str, Any]:
    document = REPORT.to_json()
    old = document[field]
    if isinstance(old, dict):
        key = {"tier": "processors"}.get(field, "forward")
        return {**document, field: {**old, key: value}}
    return {**document, field: [value, *old[1:]] if isinstance(old, list) else value}


FIELDS = (
    *(
        "seconds",
        "cpu",
        "busy",
        "work",
        "others",
        "process",
        "clock",
        "pages",
        "first",
        "cos_batch",
        "layers",
    ),
    "tier",
)


@pytest.mark.parametrize("field", FIELDS)
def test_a_report_that_is_no_number_is_refused(field: str) -> None:
    for value in HOSTILE:
        with pytest.raises(BadRequestError, match="the server's report is malformed"):
            RequestReport.from_json(reported(field, value))


@pytest.mark.parametrize("field", FIELDS)
def test_a_report_out_of_this_world_is_drawn_in(field: str) -> None:
    """Infinite, negative, or beyond all measure: a number that can be planned with, or the report is refused."""
    for value in EXTREME:
        traffic = Traffic()
        try:
            traffic.answered(2, 10, RequestReport.from_json(reported(field, value)), 500, 0.05, 0.1)
        except BadRequestError:
            continue
        share = traffic.shares()[2]
        (forward,) = traffic.take_forwards()
        sums = [*share.server_cpu_seconds.values(), *share.server_wall_seconds.values(), *forward.layers]
        sums += [forward.seconds, forward.cpu_seconds, forward.pages, share.request_seconds or 0.0]
        sums += [
            end - start
            for spans in (share.server_work, share.server_process)
            for start, end in spans.values()
        ]
        sums += [share.server_others_seconds]
        assert all(0 <= s <= 1e9 for s in [*sums, share.server_clock_seconds, share.cos_batch])
        assert share.tier is not None and 1 <= share.tier.processors <= 65536


def test_stages_of_other_names_are_left_away() -> None:
    document = REPORT.to_json()
    for i in range(50):
        document["cpu"][f"invented-{i}"] = 1.0
    report = RequestReport.from_json(document)
    assert sorted(report.cpu) == sorted(STAGES)
