"""Where a disk becomes slower: seen in the rates of what is written, remembered in the folder, told to the plan."""

from __future__ import annotations

import json
import time
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.feature_tools import COUNT, features_at, put

from hapi.cache.disk_rates import DiskRates
from hapi.cache.folder import CacheFolder
from hapi.cache.writing import fast_part as fast_part_module
from hapi.cache.writing import put_rates
from hapi.cache.writing.fast_part import FILE, SLOW_BYTES, FastPart, Stretch, WriteLog, fast_part
from hapi.client.planning.cache_facts import CacheFacts

MB = 1 << 20


def at(rate: float, nbytes: int = 64 * MB) -> Stretch:
    return Stretch(nbytes, nbytes / rate)


@given(
    st.integers(1, 30), st.integers(2, 30), st.floats(5e6, 5e9), st.floats(2.2, 50), st.integers(0, 1000),
    st.lists(st.integers(0, 59), max_size=6),
)  # fmt: skip
def test_a_step_is_found_where_it_is(
    fast: int, slow: int, rate: float, step: float, seed: int, untold: list[int]
) -> None:
    """Rates that scatter by 5 %, some of stretches in which the disk was not always at work."""
    noise = np.random.default_rng(seed).uniform(0.95, 1.05, fast + slow).tolist()
    rates = [*repeat(rate, fast), *repeat(rate / step, slow)]
    stretches = [at(r * x) for r, x in zip(rates, noise, strict=True)]
    for place in untold:
        if place < fast - 1:
            stretches[place] = Stretch(64 * MB, None)
    found = fast_part(stretches)
    assert found is not None and found.fast_bytes == fast * 64 * MB
    assert found.write == pytest.approx(rate, rel=0.06)
    assert found.slow_write == pytest.approx(rate / step, rel=0.06)


@given(st.integers(0, 60), st.floats(5e6, 5e9), st.integers(0, 1000))
def test_a_disk_that_scatters_has_no_step(count: int, rate: float, seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(0.75, 1.25, count).tolist()
    assert fast_part([at(rate * x) for x in noise], rate) is None


def test_a_probe_tells_the_fast_rate_where_nothing_else_does() -> None:
    told, untold = [at(50e6)] * 3, [Stretch(64 * MB, None)] * 2
    assert fast_part([*untold, *told]) is None
    assert fast_part([*untold, *told], 60e6) is None
    assert fast_part([*untold, *told], 500e6) == FastPart(128 * MB, 500e6, pytest.approx(50e6))
    assert fast_part([*untold, *told[:1]], 500e6) is None, f"less than {SLOW_BYTES} may be the work of others"


def test_a_long_log_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_part_module, "_LIMIT", 16)
    log = WriteLog()
    for number in range(1000):
        log.add(64 * MB, 64 * MB / (1e9 if number < 600 else 1e8))
    assert log.written == 1000 * 64 * MB and len(log._stretches) <= 16
    found = log.fast_part(None)
    assert found is not None and abs(found.fast_bytes - 600 * 64 * MB) < 0.15 * log.written


def test_it_is_remembered_by_folder(tmp_path: Path) -> None:
    folder = CacheFolder.open(tmp_path, 1 << 30)
    folder.make()
    for rate in (500e6, 500e6, 50e6, 50e6, 50e6):
        folder.writes.add(64 * MB, 64 * MB / rate)
    assert folder.fast_part() is None
    folder.remember()
    now = folder.fast_part()
    assert now is not None and now.fast_bytes == 0, "this process has filled it"
    after = CacheFolder.open(tmp_path, 1 << 30)
    found = after.fast_part()
    assert found is not None and found.fast_bytes == 128 * MB and round(found.slow_write) == 50e6
    after.writes.add(64 * MB, None)
    left = after.fast_part()
    assert left is not None and left.fast_bytes == 64 * MB
    after.writes.add(192 * MB, 4.0)  # all of it slowly: nobody has emptied the fast part
    after.remember()
    assert CacheFolder.open(tmp_path, 1 << 30).fast_part() == found
    after.writes.add(192 * MB, 0.1)  # which went on without a step
    after.writes._stretches = after.writes._stretches[2:]
    after.writes.add(64 * MB, None)
    after.remember()
    further = CacheFolder.open(tmp_path, 1 << 30).fast_part()
    assert further is not None and further.fast_bytes == 256 * MB


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"fast_bytes": -1, "write": 1, "slow_write": 1}', '{"fast_bytes": 1, "write": "1"}',
     '{"fast_bytes": 1, "write": 0, "slow_write": 1}', '{"fast_bytes": 1e400, "write": 1, "slow_write": 1}',
     '{"fast_bytes": true, "write": 1, "slow_write": 1}', "\x00" * 99],
)  # fmt: skip
def test_a_file_that_is_damaged_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    assert FastPart.load(tmp_path) is None


def test_what_a_cache_writes_is_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes ten times as long for a segment after the first few."""
    monkeypatch.setattr(fast_part_module, "SLOW_BYTES", 1000)
    segments: list[int] = []

    def slower(descriptor: int, start: int, nbytes: int) -> None:
        segments.append(nbytes)
        time.sleep(0.02 if len(segments) <= 3 else 0.4)

    monkeypatch.setattr(put_rates, "wait_written", slower)
    with features_at(tmp_path, budget=16 * 500) as cache:
        for sample in range(COUNT):
            put(cache, [sample])
    assert len(segments) > 5
    document = json.loads((tmp_path / FILE).read_text())
    assert 0 < document["fast_bytes"] < COUNT * 32 and document["write"] > 2 * document["slow_write"]
    with features_at(tmp_path, budget=16 * 500) as cache:
        assert cache._records.folder.fast_part() == FastPart(**document)


def test_the_plan_is_told() -> None:
    part = FastPart(10**9, 5e8, 5e7)
    facts = CacheFacts(
        ids=np.arange(9), trainers=1, budget=10**12, rates=lambda: DiskRates(1e9, 4e8), fast_part=lambda: part
    )
    client = facts().client
    assert client is not None and (client.write, client.slow_write, client.fast_bytes) == (4e8, 5e7, 10**9)
    facts.rates = lambda: DiskRates(1e9, 4e7)
    client = facts().client
    assert client is not None and (client.write, client.slow_write) == (4e7, None), (
        "it is slower than that by now"
    )
