"""Trainings whose features are kept: a small job, a server that counts what it is asked for, and a comparison.

Batches and requests are so large that no forward pass has fewer than 16 samples, as decision 0009 needs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hapi.errors import TransportError
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.train.trainer import Trainer
from hapi.wire.frames import Buffer
from hapi.wire.transport.http import Handler
from support.local_job import ALLOWED, Silent, open_session, pack_blobs

SAMPLES = 96
LAST = 13
"""Layer 13, which pools, has no weights: it is run before the trained ones."""
JOB: dict[str, Any] = {
    "bs": 32, "request_size": 32, "epochs": 3, "dataset": "blobs", "cache": "auto", "freeze": 12,
    "weights": "random:0",
}  # fmt: skip


@contextlib.contextmanager
def kept_service(store: Path) -> Iterator[Service]:
    """A service over the datasets ``blobs`` and ``held``, which are packed into ``store``."""
    pack_blobs(store, count=SAMPLES)
    pack_blobs(store, "held", count=32)
    settings = ServerSettings(store=str(store), cos_batch=16, threads=1, allow_model=ALLOWED)
    service = Service(settings, open_store(str(store)))
    try:
        yield service
    finally:
        service.close()


class Counting:
    """Answers as a service does, counts the samples that features or stored bytes are asked for, and may be dead."""

    def __init__(self, service: Service) -> None:
        self._handle: Handler = loopback_handler(service)
        self.asked = 0
        self.requests: list[int] = []
        self.dead = False

    def __call__(
        self, method: str, path: str, body: bytes
    ) -> tuple[int, Mapping[str, str], Iterator[Buffer]]:
        if self.dead:
            raise TransportError("the server is gone")
        if method == "POST":
            self.requests.append(len(json.loads(body)["ids"]))
            self.asked += self.requests[-1]
        return self._handle(method, path, body)


def train(
    service: Service | Counting, folder: Path | None, callback: Silent | None = None, **changes: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    own = {"cache": "off"} if folder is None else {"cache_dir": str(folder)}
    with open_session(service, **{**JOB, **own, **changes}) as session:  # type: ignore[arg-type]
        report = Trainer(session, callbacks=[callback or Silent()]).run()
        return report, {k: v.clone() for k, v in session.trained.state_dict().items()}


FIGURES = ("loss", "accuracy", "samples", "validation_loss", "validation_accuracy")


def check_same(reference: tuple[Any, Any], found: tuple[Any, Any]) -> None:
    for name in FIGURES:
        assert [e.get(name) for e in found[0]["epochs"]] == [e.get(name) for e in reference[0]["epochs"]], (
            name
        )
    assert all(torch.equal(found[1][name], value) for name, value in reference[1].items())
