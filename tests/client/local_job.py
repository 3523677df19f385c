"""Sessions over the real service without a socket, for tests of the session, the trainer and the checkpoint."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hapi.client.passes import PassReport
from hapi.client.prepare import prepare
from hapi.client.session import Session
from hapi.client.settings import TrainSettings
from hapi.client.transport import LoopbackTransport
from hapi.models.layers import LayeredModel
from hapi.models.zoo import ModelSpec, build
from hapi.server.loopback import loopback_handler
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.storage.manifest import Manifest
from hapi.storage.objects import open_store
from hapi.storage.pack import pack
from hapi.storage.sources import SourceOptions, open_source

COUNT = 46
SETTINGS: dict[str, Any] = {
    "model": "resnet18", "weights": "random", "bs": 10, "request_size": 7, "epochs": 2, "threads": 1, "freeze": 12,
    "dataset": "blobs", "lr": 0.01, "split": "freeze",
}  # fmt: skip
SIDE = 32


def pack_blobs(
    store: Path, name: str = "blobs", count: int = COUNT, classes: int = 4, side: int = SIDE
) -> Manifest:
    """A data set of float32 images that tell their class: sample i is of class i % classes."""
    folder = store.parent / f"arrays-{store.name}-{name}"
    folder.mkdir()
    labels = np.arange(count) % classes
    images = np.random.default_rng(0).normal(size=(count, 3, side, side)).astype(np.float32)
    images += labels[:, None, None, None]
    np.save(folder / "x.npy", images)
    np.save(folder / "y.npy", labels)
    source = open_source(str(folder / "x.npy"), SourceOptions(labels=folder / "y.npy"))
    return pack(source, open_store(str(store)), name)


@contextlib.contextmanager
def service_of(store: Path) -> Iterator[Service]:
    service = Service(ServerSettings(store=str(store), cos_batch=4, threads=1), open_store(str(store)))
    try:
        yield service
    finally:
        service.close()


def open_session(service: Service, **changes: Any) -> Session:
    settings = TrainSettings(**{**SETTINGS, **changes})
    transport = LoopbackTransport(loopback_handler(service))
    with mock.patch("hapi.client.models.build", _built):
        return Session(settings, prepare(settings, transports=[transport]))


_built_once = lru_cache(maxsize=2)(build)


def _built(spec: ModelSpec, *, allow_import: bool) -> LayeredModel:
    """Traced and initialised once, then copied: most of the time of a session's start."""
    kept = _built_once(spec, allow_import=allow_import)
    return kept.over(copy.deepcopy(kept.module))


class Silent:
    """A watcher that only remembers; ``on_step`` is called after each step."""

    def __init__(self) -> None:
        self.steps = 0
        self.entries: list[Mapping[str, Any]] = []

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        self.started = (epoch, batches, done)

    def step_done(self, report: PassReport) -> None:
        self.steps += 1
        self.on_step(self.steps)

    def on_step(self, steps: int) -> None:
        """For a test to replace."""

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        self.entries.append(entry)
