"""The overload benchmark: its figures from made-up phases, and a short run of the real thing."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest

from benchmarks.load.overload import LIGHT, WEIGHTS, OverloadSettings, measure_overload
from benchmarks.load.overload_figures import Phase, percentile, returns_of, shares, verdicts
from benchmarks.load.overload_load import samples_of
from hapi.errors import WireError
from hapi.wire.frames import FrameHeader, StreamEnd, TensorSpec, byte_view, data_frame, end_frame


def answer(tenant: str, began: float, ended: float, *told: float, samples: int = 10) -> dict[str, Any]:
    return {"tenant": tenant, "began": began, "sent": began + sum(told), "ended": ended, "samples": samples,
            "retry_after": list(told)}  # fmt: skip


def phase(answers: list[dict[str, Any]], **more: Any) -> Phase:
    sent_away = [(a["tenant"], told) for a in answers for told in a["retry_after"]]
    seen = {"answers": answers, "sent_away": sent_away, "tries": len(answers) + len(sent_away), "not_tried": 0,
            "other": {}}  # fmt: skip
    return Phase(**{"seconds": 20.0, "skipped": 4.0, "seen": seen, **more})


def test_goodput_counts_neither_the_start_nor_what_came_late() -> None:
    found = phase([answer("a", 0, t) for t in (1, 2, 3, 4, 6, 8, 10, 21, 22)])
    assert found.goodput() == pytest.approx(5.0)
    assert found.goodput("b") == 0


def test_percentiles() -> None:
    assert [percentile([1, 2, 3, 4], share) for share in (0.0, 0.25, 0.5, 0.51, 0.95, 1.0)] == [
        1,
        1,
        2,
        3,
        4,
        4,
    ]
    assert percentile(list(range(1, 101)), 0.95) == 95


def test_shares_are_by_weight() -> None:
    both = [answer("a", 0, t, samples=10) for t in range(5, 16)]
    both += [answer("b", 0, t, samples=30) for t in range(5, 16)]
    assert shares(phase(both), {"a": 1, "b": 3}) == pytest.approx({"a": 1.0, "b": 1.0})
    assert shares(phase(both), {"a": 1, "b": 1}) == pytest.approx({"a": 0.5, "b": 1.5})


def test_honesty_of_retry_after() -> None:
    found = returns_of(phase([answer("a", 5, 6), answer("a", 5, 9, 2.0), answer("a", 5, 13, 2.0, 4.0)]))
    assert found is not None
    assert (found.count, found.at_once, found.retry_after) == (2, 0.5, 2.0)
    assert found.waited_over_told == pytest.approx((1 + 3) / 2)
    assert returns_of(phase([answer("a", 5, 6)])) is None


def test_verdicts() -> None:
    answers = [answer("heavy", t - 1, t) for t in range(5, 20)] + [
        answer("light", t, t + 0.5) for t in range(5, 15)
    ]
    resident = [(t / 4, 1000 if t < 40 else 1100) for t in range(80)]
    loaded = phase(answers, resident=resident)
    found = verdicts(20.0, [0.1] * 20, 0.4, loaded, "light", {"heavy": 1})
    assert found["memory"] == {"got": pytest.approx(0.1), "goal": 0.05, "reached": False}
    assert found["light"] == {"got": pytest.approx(0.5), "goal": pytest.approx(0.6), "reached": True}
    assert found["least_share"]["got"] == pytest.approx(1.0)
    assert not verdicts(100.0, [0.01] * 20, 0.1, loaded, "light", {"heavy": 1})["goodput"]["reached"]


def test_an_answer_counts_when_it_is_whole() -> None:
    features = np.ones((3, 2), np.float32)
    header = FrameHeader(np.arange(1, 4), (TensorSpec("features", "float32", (3, 2)),))
    end = end_frame(StreamEnd(1, 3, {}))
    body = b"".join([*map(bytes, data_frame(header, [byte_view(features)])), end])
    assert samples_of(body) == 3
    for damaged in (body[:-1], body[: -len(end)], body.replace(b"\x80\x3f", b"\x80\x3e", 1)):
        with pytest.raises(WireError):
            samples_of(damaged)


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_short_run() -> None:
    settings = OverloadSettings(
        seconds=6.0, alone_seconds=4.0, peak_seconds=4.0, skipped=0.5, clients=12, request_size=4, light_every=0.2,
        samples=64,
    )  # fmt: skip
    result = measure_overload(settings, lambda line: None)
    document = json.loads(json.dumps(result.to_json()))
    assert document["peak"] > 0
    for way in ("patient", "insistent"):
        found = document["loaded"][way]
        assert found["goodput"] > 0
        assert found["resident_last"] > 10 << 20
        assert set(found["shares"]) == set(WEIGHTS)
    assert document["loaded"]["insistent"]["tries_over_peak"] > 3
    assert result.alone.waits(LIGHT)
    assert any("of the peak" in line for line in result.table())
