"""The meter: sums over passes, split by split, and what lies between two looks at them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.reports import report_with

from hapi.client.loading.link_stats import Traffic
from hapi.client.planning import meter as module
from hapi.client.planning.counts import ClientCounts, SplitCounts, TrafficCounts, Work, merged
from hapi.client.planning.meter import Meter
from hapi.client.planning.observe import LARGEST_FACTOR, observed_between
from hapi.profiler.fit import Observed, Tier
from hapi.wire.report import STAGES

REPORT = report_with()
CLIENT = Tier(processors=2)


class Clock:
    """The three clocks of a process with one thread."""

    def __init__(self) -> None:
        self.thread = 100.0
        self.process = 500.0

    def works(self, seconds: float, others: float = 0.0) -> None:
        """The main thread works; ``others``: threads beside it meanwhile."""
        self.thread += seconds
        self.process += seconds + others


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    fake = SimpleNamespace(thread_time=lambda: made.thread, process_time=lambda: made.process)
    monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(module, "work_clock", lambda device: fake.thread_time)
    yield made


def meter_with(traffic: Traffic) -> Meter:
    meter = Meter(torch.device("cpu"))
    meter.follow(traffic)
    return meter


def between(meter: Meter, before: object = None) -> dict[int, Observed]:
    return observed_between(before or {}, meter.snapshot(), meter.servers, CLIENT)  # type: ignore[arg-type]


def work_on(meter: Meter, clock: Clock, split: int, samples: int, rest: float, step: float) -> None:
    with meter.working(split, "suffix", samples):
        clock.works(rest)
    with meter.working(split, "step", samples):
        clock.works(step)
    meter.batch(split, samples)


def test_what_a_batch_cost(clock: Clock) -> None:
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.received(2, 1000, 0.125)
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    clock.works(0.0, others=1.125)  # the receiving thread: 0.125 of it in payloads
    work_on(meter, clock, 2, 10, rest=2.0, step=3.0)
    o = between(meter)[2]
    assert (o.split, o.batches, o.samples, o.requests, o.bytes_received, o.cos_batch) == (
        2,
        1,
        10,
        1,
        1000,
        16,
    )
    assert (o.suffix_seconds, o.step_seconds, o.receive_seconds) == (2.0, 3.0, 0.125)
    assert o.client_other_seconds == pytest.approx(1.0)
    assert o.server_cpu["forward"] == 0.25 and o.server_wall["read"] == 0.5
    assert o.request_seconds == pytest.approx(0.05 - 0.03125)
    assert "model" not in o.server_cpu, "where layers stay loaded, loading them is no part of a request"
    assert o.server_factor == 1.5 and o.server == Tier(processors=2)


def test_what_a_server_needs_beside_its_requests_is_seen_over_all_of_them(clock: Clock) -> None:
    """Work counts when a stage is over, also what was under way when a request came: each alone sees too much of it."""
    traffic = Traffic()
    meter = meter_with(traffic)
    for number in range(4):  # each 1 s of work and 1.25 s of the processor, the next one comes in its middle
        first = max(0, number - 1)  # those before it that are over
        work, process = (float(first), number + 1.0), (1.25 * (first + 0.5), 1.25 * (number + 1))
        traffic.answered(2, 10, replace(REPORT, work=work, process=process), 500, 0.05, 0.1)
    work_on(meter, clock, 2, 40, 1.0, 1.0)
    assert between(meter)[2].server_factor == pytest.approx((1.25 * 4 - 1.25 * 0.5) / 4)
    restarted = replace(REPORT, server="b", work=(0.0, 1.0), process=(0.0, 1.0))
    traffic.answered(2, 10, restarted, 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 1.0, 1.0)
    assert between(meter)[2].server_factor == pytest.approx((1.25 * 4 - 1.25 * 0.5 + 1.0) / 5)


def test_samples_out_of_the_cache(clock: Clock) -> None:
    """They count as samples of the client, and as none of the server and the link."""
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.received(0, 1000, 0.125)
    traffic.answered(0, 4, REPORT, 500, 0.05, 0.1)
    traffic.cached(0, 6, 1500)
    work_on(meter, clock, 0, 10, rest=2.0, step=3.0)
    o = between(meter)[0]
    assert (o.samples, o.cached, o.crossed, o.bytes_received) == (10, 6, 4, 1000)
    assert (o.suffix_seconds, o.step_seconds) == (2.0, 3.0)
    assert traffic.link.rates() == [] and (traffic.cached_samples, traffic.cached_bytes) == (6, 1500)
    assert traffic.bytes_received == 1000
    meter = meter_with(alone := Traffic())
    alone.cached(0, 10, 2500)
    work_on(meter, clock, 0, 10, rest=2.0, step=3.0)
    o = between(meter)[0]
    assert (o.samples, o.crossed, o.requests, o.suffix_seconds) == (10, 0, 0, 2.0)


def test_a_server_that_loads_for_every_request_pays_for_it(clock: Clock) -> None:
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.answered(2, 10, replace(REPORT, tier=replace(REPORT.tier, reuse=False)), 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 1.0, 1.0)
    assert between(meter)[2].server_cpu["model"] == 0.25


def test_several_servers_count_as_one_that_does_their_work_alone(clock: Clock) -> None:
    """Their work is shared, their waiting is not: a request queues and awaits the store as long as on one."""
    halves: dict[str, Any] = {
        "seconds": dict.fromkeys(STAGES, 0.25),
        "cpu": dict.fromkeys(STAGES, 0.125),
        "work": (0.0, 1.0),
        "process": (0.0, 1.5),
    }
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.answered(2, 5, replace(REPORT, **halves), 500, 0.05, 0.1)
    traffic.answered(2, 5, replace(REPORT, server="b", **halves), 500, 0.05, 0.1)
    traffic.answered(0, 1, REPORT, 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 1.0, 1.0)
    o = between(meter)[2]
    assert o.server.count == 2
    assert o.server_cpu["forward"] == 0.125
    assert o.server_wall["forward"] == 0.25
    assert o.server_wall["read"] - o.server_cpu["read"] == 0.25  # as with one
    assert o.server_factor == 1.5 and o.step_seconds == 1.0


def test_servers_are_counted_by_their_answers(clock: Clock) -> None:
    """One behind a balancer counts, one that died does so no more, also in a pass that has just begun."""
    meter = Meter(torch.device("cpu"), recent=8)

    def counted(servers: str) -> int:
        for server in servers:
            traffic.answered(2, 1, replace(REPORT, server=server), 500, 0.05, 0.1)
        meter.snapshot()
        return meter.servers[2].count

    meter.follow(traffic := Traffic())
    assert counted("a") == 1
    assert counted("bab") == 2
    assert counted("cacbac") == 3
    assert counted("ababab") == 2, "c has died"
    meter.follow(traffic := Traffic())
    assert counted("a") == 2, "the pass before ended with both"
    assert counted("aaaaaaa") == 1


def test_a_restarted_server_is_no_second_one(clock: Clock) -> None:
    meter = Meter(torch.device("cpu"))
    meter.follow(traffic := Traffic())
    for servers, count in (("aaaa", 1), ("b", 1), ("bb", 1), ("cbcb", 2), ("d", 1), ("bd", 2)):
        for server in servers:
            traffic.answered(2, 1, replace(REPORT, server=server), 500, 0.05, 0.1)
        meter.snapshot()
        assert meter.servers[2].count == count, servers


def test_requests_ahead_are_evened_out(clock: Clock) -> None:
    """The servers worked on 30 samples, this side on 10 of them: its seconds count as if for 30."""
    traffic = Traffic()
    meter = meter_with(traffic)
    for _ in range(3):
        traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, rest=2.0, step=3.0)
    o = between(meter)[2]
    assert (o.samples, o.suffix_seconds, o.step_seconds) == (30, 6.0, 9.0)


def test_the_shortest_way_of_all_passes_counts(clock: Clock) -> None:
    """Also of passes before, which is no sum of theirs."""
    meter, before = meter_with(Traffic()), None
    for began in (0.5, 0.25, 0.75):
        traffic = Traffic()
        meter.follow(traffic)
        before = meter.snapshot()
        traffic.answered(2, 10, REPORT, 500, began, 1.0)
        work_on(meter, clock, 2, 10, rest=1.0, step=1.0)
    assert between(meter, before)[2].request_seconds == pytest.approx(0.25 - 0.03125)


def test_splits_are_told_apart(clock: Clock) -> None:
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.answered(0, 4, REPORT, 500, 0.05, 0.1)
    traffic.answered(3, 6, REPORT, 500, 0.05, 0.1)
    traffic.answered(4, 6, REPORT, 500, 0.05, 0.1)  # nothing of it was handed out yet
    work_on(meter, clock, 0, 4, 1.0, 0.5)
    work_on(meter, clock, 3, 6, 2.0, 0.5)
    found = between(meter)
    assert sorted(found) == [0, 3]
    assert (found[0].suffix_seconds, found[3].suffix_seconds) == (1.0, 2.0)


def test_only_what_lies_between_counts(clock: Clock) -> None:
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 9.0, 9.0)
    before = meter.snapshot()
    assert between(meter, before) == {}
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 1.0, 2.0)
    o = between(meter, before)[2]
    assert (o.samples, o.suffix_seconds, o.step_seconds, o.cos_batch) == (10, 1.0, 2.0, 16)
    assert before[2].traffic.samples == 10, "a snapshot does not change"


def test_passes_add_up_but_for_the_largest_batch(clock: Clock) -> None:
    """Three epochs with a COS batch of 16 have one of 16, not of 48."""
    traffic = Traffic()
    meter = meter_with(traffic)
    for number in range(3):
        traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
        work_on(meter, clock, 2, 10, 1.0, 1.0)
        traffic = Traffic()
        if number < 2:
            meter.follow(traffic)
    o = between(meter)[2]
    assert (o.samples, o.requests, o.cos_batch) == (30, 3, 16)


def test_the_seconds_between_two_passes_are_nobodys(clock: Clock) -> None:
    traffic = Traffic()
    meter = meter_with(traffic)
    clock.works(50.0)
    meter.follow(traffic := Traffic())
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 1.0, 1.0)
    assert between(meter)[2].client_other_seconds == pytest.approx(0.0)


def test_timed_layers_count_apart(clock: Clock) -> None:
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    with meter.working(2, "timed", 10):
        clock.works(4.0)
    meter.layers(2, [1.0, 2.5])
    meter.batch(2, 10)
    only = between(meter)[2]
    assert (only.client_layers, only.client_timed, only.suffix_seconds) == ((1.0, 2.5), 10, 4.0)
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, rest=3.0, step=0.0)
    both = between(meter)[2]
    assert both.suffix_seconds == 6.0  # 20 samples at the rate of those that were not timed


def test_threads_that_help_the_main_one_are_not_others(clock: Clock) -> None:
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    with meter.working(2, "suffix", 10):
        clock.works(1.0, others=3.0)  # four threads
    meter.batch(2, 10)
    found = observed_between({}, meter.snapshot(), meter.servers, Tier(threads=4))
    assert found[2].client_other_seconds == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("others", "processors", "share"),
    [(0.0, 2, 1.0), (0.7, 2, 1.0), (2.0, 2, 0.75), (9.0, 2, 0.5), (2.0, 1, 0.5)],
)
def test_what_others_leave_of_the_server(clock: Clock, others: float, processors: int, share: float) -> None:
    """By their CPU seconds over the clock's 4 seconds and the processors; a little is nothing, half is left."""
    traffic = Traffic()
    meter = meter_with(traffic)
    tier = replace(REPORT.tier, processors=processors)
    traffic.answered(2, 10, replace(REPORT, others=(1.0, 1.0 + others), tier=tier), 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 1.0, 1.0)
    assert between(meter)[2].share == pytest.approx(share)


