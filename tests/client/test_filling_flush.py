"""The end of an epoch beside a slow disk: the line goes on in the next one, and only a run's end waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.feature_tools import COUNT, content, features_at, labels

from hapi.cache import records
from hapi.cache.features import FeatureCache
from hapi.cache.writing import put_rates
from hapi.cache.writing.record_codec import PassTimes
from hapi.client.caching import filling as filling_module
from hapi.client.caching.counts import KeptCounts
from hapi.client.caching.filling import ComputedRows, Filling
from hapi.trace import Tracer


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that has nothing until the event is set."""
    ready = threading.Event()
    monkeypatch.setattr(put_rates, "wait_written", lambda *_: ready.wait(240))
    monkeypatch.setattr(put_rates, "os", SimpleNamespace(fsync=lambda _: ready.wait(240)))
    monkeypatch.setattr(filling_module, "GRACE_SECONDS", 0.05)
    yield ready
    ready.set()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[FeatureCache]:
    with features_at(tmp_path, budget=16 * 500) as found:
        yield found


def offer(filling: Filling, cache: FeatureCache, first: int, count: int) -> None:
    ids = np.arange(first, first + count, dtype=np.int64)
    features = torch.from_numpy(content(ids).view(np.float32).reshape(count, -1).copy())
    filling.offer(cache, ComputedRows(ids, features, labels(ids)), KeptCounts(), PassTimes())


def test_an_epochs_end_leaves_the_line_to_the_next_one(cache: FeatureCache, disk: threading.Event) -> None:
    filling = Filling(Tracer())
    try:
        for first in range(0, COUNT, 5):
            offer(filling, cache, first, 5)
        while not cache.puts.waits_now:
            pass
        filling.flush([cache])
        assert 0 < int(cache.held(np.arange(COUNT)).sum()) < COUNT, (
            "a segment is full, and the disk has it not"
        )
        disk.set()
        filling.flush([cache], last=True)
        assert cache.held(np.arange(COUNT)).all()
    finally:
        disk.set()
        filling.close()


def test_an_epochs_end_leaves_a_writer_that_the_kernel_holds_up(
    cache: FeatureCache, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache has as much as the disk may owe it: a write ends when some of that is on the disk."""
    monkeypatch.setattr(records, "begin_writing", lambda *_: disk.wait(240))
    filling = Filling(Tracer())
    try:
        for first in range(0, COUNT, 5):
            offer(filling, cache, first, 5)
        filling.flush([cache])
        assert not cache.held(np.arange(COUNT)).all() and not disk.is_set()
        disk.set()
        filling.flush([cache], last=True)
        assert cache.held(np.arange(COUNT)).all()
    finally:
        disk.set()
        filling.close()


def test_an_epochs_end_goes_past_a_disk_that_has_little_to_do(
    cache: FeatureCache, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait that begins while it ends is none: the page cache takes what the line has."""
    filling = Filling(Tracer())
    began, go_on = threading.Event(), threading.Event()
    put = cache.put

    def slow(*values: Any) -> None:
        began.set()
        go_on.wait(240)
        put(*values)

    monkeypatch.setattr(cache, "put", slow)
    try:
        for first in range(0, COUNT, 5):
            offer(filling, cache, first, 5)
        assert began.wait(240)
        ended = threading.Thread(target=lambda: filling.flush([cache]))
        ended.start()
        while not cache.puts._hurried.is_set():
            pass
        go_on.set()
        ended.join(240)
        assert cache.held(np.arange(COUNT)).all() and not disk.is_set()
    finally:
        disk.set()
        go_on.set()
        filling.close()
