"""``benchmarks samples --over``: real servers, checked answers, and a table that says what was reached."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.storage.samples_fetch import _driven
from benchmarks.storage.samples_over import (
    BASES,
    PLAIN,
    READERS,
    OverResult,
    OverRow,
    OverSettings,
    measure_over,
)
from benchmarks.storage.samples_served import LoopbackSwift
from benchmarks.testbed.loose import LooseBed
from hapi.errors import UsageError


def row(reader: str, rate: float) -> OverRow:
    return OverRow(
        size=512, reader=reader, rate=rate, lowest=rate, highest=rate, quality=None, megabytes=1.0, cpu_us=1.0,
        server_cpu_us=2.0,
    )  # fmt: skip


@pytest.mark.parametrize("over", READERS)
def test_the_table_compares_with_a_plain_download(over: str) -> None:
    rates = {reader: 79.0 if reader.endswith("full") else 80.0 for reader in READERS[over]}
    rates |= {PLAIN: 1000.0, BASES[over]: 100.0}
    found = OverResult(
        settings=OverSettings(over=over, sizes=(512,)),
        rows=tuple(row(reader, rate) for reader, rate in rates.items()),
        conditions={},
    )
    first = {"http": "hapi-server", "swift": "mount"}[over]
    base = {"http": "hapi-server, 1 MiB samples", "swift": "plain ranges, not looked at"}[over]
    assert found.goals() == [
        f"512 B, {first}, chunk windows over {base}: 80% (goal 80%): reached",
        f"512 B, {first}, full permutation over {base}: 79% (goal 80%): missed",
    ]
    assert len(found.table()) == 1 + len(rates) + 2
    shares = {r["reader"]: r["share"] for r in found.to_json()["rows"]}
    assert shares[BASES[over]] == 1 and min(shares.values()) == 0.79


def test_without_swift_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAPI_SWIFT_VENV", str(tmp_path))
    with pytest.raises(UsageError, match=r"not installed in .*: run scripts/swift-loopback install"):
        LoopbackSwift(LooseBed("test"), tmp_path)


def test_there_is_at_least_one_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err


def test_workers_share_the_tasks_and_end_with_an_error() -> None:
    done: list[tuple[int, int]] = []

    def task(number: int) -> int:
        done.append((number, len(done)))
        return 1

    assert _driven(itertools.repeat(task), 2, time.perf_counter() + 0.5) == len(done) > 2

    def failing(number: int) -> int:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        _driven(itertools.repeat(failing), 2, time.perf_counter() + 10)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_short_run_over_http(tmp_path: Path) -> None:
    settings = OverSettings(
        over="http", sizes=(512, 0), total=2 << 20, seconds=0.3, rounds=1, folder=str(tmp_path)
    )
    found = measure_over(settings, lambda line: None)
    assert [(r.size, r.reader) for r in found.rows] == [
        (size, r) for size in (512, 0) for r in READERS["http"]
    ]
    assert all(r.rate > 0 and r.cpu_us > 0 for r in found.rows)
    assert not list(tmp_path.iterdir())
