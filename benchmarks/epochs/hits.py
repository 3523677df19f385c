"""Epochs of hits beside a plain loop: the price of a batch whose features are all kept.

A training of the last layer runs in this process, over a server in this process. In its first epoch it keeps all
features; then each of its epochs is paired with an epoch of the plain loop, which indexes one tensor and trains the
same layer from the same weights with the same batches. The loop seeds nothing, as nothing draws. Which of the two goes
first alternates. Processor seconds are those of the whole process; other work on the machine disturbs them less. Two
further epochs of both are not timed: their calls of Python functions are counted, in all threads, which no noise
disturbs.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.testbed.conditions import Spread, conditions
from hapi.client.memory import status_bytes
from hapi.client.session import Session
from hapi.errors import HapiError
from hapi.ingest.pack import pack
from hapi.ingest.sources.open import SourceOptions, open_source
from hapi.server.http.loopback import loopback_handler
from hapi.server.service import Service
from hapi.server.settings import ServerSettings
from hapi.store.open import open_store
from hapi.train.callbacks import TrainingCallback
from hapi.train.settings import TrainSettings
from hapi.train.trainer import Trainer
from hapi.wire.transport.http import LoopbackTransport

GOAL = 0.2
"""Most milliseconds of a batch beside the plain loop's."""
_MODEL, _FREEZE, _WIDTH = "resnet18", 12, 512
"""A network whose pooled features are 2 KB a sample, and the layer before them."""
_SIDE, _CLASSES = 32, 10
_COUNTED = 2
"""Epochs whose calls are counted."""
_WARM = 3
"""First epochs, which are neither timed nor counted: they compute, and let libraries take their memory."""
_LR, _MOMENTUM, _DECAY = 0.01, 0.9, 1e-4