def test_answers_that_a_server_did_not_compute_do_not_make_it_fast(clock: Clock) -> None:
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    kept = replace(REPORT, seconds=dict.fromkeys(STAGES, 0.001), cpu=dict.fromkeys(STAGES, 0.001), kept=6)
    traffic.answered(2, 30, kept, 500, 0.05, 0.1)
    work_on(meter, clock, 2, 40, 1.0, 1.0)
    found = between(meter)[2]
    assert found.samples == 40 and found.server_cpu["forward"] == 4 * REPORT.cpu["forward"]
    assert found.server_wall["forward"] == 4 * REPORT.seconds["forward"] and found.cos_batch == 16
    assert [f.samples for f in traffic.take_forwards()] == [10]
    before = meter.snapshot()
    traffic.answered(2, 10, replace(kept, kept=0, joined=1), 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 1.0, 1.0)
    assert not between(meter, before), "nothing was measured of the server"


def test_a_server_without_clocks_is_alone_and_has_no_factor(clock: Clock) -> None:
    traffic = Traffic()
    meter = meter_with(traffic)
    none = (0.0, 0.0)
    traffic.answered(2, 10, replace(REPORT, work=none, others=none, process=none, clock=none), 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 1.0, 1.0)
    o = between(meter)[2]
    assert (o.share, o.server_factor) == (1.0, 1.0)
    traffic.answered(2, 10, replace(REPORT, work=(0.0, 1e-9), process=(0.0, 1e9)), 500, 0.05, 0.1)
    work_on(meter, clock, 2, 10, 1.0, 1.0)
    assert between(meter)[2].server_factor <= LARGEST_FACTOR


