"""The trace: valid events, bounded, cheap when off, safe with many threads."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.threads import at_once

from hapi.errors import UsageError
from hapi.trace import OFF, Tracer


def events(tracer: Tracer, phase: str = "X") -> list[dict[str, Any]]:
    return [e for e in tracer.document()["traceEvents"] if e["ph"] == phase]


def test_a_span_is_recorded_with_its_time_and_arguments(tmp_path: Path) -> None:
    tracer = Tracer(process="trainer")
    before = time.perf_counter_ns()
    with tracer.span("request", "network", samples=16), tracer.span("frame", "network"):
        time.sleep(0.002)
    tracer.counter("bytes in flight", 5)
    tracer.write(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    spans = {e["name"]: e for e in document["traceEvents"] if e["ph"] == "X"}
    assert spans["request"]["args"] == {"samples": 16}
    assert spans["request"]["dur"] >= spans["frame"]["dur"] >= 2000
    assert before / 1e3 <= spans["request"]["ts"] <= spans["frame"]["ts"]
    assert spans["request"]["tid"] == spans["frame"]["tid"]
    counters = [e for e in document["traceEvents"] if e["ph"] == "C"]
    assert counters[0]["args"] == {"value": 5}
    names = {
        e["args"]["name"] for e in document["traceEvents"] if e["name"] in ("process_name", "thread_name")
    }
    assert names == {"trainer", "network"}
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_span_that_fails_is_recorded_too() -> None:
    tracer = Tracer()
    with pytest.raises(ValueError, match="x"), tracer.span("work", "client"):
        raise ValueError("x")
    assert [e["name"] for e in events(tracer)] == ["work"]


def test_off_records_nothing_and_costs_little() -> None:
    start = time.perf_counter()
    for _ in range(20_000):
        with OFF.span("a", "b", samples=1):
            pass
    assert time.perf_counter() - start < 10.0  # 500 us each would already be far beyond "near zero"
    OFF.counter("n", 1)
    assert events(OFF) == [] and OFF.dropped == 0


def test_events_are_bounded_and_the_loss_is_told() -> None:
    tracer = Tracer(limit=10)
    for i in range(15):
        tracer.record(f"s{i}", "t", i, i + 1)
    tracer.counter("n", 1)
    assert len(events(tracer)) == 10
    assert tracer.document()["otherData"] == {"dropped_events": 6}


def test_threads_lose_nothing() -> None:
    tracer = Tracer()

    def work() -> None:
        for _ in range(500):
            with tracer.span("s", "t"):
                pass

    at_once(8, lambda _: work())
    assert len(events(tracer)) == 4000


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40))
def test_spans_of_one_lane_nest_or_follow_each_other(times: list[tuple[int, int]]) -> None:
    tracer = Tracer()
    for start, length in times:
        tracer.record("s", "t", start * 1000, (start + length) * 1000)
    found = events(tracer)
    assert len(found) == len(times)
    by_lane: dict[int, list[tuple[float, float]]] = {}
    for e in found:
        by_lane.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_lane.values():
        for i, (start, stop) in enumerate(spans):
            for other_start, other_stop in spans[i + 1 :]:
                apart = other_start >= stop or other_stop <= start
                nested = start <= other_start and other_stop <= stop
                assert apart or nested


def test_spans_one_after_the_other_share_a_lane() -> None:
    tracer = Tracer()
    for i in range(5):
        tracer.record("s", "t", i, i + 1)
    assert all(a["tid"] == b["tid"] for a, b in pairwise(events(tracer)))


def test_a_trace_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        Tracer().write(tmp_path / "absent" / "trace.json")
