"""The wire benchmark: what it counts is right, and it runs end to end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.serving.wire import AIOHTTP, AIOHTTP_READ, HAPI, SOCKET, WireResult, measure_wire
from benchmarks.serving.wire_server import FEATURE_SHAPE, ResidentFeatures
from benchmarks.testbed.conditions import Spread, condition_lines, conditions, recorded_conditions, write_json
from hapi.errors import UsageError
from hapi.wire.frame_reader import BufferSource, FrameReader
from hapi.wire.frames import FrameHeader, StreamEnd
from hapi.wire.messages import EXTRACT_PATH

two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores to pin to",
)


def spread(value: float) -> Spread:
    return Spread.of([value, value * 0.9, value * 1.1])


def test_a_spread_is_median_and_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0]).to_json() == {"median": 2.0, "min": 1.0, "max": 3.0, "count": 3}


@pytest.mark.parametrize(("hapi_rate", "verdict"), [(2.5, "reached"), (2.3, "missed")])
def test_the_table_compares_with_the_plain_socket(hapi_rate: float, verdict: str) -> None:
    rates = {SOCKET: spread(3.0), AIOHTTP: spread(2.0), AIOHTTP_READ: spread(0.5), HAPI: spread(hapi_rate)}
    result = WireResult(rates=rates, conditions=conditions())
    assert result.share == pytest.approx(hapi_rate / 3)
    assert result.table()[-1].endswith(verdict)
    assert any(line.startswith("hapi") and f"{hapi_rate / 3:.0%}" in line for line in result.table())


def test_conditions_name_what_matters() -> None:
    text = "\n".join(condition_lines(conditions()))
    for word in ("date", "processor", "cores", "load", "python", "torch", "aiohttp"):
        assert word in text


def test_a_file_that_two_machines_measured_names_both() -> None:
    def head(date: str, processor: str, cores: int = 2, **more: str) -> dict[str, Any]:
        return {
            "kind": "conditions",
            "date": date,
            "processor": processor,
            "cores": cores,
            "grid": {},
            **more,
        }

    done = {"kind": "done"}
    records = [
        head("1", "A"),
        done,
        head("2", "B"),
        head("3", "C", hapi="9"),
        done,
        done,
        head("4", "A"),
        done,
        head("5", "D"),
    ]
    assert recorded_conditions(records) == {"date": "1; 3; 4", "processor": "A; C", "cores": 2, "hapi": "9"}
    assert recorded_conditions(records[:2]) == {"date": "1", "processor": "A", "cores": 2}
    assert recorded_conditions([]) == recorded_conditions([done, head("1", "A")]) == {}


@pytest.mark.parametrize("benchmark", ["wire", "optimality", "directory"])
def test_where_nothing_can_be_written_nothing_is_measured(
    benchmark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told before hours of measuring, not after them."""
    (tmp_path / "file").write_text("")
    there = str(tmp_path / "file" / "figures.json")
    assert main([benchmark, "--json", there]) == 2
    told = capsys.readouterr()
    assert told.out == "" and f"--json {there}: cannot be written there" in told.err


def test_figures_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "figures.json", {"a": 1})
    assert json.loads((tmp_path / "figures.json").read_text()) == {"a": 1}
    with pytest.raises(UsageError, match="cannot be written"):
        write_json(tmp_path / "absent" / "figures.json", {})


def test_the_prepared_answer_is_a_good_stream_of_its_features() -> None:
    service = ResidentFeatures(35)
    try:
        stream = service.stream(service.request(EXTRACT_PATH, b"{}"))
        reader = FrameReader(BufferSource(piece for frame in stream.frames for piece in frame))
        received = np.zeros_like(service.features)
        ids: list[int] = []

        def sink(header: FrameHeader) -> list[memoryview]:
            rows = received[header.ids[0] : header.ids[-1] + 1]
            return [memoryview(rows.reshape(-1).view(np.uint8)), memoryview(bytearray(8 * len(header.ids)))]

        while not isinstance(header := reader.next(sink), StreamEnd):
            ids.extend(header.ids)
        assert ids == list(range(35)) and received.shape[1:] == FEATURE_SHAPE
        assert np.array_equal(received, service.features)
        assert reader.bytes_read == stream.content_length
    finally:
        service.close()


@two_cores
@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    assert main(["wire", "--body", "4MiB", "--rounds", "2", "--json", str(tmp_path / "f.json")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert set(figures["gigabytes_per_second"]) == {SOCKET, AIOHTTP, AIOHTTP_READ, HAPI}
    assert all(s["median"] > 0 and s["count"] == 2 for s in figures["gigabytes_per_second"].values())
    assert "of socket" in capsys.readouterr().out
    assert os.sched_getaffinity(0) == before


@two_cores
@pytest.mark.parametrize("arguments", [["--body", "1KiB"], ["--rounds", "0"], ["--body", "64M"]])
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"python -m benchmarks wire: error: argument {arguments[0]}: ")


def test_measuring_needs_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(UsageError, match="two processor cores"):
        measure_wire(1 << 20, 1)
