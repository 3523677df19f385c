"""Spans and counters of a run, written as Chrome trace events: the file opens in https://ui.perfetto.dev.

A :class:`Tracer` that is off costs one attribute test per span. One that is on keeps at most ``limit``
events in memory; what comes after is counted, not kept, and the file says how many are missing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hapi.paths import write_whole

DEFAULT_LIMIT = 1_000_000
"""Most events kept, some 200 MB of memory and as much on disk."""

TRACE_PARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""W3C ``traceparent`` that requests of this thread are sent with; empty for none."""

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class _TraceSpan:
    track: str
    name: str
    start: int
    stop: int
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Count:
    name: str
    at: int
    value: float


class Tracer:
    """Records spans on named tracks ("network", "forward", ...). Thread-safe.

    Times are ``time.perf_counter_ns()``, which on Linux is one clock for all processes of a machine, so
    that the traces of server and client can be laid over each other.
    """

    def __init__(self, *, enabled: bool = True, process: str = "hapi", limit: int = DEFAULT_LIMIT) -> None:
        self.enabled = enabled
        self.dropped = 0
        """Events beyond ``limit``."""
        self._process = process
        self._limit = limit
        self._lock = threading.Lock()
        self._spans: list[_TraceSpan] = []
        self._counts: list[_Count] = []

    def span(self, name: str, track: str, **arguments: Any) -> AbstractContextManager[None]:
        """Return a ``with`` block that is recorded as ``name`` on ``track``, with ``arguments``."""
        return self._timed(name, track, arguments) if self.enabled else _NOTHING

    def record(self, name: str, track: str, start: int, stop: int, **arguments: Any) -> None:
        """Record a span that was measured elsewhere.

        Args:
            name: the span's name.
            track: the track that it is shown on.
            start: its begin in ``perf_counter_ns`` nanoseconds.
            stop: its end, likewise.
            arguments: values that are shown with it.
        """
        if not self.enabled:
            return
        with self._lock:
            if len(self._spans) + len(self._counts) < self._limit:
                self._spans.append(_TraceSpan(track, name, start, max(start, stop), arguments))
            else:
                self.dropped += 1

    def counter(self, name: str, value: float) -> None:
        """Record the value of ``name`` (bytes in flight, queue length) from now on."""
        if not self.enabled:
            return
        now = time.perf_counter_ns()
        with self._lock:
            if len(self._spans) + len(self._counts) < self._limit:
                self._counts.append(_Count(name, now, value))
            else:
                self.dropped += 1

    @contextmanager
    def _timed(self, name: str, track: str, arguments: dict[str, Any]) -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.record(name, track, start, time.perf_counter_ns(), **arguments)

    def document(self) -> dict[str, Any]:
        """Return the trace as a Chrome trace-event document (JSON object format)."""
        with self._lock:
            spans, counts, dropped = list(self._spans), list(self._counts), self.dropped
        pid = os.getpid()
        events: list[dict[str, Any]] = [_metadata(pid, 0, "process_name", {"name": self._process})]
        lanes: dict[tuple[str, int], int] = {}
        for span, lane in _in_lanes(spans):
            thread = lanes.setdefault((span.track, lane), len(lanes) + 1)
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": thread,
                    "name": span.name,
                    "cat": span.track,
                    "ts": span.start / 1e3,
                    "dur": (span.stop - span.start) / 1e3,
                    "args": span.arguments,
                }
            )
        # Tracks in alphabetical order, a track's lanes one below the other.
        for order, ((track, lane), thread) in enumerate(sorted(lanes.items())):
            title = track if lane == 0 else f"{track} ({lane + 1})"
            events.append(_metadata(pid, thread, "thread_name", {"name": title}))
            events.append(_metadata(pid, thread, "thread_sort_index", {"sort_index": order}))
        for c in counts:
            counted = {"ph": "C", "pid": pid, "tid": 0, "name": c.name, "ts": c.at / 1e3}
            events.append({**counted, "args": {"value": c.value}})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped_events": dropped}}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to ``path``, whole or not at all; raises :class:`UsageError` when that fails."""
        write_whole(str(path), json.dumps(self.document(), separators=(",", ":"), default=str), "--trace")


OFF = Tracer(enabled=False)
"""The tracer that records nothing."""


def _metadata(pid: int, thread: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": thread, "name": name, "args": arguments}


def _in_lanes(spans: list[_TraceSpan]) -> Iterator[tuple[_TraceSpan, int]]:
    """Each span with its lane of the track: spans of one lane nest or follow each other, as viewers demand.

    Concurrent requests overlap on one track without nesting, which a viewer would draw wrongly.
    """
    tracks: dict[str, list[list[int]]] = {}
    for span in sorted(spans, key=lambda s: (s.start, -s.stop)):
        lanes = tracks.setdefault(span.track, [])
        for stops in lanes:
            while stops and stops[-1] <= span.start:
                stops.pop()
        fits = (i for i, stops in enumerate(lanes) if not stops or span.stop <= stops[-1])
        lane = next(fits, len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(span.stop)
        yield span, lane