def test_merging_takes_each_sides_sums_from_its_own_snapshot() -> None:
    def counts(number: int) -> SplitCounts:
        traffic = TrafficCounts(samples=10 * number, server_cpu={"forward": 1.0 * number})
        return SplitCounts(traffic=traffic, client=ClientCounts(batches=number))

    early, late = counts(1), counts(3)
    assert merged({2: early}, {2: late, 4: late}) == {
        2: SplitCounts(traffic=early.traffic, client=late.client),
        4: SplitCounts(client=late.client),
    }


def test_sums_and_differences_of_counts() -> None:
    """Field by field, stage by stage and layer by layer, but for the largest batch and the shortest way."""
    one = SplitCounts(
        client=ClientCounts(timed=Work(4, 2.0, 1.0, (1.0, 0.5))),
        traffic=TrafficCounts(requests=2, server_cpu={"read": 1.0}, cos_batch=16, request_seconds=0.5),
    )
    more = SplitCounts(
        client=ClientCounts(timed=Work(2, 1.0), step=Work(3, 1.0)),
        traffic=TrafficCounts(requests=1, server_cpu={"send": 2.0}, cos_batch=8, request_seconds=0.25),
    )
    both = one + more
    assert both.client == ClientCounts(timed=Work(6, 3.0, 1.0, (1.0, 0.5)), step=Work(3, 1.0))
    assert both.traffic == TrafficCounts(
        requests=3, server_cpu={"read": 1.0, "send": 2.0}, cos_batch=16, request_seconds=0.25
    )
    assert (both - one).client.step == more.client.step and (both - one).traffic.requests == 1
    assert ((both - one).traffic.cos_batch, (both - one).traffic.request_seconds) == (16, 0.25)
    assert one + SplitCounts() == one


