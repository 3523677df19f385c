"""Epochs of hits: batches that lie in memory whole come without threads, and with few calls each."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from support.harness import losses, of_epochs
from support.local_job import ALLOWED, Interrupting, Silent, open_session, pack_blobs
from support.thin_resnet import THIN_FEATURES
from torch import nn

from hapi.client.loading import incoming
from hapi.client.session import Session
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.train.trainer import Trainer

SAMPLES, BS = 96, 16
JOB: dict[str, Any] = {
    "bs": BS, "request_size": 16, "epochs": 3, "dataset": "blobs", "cache": "on", "freeze": 12, "weights": "random:0",
    "optimizer": "sgd", "momentum": 0.9,
}  # fmt: skip
MOST_DELIVERING, MOST_TRAINING = 50, 100
"""Most of Hapi's own functions that are called for a batch, without and with the training step."""
PACKAGE = str(Path(incoming.__file__).parents[2])
SAMPLE_BYTES = THIN_FEATURES * 4 + 8
"""Bytes of a sample's features and label in memory."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("hits") / "store"
    pack_blobs(store, count=SAMPLES)
    settings = ServerSettings(store=str(store), cos_batch=16, threads=1, allow_model=ALLOWED)
    service = Service(settings, open_store(str(store)))
    try:
        yield service
    finally:
        service.close()


def opened(service: Service, folder: Path, **changes: Any) -> Session:
    return open_session(service, **{**JOB, "cache_dir": str(folder), **changes})


class Calls(Silent):
    """Counts calls of Python functions between the first and the last step of an epoch."""

    def __init__(self, epoch: int, batches: int) -> None:
        super().__init__()
        self.first, self.last = epoch * batches + 1, (epoch + 1) * batches
        self.all = self.own = 0

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.all += 1
            self.own += frame.f_code.co_filename.startswith(PACKAGE)

    def on_step(self, steps: int) -> None:
        if steps == self.last:
            sys.setprofile(None)
        elif steps == self.first:
            sys.setprofile(self.note)

    def a_batch(self, calls: int) -> float:
        return calls / (self.last - self.first)


@pytest.mark.slow
def test_few_calls_a_batch(service: Service, tmp_path: Path) -> None:
    """A count, which no noise changes. A loop written by hand calls as many functions of torch's."""
    with opened(service, tmp_path) as session:
        counting = Calls(2, SAMPLES // BS)
        report = Trainer(session, callbacks=[counting]).run()
        assert of_epochs(report, "feature_hits") == [0, SAMPLES, SAMPLES]
        delivering = Calls(0, SAMPLES // BS)
        for step, _ in enumerate(session.epoch(3), 1):
            delivering.on_step(step)
    plain = Calls(0, SAMPLES // BS)
    layer, features = nn.Linear(THIN_FEATURES, 4), torch.randn(SAMPLES, THIN_FEATURES)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
    for step, rows in enumerate(torch.arange(SAMPLES).split(BS), 1):
        torch.default_generator.manual_seed(step)
        loss = nn.functional.cross_entropy(layer(features[rows]), rows % 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        plain.on_step(step)
    assert 0 < delivering.a_batch(delivering.own) <= MOST_DELIVERING
    assert 0 < counting.a_batch(counting.own) <= MOST_TRAINING
    print(
        delivering.a_batch(delivering.own),
        delivering.a_batch(delivering.all),
        counting.a_batch(counting.own),
        counting.a_batch(counting.all),
        plain.a_batch(plain.all),
    )
    assert counting.a_batch(counting.all) <= plain.a_batch(plain.all) + 2 * MOST_TRAINING


def test_no_thread_is_started_for_what_lies_in_memory(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self.name), start(self))[1])
    with opened(service, tmp_path) as session:
        for epoch in range(2):
            batches = [f.clone() for f, _ in session.epoch(epoch)]
        assert any(name.startswith("hapi-window") for name in started)
        started.clear()
        again = [f.clone() for f, _ in session.epoch(1)]
        assert not started and all(map(torch.equal, batches, again))
        monkeypatch.setattr(
            incoming, "COPIED_BYTES", BS * THIN_FEATURES * 4 - 1
        )  # large batches are read ahead
        assert all(map(torch.equal, batches, (f for f, _ in session.epoch(1))))
        assert any(name.startswith("hapi-window") for name in started)
    started.clear()
    with opened(service, tmp_path) as session:  # the first epoch of another job reads the disk, ahead
        assert all(map(torch.equal, batches, (f for f, _ in session.epoch(1))))
        assert any(name.startswith("hapi-window") for name in started)
        assert session.last.traffic.requests == 0


def passed(session: Session) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a pass; each has the same order."""
    return [(features.clone(), labels.clone()) for features, labels in session.epoch(0)]


def check_same(found: list[tuple[torch.Tensor, torch.Tensor]], expected: Any) -> None:
    for own, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, own, theirs))


@pytest.mark.parametrize("rows", [0, 40, 64, 95])
def test_batches_partly_in_memory(service: Service, tmp_path: Path, rows: int) -> None:
    """The first of a pass lie in memory whole, one in part, and the others on the disk."""
    with opened(service, tmp_path, cache_memory=rows * SAMPLE_BYTES) as session:
        expected = passed(session)
        check_same(passed(session), expected)
        counts = session.last.kept
        assert (counts.hits, counts.bytes_read) == (SAMPLES, SAMPLES * THIN_FEATURES * 4)
        assert session.last.traffic.requests == 0


def test_batches_in_memory_between_some_that_servers_compute(service: Service, tmp_path: Path) -> None:
    with opened(service, tmp_path / "whole") as session:
        expected = passed(session)
    rows = np.r_[16:48, 64:72]
    with opened(service, tmp_path / "part") as session:
        ids = np.concatenate(session.batch_ids(0))[rows]
        features, labels = (torch.cat(list(parts))[rows] for parts in zip(*expected, strict=True))
        (cache,) = session.keeping.training.of().values()
        cache.put(ids, features.view(torch.uint8).numpy(), labels.numpy())
        check_same(passed(session), expected)
        assert session.last.kept.hits == len(rows) and session.last.samples == SAMPLES
        assert session.last.traffic.requests == 4  # two batches are there, and one in part


@pytest.mark.slow_except("what0")
@pytest.mark.parametrize("what", [KeyboardInterrupt(), ValueError("broken")])
def test_an_epoch_of_hits_that_is_left_in_its_middle(
    service: Service, tmp_path: Path, what: BaseException
) -> None:
    checkpoint = str(tmp_path / "training.pt")
    with opened(service, tmp_path / "cache") as session:
        whole = Trainer(session, callbacks=[Silent()]).run()
    with opened(service, tmp_path / "cache", checkpoint=checkpoint) as session:
        with pytest.raises(type(what)):
            Trainer(session, callbacks=[Interrupting(9, what)]).run()
        assert session.last.samples == 3 * BS
    with opened(service, tmp_path / "cache", checkpoint=checkpoint, resume=True) as session:
        resumed = Trainer(session, callbacks=[Silent()]).run()
    assert losses(resumed) == losses(whole)


@pytest.mark.slow
def test_thirty_epochs_of_hits_take_no_more_memory_than_two(service: Service, tmp_path: Path) -> None:
    sizes: list[int] = []

    class Measuring(Silent):
        def epoch_done(self, entry: Any) -> None:
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])

    with opened(service, tmp_path, epochs=30, cache="auto", split="auto") as session:
        tracemalloc.start()
        try:
            report = Trainer(session, callbacks=[Measuring()]).run()
        finally:
            tracemalloc.stop()
    assert of_epochs(report, "feature_hits")[1:] == [SAMPLES] * 29
    entry = 8 << 10  # an element of the report
    assert sizes[29] - sizes[4] < 25 * entry, sizes