@dataclass(frozen=True, kw_only=True)
class HitsSettings:
    """Measurements to take."""

    samples: int = 4096
    bs: int = 64
    epochs: int = 30
    """Epochs of the job; the first and the last ones are not timed."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class HitsResult:
    """Epochs of both, in milliseconds and calls a batch."""

    settings: HitsSettings
    batches: int
    """Batches of an epoch."""
    ours: tuple[float, ...]
    """Milliseconds a batch, of each epoch."""
    plain: tuple[float, ...]
    """The plain loop's, in the same order."""
    cpu: tuple[float, ...]
    """Milliseconds of processors for a batch, of each epoch."""
    plain_cpu: tuple[float, ...]
    """The plain loop's."""
    calls: float
    """Python functions called for a batch."""
    plain_calls: float
    equal_losses: bool
    """True when all epochs' mean losses are those of the plain loop, to the bit."""
    grown_bytes: int
    """Growth of the process between the first timed epoch and the last."""
    conditions: dict[str, Any]

    @property
    def more(self) -> Spread:
        """Milliseconds a batch beside the plain loop's, of each pair."""
        return _differences(self.ours, self.plain)

    @property
    def more_cpu(self) -> Spread:
        """Milliseconds of processors for a batch beside the plain loop's, of each pair."""
        return _differences(self.cpu, self.plain_cpu)

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        calls, equal = self.calls - self.plain_calls, "yes" if self.equal_losses else "NO"
        return [
            f"{'':24}{'Hapi':>9}{'plain':>9}{'more':>9}",
            _line("ms a batch", self.ours, self.plain, f"; the goal is {GOAL}"),
            _line("processor ms a batch", self.cpu, self.plain_cpu, ""),
            f"{'Python calls a batch':24}{self.calls:9.1f}{self.plain_calls:9.1f}{calls:9.1f}",
            "",
            f"{self.batches} batches of {self.settings.bs} samples of 2 KB an epoch; losses equal to the bit: {equal}",
            f"growth of the process over the timed epochs: {self.grown_bytes / 1e6:.1f} MB",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a document."""
        more = {"more": self.more.to_json(), "more_cpu": self.more_cpu.to_json()}
        return {"benchmark": "hits", "goal": GOAL, **more, **asdict(self)}


def _differences(ours: Sequence[float], plain: Sequence[float]) -> Spread:
    return Spread.of([own - other for own, other in zip(ours, plain, strict=True)])


def _line(name: str, ours: Sequence[float], plain: Sequence[float], goal: str) -> str:
    more = _differences(ours, plain)
    spread = f"median of {more.count} pairs, {more.low:.3f} to {more.high:.3f}{goal}"
    return (
        f"{name:24}{statistics.median(ours):9.3f}{statistics.median(plain):9.3f}{more.median:9.3f}   {spread}"
    )


class CallCount:
    """Counts the calls of Python functions in this thread and in those that are started meanwhile."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._seen = 0

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self._seen

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._seen = next(self._next) + 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count in the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Count from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @staticmethod
    def end() -> None:
        """Count no more."""
        sys.setprofile(None)
        threading.setprofile(None)


class PlainLoop:
    """The epochs as one writes them by hand over features in one tensor."""

    def __init__(self, features: torch.Tensor, labels: torch.Tensor, layer: nn.Linear) -> None:
        """Train ``layer`` on ``features`` [N, k] with ``labels`` int64 [N]."""
        self._features, self._labels, self._layer = features, labels, layer
        self._optimizer = torch.optim.SGD(layer.parameters(), lr=_LR, momentum=_MOMENTUM, weight_decay=_DECAY)

    def epoch(self, order: Sequence[Sequence[int]]) -> float:
        """Train over the ids of an epoch's batches, and return the mean loss."""
        total, samples = 0.0, 0
        for ids in order:
            rows = torch.tensor(ids)
            loss = nn.functional.cross_entropy(self._layer(self._features[rows]), self._labels[rows])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            total, samples = total + loss.item() * len(ids), samples + len(ids)
        return total / samples


Clocks = tuple[float, float]
"""Seconds of the clock on the wall, and of the process on all processors."""


def _now() -> Clocks:
    return time.perf_counter(), time.process_time()


def _since(began: Clocks) -> Clocks:
    wall, processors = _now()
    return wall - began[0], processors - began[1]


class _Pairs(TrainingCallback):
    """Times or counts each epoch of the training, and one of the plain loop before or after it."""

    def __init__(self, session: Session, settings: HitsSettings) -> None:
        self._session, self._settings = session, settings
        self._layer = nn.Linear(_WIDTH, _CLASSES)
        own = session.trained.state_dict()
        self._layer.load_state_dict({name.rpartition(".")[2]: value.clone() for name, value in own.items()})
        self._plain: PlainLoop | None = None
        self._began, self._rss = (0.0, 0.0), 0
        self.own_losses: list[float] = []
        self.plain_losses: list[float] = []
        self.ours: list[Clocks] = []
        self.plain: list[Clocks] = []
        self.count, self.plain_count = CallCount(), CallCount()
        self.grown = 0

    def _is_counted(self, epoch: int) -> bool:
        return epoch >= self._settings.epochs - _COUNTED

    def _is_timed(self, epoch: int) -> bool:
        return epoch >= _WARM and not self._is_counted(epoch)

    def epoch_started(self, epoch: int, batches: int, done: int) -> None:
        """Run the plain epoch first if it is its turn, and start the clock."""
        if epoch % 2:
            self._run_plain(epoch)
        if self._is_counted(epoch):
            self.count.begin()
        self._began = _now()

    def epoch_done(self, entry: Mapping[str, Any]) -> None:
        """Stop the clock, and run the plain epoch if it has not run."""
        seconds, epoch = _since(self._began), entry["epoch"]
        self.count.end()
        self.own_losses.append(entry["loss"])
        if epoch and entry["feature_misses"]:
            raise HapiError(
                f"epoch {epoch}: {entry['feature_misses']} samples were not kept; there is no room"
            )
        if self._is_timed(epoch):
            self.ours.append(seconds)
            resident = status_bytes("VmRSS")
            self._rss = self._rss or resident
            self.grown = resident - self._rss
        if not epoch % 2:
            self._run_plain(epoch)

    def _run_plain(self, epoch: int) -> None:
        loop = self._plain = self._plain or self._loop()
        order = [ids.tolist() for ids in self._session.batch_ids(epoch)]
        if self._is_counted(epoch):
            with self.plain_count.counting():
                self.plain_losses.append(loop.epoch(order))
            return
        began = _now()
        self.plain_losses.append(loop.epoch(order))
        if self._is_timed(epoch):
            self.plain.append(_since(began))

    def _loop(self) -> PlainLoop:
        """The plain loop over what the first epoch has kept."""
        (cache,) = self._session.keeping.training.of().values()
        ids = np.arange(self._settings.samples)
        features, labels = torch.empty(len(ids), _WIDTH), torch.empty(len(ids), dtype=torch.int64)
        found = cache.read(ids, features.view(torch.uint8).numpy(), labels.numpy())
        if not found.all():
            raise HapiError("the first epoch has not kept all features: there is no room")
        return PlainLoop(features, labels, self._layer)


def measure_hits(settings: HitsSettings) -> HitsResult:
    """Measure in this process, with one thread of torch's.

    Raises:
        HapiError: not all features could be kept.
    """
    found, threads = conditions(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="hapi-hits-") as name:
            pairs, batches = _run(Path(name), settings)
    finally:
        torch.set_num_threads(threads)
    each = 1e3 / batches
    return HitsResult(
        settings=settings,
        batches=batches,
        ours=tuple(each * wall for wall, _ in pairs.ours),
        plain=tuple(each * wall for wall, _ in pairs.plain),
        cpu=tuple(each * processors for _, processors in pairs.ours),
        plain_cpu=tuple(each * processors for _, processors in pairs.plain),
        calls=pairs.count.calls / batches / _COUNTED,
        plain_calls=pairs.plain_count.calls / batches / _COUNTED,
        equal_losses=pairs.own_losses == pairs.plain_losses,
        grown_bytes=pairs.grown,
        conditions={**found, "threads": 1},
    )


def _run(folder: Path, settings: HitsSettings) -> tuple[_Pairs, int]:
    """(what was found, batches of an epoch) of a training in ``folder``."""
    store = folder / "store"
    _make_dataset(folder, store, settings.samples)
    job = TrainSettings(
        model=_MODEL, weights=f"random:{settings.seed}", freeze=_FREEZE, dataset="noise", bs=settings.bs,
        epochs=settings.epochs, seed=settings.seed, shuffle="full", optimizer="sgd", split="freeze", threads=1,
        device="cpu", cache="on", cache_dir=str(folder / "cache"), cache_size=1 << 30, progress=False,
        lr=_LR, momentum=_MOMENTUM, weight_decay=_DECAY,
    )  # fmt: skip
    service = Service(ServerSettings(store=str(store), cos_batch=16, threads=1), open_store(str(store)))
    try:
        transports = [LoopbackTransport(loopback_handler(service))]
        with Session.open(job, optimizer_bytes=job.optimizer_bytes, transports=transports) as session:
            pairs = _Pairs(session, settings)
            Trainer(session, job, [pairs]).run()
            return pairs, len(session.batch_ids(0))
    finally:
        service.close()


def _make_dataset(folder: Path, store: Path, samples: int) -> None:
    """Pack random images with random labels as the dataset ``noise``."""
    random = np.random.default_rng(0)
    np.save(folder / "x.npy", random.standard_normal((samples, 3, _SIDE, _SIDE), dtype=np.float32))
    np.save(folder / "y.npy", np.arange(samples) % _CLASSES)
    source = open_source(str(folder / "x.npy"), SourceOptions(labels=folder / "y.npy"))
    pack(source, open_store(str(store)), "noise")
