"""Jobs of one frozen prefix over a real server: one extraction for all of them, each at its own speed."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.harness import ServerProcess, packed_digits, server
from support.http_tools import exchange
from support.local_job import settings_of

from hapi.client.session import Session

COUNT, EPOCHS, JOBS = 192, 3, 8
OPENING = threading.Lock()
"""Random weights come from one generator in this process."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), COUNT)


@pytest.fixture
def sharing(store: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with server(
        store,
        "--cos-batch",
        "16",
        "--device",
        "cpu",
        "--share-memory",
        "64MiB",
        "--cache-dir",
        str(tmp_path / "kept"),
        module="support.patient_sharing",
    ) as running:
        yield running


def session_of(running: ServerProcess, seed: int) -> Session:
    settings = settings_of(
        server=[running.url],
        dataset="digits",
        bs=32,
        request_size=32,
        image_size=32,
        seed=seed,
        cache="off",
        weights="random:0",
        timeout=600,
    )
    with OPENING:
        return Session.open(settings)


def by_sample(session: Session, epoch: int) -> torch.Tensor:
    """Features of an epoch, by sample."""
    ids = np.concatenate(session.batch_ids(epoch))
    features = torch.cat([f.clone() for f, _ in session.epoch(epoch)])
    return features[torch.from_numpy(np.argsort(ids))]


def source(running: ServerProcess, name: str) -> float:
    """Samples whose features the server had from ``name``."""
    text = exchange(running.port, "GET", "/metrics").body.decode()
    return float(re.findall(rf'hapi_feature_samples_total{{source="{name}"}} (\S+)', text)[0])


@pytest.mark.slow
def test_eight_jobs_share_their_passes_and_get_the_same_bits(sharing: ServerProcess, store: Path) -> None:
    arguments = ("--cos-batch", "16", "--device", "cpu", "--share-memory", "0")
    with server(store, *arguments) as alone, session_of(alone, 0) as session:
        expected = by_sample(session, 0)

    def job(seed: int) -> list[torch.Tensor]:
        with session_of(sharing, seed) as session:
            return [by_sample(session, epoch) for epoch in range(EPOCHS)]

    with ThreadPoolExecutor(JOBS) as pool:
        found = list(pool.map(job, range(JOBS)))
    assert all(torch.equal(features, expected) for epochs in found for features in epochs)
    # Only the last pass, which takes all samples that nobody has, may have repeats.
    passes = source(sharing, "computed")
    assert passes <= COUNT + 15
    shared = sum(source(sharing, name) for name in ("joined", "recent", "cache"))
    assert shared >= (JOBS * EPOCHS - 1) * COUNT
    assert all(torch.equal(features, expected) for features in job(JOBS))
    assert source(sharing, "computed") == passes, "a later job computes nothing"


@pytest.mark.slow
def test_a_fast_job_does_not_wait_for_a_slow_one(sharing: ServerProcess) -> None:
    """The slow one stops in its first epoch until the fast one has ended all of its own."""
    ended, begun = threading.Event(), threading.Event()

    def slow() -> int:
        batches = 0
        with session_of(sharing, 1) as session:
            for _ in session.epoch(0):
                batches += 1
                begun.set()
                assert ended.wait(240)
        return batches

    def fast() -> int:
        assert begun.wait(240)
        with session_of(sharing, 2) as session:
            batches = sum(1 for epoch in range(EPOCHS) for _ in session.epoch(epoch))
        ended.set()
        return batches

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(slow), pool.submit(fast)
        assert (second.result(240), first.result(240)) == (EPOCHS * COUNT // 32, COUNT // 32)
    assert source(sharing, "computed") <= 1.02 * COUNT + 32
