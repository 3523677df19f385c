"""Sessions over the real service without a socket, for tests of the session, the trainer and the checkpoint."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from PIL import Image

from hapi.client.session import Session
from hapi.config.settings import load
from hapi.data.manifest import Manifest
from hapi.ingest.pack import pack
from hapi.ingest.sources.open import SourceOptions, open_source
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec
from hapi.repository.sources.networks import build_network
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.train.callbacks import StepDone, TrainingCallback
from hapi.train.settings import TrainSettings
from hapi.train.trainer import Trainer
from hapi.wire.frames import Buffer
from hapi.wire.transport.http import Handler, LoopbackTransport
from support.thin_resnet import THIN_LAYERS, THIN_RESNET

COUNT = 46
SETTINGS: dict[str, Any] = {
    "model": THIN_RESNET, "weights": "random", "bs": 10, "request_size": 7, "epochs": 2, "threads": 1, "freeze": 12,
    "dataset": "blobs", "lr": 0.01, "split": "freeze", "cache": "off",
    "alternate": "off",
}  # fmt: skip
ALLOWED = ("support.thin_resnet",)
"""What a server of these jobs may import."""
SIDE = 32
SMALL_MODEL = "squeezenet1_1"
"""A network of the library whose whole file is small (5 MB)."""


def pack_blobs(
    store: Path, name: str = "blobs", count: int = COUNT, classes: int = 4, side: int = SIDE
) -> Manifest:
    """A dataset of float32 images that tell their class: sample i is of class i % classes."""
    folder = store.parent / f"arrays-{store.name}-{name}"
    folder.mkdir()
    labels = np.arange(count) % classes
    images = np.random.default_rng(0).normal(size=(count, 3, side, side)).astype(np.float32)
    images += labels[:, None, None, None]
    np.save(folder / "x.npy", images)
    np.save(folder / "y.npy", labels)
    source = open_source(str(folder / "x.npy"), SourceOptions(labels=folder / "y.npy"))
    return pack(source, open_store(str(store)), name)


def pack_pictures(store: Path, name: str = "pictures", count: int = COUNT) -> Manifest:
    """A dataset of small PNG files of several sizes; picture i is of class i % 4."""
    folder, random = store.parent / f"{store.name}-{name}", np.random.default_rng(1)
    for number in range(count):
        path = folder / f"c{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (36 + number % 5, 40, 3), dtype=np.uint8)).save(path)
    return pack(open_source(str(folder)), open_store(str(store)), name)


@contextlib.contextmanager
def service_of(store: Path) -> Iterator[Service]:
    settings = ServerSettings(store=str(store), cos_batch=4, threads=1, allow_model=ALLOWED)
    service = Service(settings, open_store(str(store)))
    try:
        yield service
    finally:
        service.close()


_JOB = re.compile(rb'"job": "[0-9a-f]{32}"')
"""The name of a job in its requests; it is another one each time."""


def remembering(service: Service) -> Handler:
    """Answers as ``service`` does, and gives the same bytes when it is asked the same again, by whatever job.

    For tests of what is done with features, which are computed once for all of them.
    """
    handle = loopback_handler(service)
    answers: dict[tuple[str, str, bytes], tuple[int, Mapping[str, str], list[bytes]]] = {}

    def remembered(method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], Iterator[Buffer]]:
        asked = method, path, _JOB.sub(b"", body)
        if (kept := answers.get(asked)) is None:
            status, headers, buffers = handle(method, path, body)
            kept = status, headers, [bytes(buffer) for buffer in buffers]
            if status == 200:  # another one may be of this moment
                answers[asked] = kept
        return kept[0], kept[1], iter(kept[2])

    return remembered


def over_slow_store(handle: Handler) -> Handler:
    """Answers as ``handle`` does, and says that its store is slow to read single samples."""

    def answer(method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], Iterator[Buffer]]:
        status, headers, buffers = handle(method, path, body)
        if method == "GET" and "/datasets/" in path and status == 200:
            document = json.loads(b"".join(bytes(buffer) for buffer in buffers))
            assert "prefers_chunks" not in document
            content = json.dumps({**document, "prefers_chunks": True}).encode()
            return status, {**headers, "Content-Length": str(len(content))}, iter([content])
        return status, headers, buffers

    return answer


def settings_of(**changes: Any) -> TrainSettings:
    """The settings of a small job, and these, by the names that ``hapi-train`` has for them."""
    layers = {} if "model" in changes else {"blocks": THIN_LAYERS}
    return load(TrainSettings, None, {**SETTINGS, **layers, **changes}).value


def trainer_of(session: Session, callback: TrainingCallback | None = None, **changes: Any) -> Trainer:
    """A trainer over ``session`` with these settings of the training; those of a session may be among them."""
    return Trainer(session, settings_of(**changes), [callback] if callback else ())


def open_session(service: Service | Handler, **changes: Any) -> Session:
    """Of this service, or of what answers for it; settings of a training may be among ``changes``."""
    settings = settings_of(**changes)
    transport = LoopbackTransport(loopback_handler(service) if isinstance(service, Service) else service)
    with mock.patch("hapi.client.models.build_network", built):
        return Session.open(settings, optimizer_bytes=settings.optimizer_bytes, transports=[transport])


_built_once = lru_cache(maxsize=8)(build_network)


def built(spec: ModelSpec, *, allow_import: bool) -> LayeredModel:
    """Traced, initialised and hashed once, then copied: most of the time of a session's start."""
    kept = _built_once(spec, allow_import=allow_import)
    copied = kept.over(copy.deepcopy(kept.module))
    for name in kept.tensors.names():
        copied.remember_digest(name, kept.digest_of(name))
    return copied


class Silent(TrainingCallback):
    """A callback that only remembers; ``on_step`` is called after each step."""

    def __init__(self) -> None:
        self.steps = 0
        self.entries: list[Mapping[str, Any]] = []

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        self.started = (epoch, batches, done)

    def step_done(self, step: StepDone) -> None:
        self.steps += 1
        self.on_step(self.steps)

    def on_step(self, steps: int) -> None:
        """For a test to replace."""

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        self.entries.append(entry)


class Interrupting(Silent):
    """Raises ``what`` after step ``at``."""

    def __init__(self, at: int, what: BaseException | None = None) -> None:
        super().__init__()
        self.at, self.what = at, what or KeyboardInterrupt()

    def on_step(self, steps: int) -> None:
        if steps == self.at:
            raise self.what