def test_real_clocks() -> None:
    meter = meter_with(Traffic())
    with meter.working(1, "step", 3):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
    meter.batch(1, 3)
    counts = meter.snapshot()[1].client
    assert 0.02 <= counts.step.seconds < 5 and counts.process_cpu >= 0.02
    assert counts.samples == counts.step.samples == 3


def test_new_memory_is_counted() -> None:
    meter, size = meter_with(Traffic()), 16 << 20
    with meter.working(1, "suffix", 1), mmap.mmap(-1, size) as new:
        new[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
    with meter.working(1, "step", 1):
        pass
    counts = meter.snapshot()[1].client
    assert counts.suffix.pages >= size // (2 << 20), "a page may be a huge one"
    assert counts.step.pages < size // (2 << 20)


def test_samples_of_work_that_failed_do_not_count() -> None:
    meter = meter_with(Traffic())
    with pytest.raises(MemoryError), meter.working(1, "suffix", 4):
        raise MemoryError
    assert meter.snapshot()[1].client.suffix.samples == 0


def test_forward_passes_are_told_once() -> None:
    assert Meter(torch.device("cpu")).take_forwards() == []
    traffic = Traffic()
    meter = meter_with(traffic)
    traffic.answered(2, 10, REPORT, 500, 0.05, 0.1)
    assert [forward.samples for forward in meter.take_forwards()] == [10]
    assert meter.take_forwards() == []
    traffic.answered(2, 5, REPORT, 500, 0.05, 0.1)
    meter.follow(Traffic())
    assert meter.take_forwards() == [], "that pass is over"
