"""Three servers that keep features are one cache: jobs with one frozen prefix compute each sample about once."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.harness import ServerProcess, packed_digits, server
from support.http_tools import exchange
from support.local_job import settings_of

from hapi.client.session import Session
from hapi.client.transport import server_pool

pytestmark = pytest.mark.slow
COUNT, BS, EPOCHS, SERVERS = 384, 128, 2, 3
OPENING = threading.Lock()
"""Random weights come from one generator in this process."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), COUNT)


@pytest.fixture
def fleet(store: Path, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    arguments = ("--cos-batch", str(BS), "--device", "cpu", "--threads", "1", "--share-memory", "16MiB")
    with ExitStack() as stack:
        folders = [str(tmp_path / f"kept{number}") for number in range(SERVERS)]
        yield [stack.enter_context(server(store, *arguments, "--cache-dir", folder)) for folder in folders]


def opened(servers: list[ServerProcess], seed: int) -> Session:
    settings = settings_of(
        server=[each.url for each in servers], dataset="digits", bs=BS, request_size=BS,
        image_size=32, seed=seed, cache="off", weights="random:0", timeout=600,
    )  # fmt: skip
    with OPENING:
        return Session.open(settings)


def by_sample(session: Session, epoch: int) -> torch.Tensor:
    ids = np.concatenate(session.batch_ids(epoch))
    features = torch.cat([features.clone() for features, _ in session.epoch(epoch)])
    return features[torch.from_numpy(np.argsort(ids))]


def samples_of(servers: list[ServerProcess], source: str) -> list[int]:
    """Samples whose features each server had from ``source``."""
    texts = [exchange(each.port, "GET", "/metrics").body.decode() for each in servers]
    pattern = rf'hapi_feature_samples_total{{source="{source}"}} (\S+)'
    return [round(float(re.findall(pattern, text)[0])) for text in texts]


def job(servers: list[ServerProcess], seed: int) -> list[torch.Tensor]:
    with opened(servers, seed) as session:
        return [by_sample(session, epoch) for epoch in range(EPOCHS)]


@pytest.fixture(autouse=True)
def never_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds on this machine, whose cores all servers share, say nothing of a crowd."""
    monkeypatch.setattr(server_pool, "CROWDED", float("inf"))


def test_jobs_on_three_servers_compute_each_sample_once(fleet: list[ServerProcess]) -> None:
    """In orders of their own; without the holders it would be nearly once at each server."""
    found = job(fleet, 0)
    computed = samples_of(fleet, "computed")
    assert sum(computed) == COUNT and min(computed) > COUNT / SERVERS / 2, "all of them work"
    with ThreadPoolExecutor(2) as pool:
        for later in pool.map(partial(job, fleet), (1, 2)):
            assert all(torch.equal(features, found[0]) for features in (*later, *found))
    assert samples_of(fleet, "computed") == computed, "what one job computed serves all"
    assert sum(samples_of(fleet, "cache")) + sum(samples_of(fleet, "recent")) == 5 * COUNT


def test_two_jobs_at_once_compute_hardly_more_than_one(fleet: list[ServerProcess]) -> None:
    """A request of which little is missing fills a forward pass of 16 up, with samples of others: that is all."""
    with ThreadPoolExecutor(2) as pool:
        found = [features for epochs in pool.map(partial(job, fleet), range(2)) for features in epochs]
    assert all(torch.equal(features, found[0]) for features in found)
    requests = 2 * SERVERS * COUNT // BS
    assert sum(samples_of(fleet, "computed")) <= COUNT + 15 * requests


def test_a_server_that_dies_leaves_its_samples_to_the_others(fleet: list[ServerProcess]) -> None:
    with opened(fleet, 0) as session:
        before = by_sample(session, 0)
        others = sum(samples_of(fleet[1:], "computed"))
        fleet[0].kill()
        assert torch.equal(by_sample(session, 1), before) and torch.equal(by_sample(session, 2), before)
    again = sum(samples_of(fleet[1:], "computed")) - others
    assert again >= COUNT - others, "its own have to be computed again, and the others' are not"
    assert again <= 2 * (COUNT - others) + 2 * 15 * SERVERS * COUNT // BS
