"""Cost of chunk windows in accuracy: scikit-learn's digits, stored sorted by class, over 20 epochs and five
seeds.

A network is trained from random weights, all of it, by the very batches of
:class:`hapi.data.epoch_order.EpochOrder`. Storage by class is the worst case for a shuffle that does not
reach far: a chunk then holds one class. The stored order itself is trained too. If it does as well as the
rest, the test has shown nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.storage.shuffle_quality import quality
from hapi.arrays import IntArray
from hapi.data.epoch_order import FULL, EpochOrder, Shuffle, epoch_sequence, trainer_batches
from hapi.errors import UsageError

STORED = "as stored"
_TEST_SHARE = 5
"""One sample in five is held out."""
_SPLIT_SEED = 2026
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for the 95% interval of a mean of so many."""


@dataclass(frozen=True, kw_only=True)
class AccuracySettings:
    """One comparison."""

    shuffles: tuple[Shuffle, ...] = (Shuffle(16, 8), Shuffle(16, 16), Shuffle(16, 32))
    """Shuffles beside the full permutation and the stored order."""
    seeds: int = 5
    epochs: int = 20
    batch: int = 64
    lr: float = 0.05


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of one order, for each seed, and beside the full permutation's with the same seeds."""

    values: tuple[float, ...]
    full: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.mean(self.values)

    @property
    def difference(self) -> float:
        """Accuracy of this order, less that of the full permutation."""
        return self.mean - statistics.mean(self.full)

    @property
    def half_width(self) -> float:
        """Half width of the difference's 95% interval, seed by seed."""
        pairs = [a - b for a, b in zip(self.values, self.full, strict=True)]
        return _STUDENT[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs))

    @property
    def noise(self) -> float:
        """Standard deviation of the full permutation over seeds."""
        return statistics.stdev(self.full)

    def to_json(self) -> dict[str, Any]:
        """The numbers by name."""
        return {
            "values": list(self.values),
            "mean": self.mean,
            "difference": self.difference,
            "half_width_95": self.half_width,
            "seed_noise": self.noise,
        }


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """One order: of the held-out samples after the last epoch."""

    shuffle: str
    score: float
    """Shuffle quality of the first epoch's order to these batches."""
    accuracy: Figure
    loss: Figure

    @property
    def within_noise(self) -> bool:
        """True when accuracy and loss are no further from the full permutation's than those are from seed to
        seed.
        """
        return all(abs(f.difference) <= f.noise for f in (self.accuracy, self.loss))

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        return {
            "shuffle": self.shuffle,
            "score": self.score,
            "accuracy": self.accuracy.to_json(),
            "loss": self.loss.to_json(),
            "within_noise": self.within_noise,
        }


@dataclass(eq=False)
class Digits:
    """The data: training samples sorted by class, and the held-out ones."""

    train: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    test: tuple[torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UsageError(
                f"bench shuffle needs scikit-learn: pip install 'hapi-split[quickstart]' ({error})"
            ) from error
        data = load_digits()
        mixed = epoch_sequence(_SPLIT_SEED, 0, len(data.target))
        held = len(mixed) // _TEST_SHARE
        train = mixed[held:]
        self.test = _tensors(data, mixed[:held])
        self.train = _tensors(data, train[np.argsort(data.target[train], kind="stable")])


def _tensors(data: Any, ids: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(data.images[ids]).float().unsqueeze(1) / 16
    return images, torch.from_numpy(data.target[ids]).long()


def measure_accuracy(settings: AccuracySettings, tell: Callable[[str], None]) -> list[AccuracyRow]:
    """Train every order with every seed; the stored order's row is the last."""
    if settings.seeds not in _STUDENT:
        raise UsageError(f"--seeds: expected 2 to {max(_STUDENT)}, got {settings.seeds}")
    digits = Digits()
    found: dict[str, list[tuple[float, float]]] = {}
    scores = {}
    for shuffle in (FULL, *settings.shuffles, None):
        name = STORED if shuffle is None else str(shuffle)
        found[name] = [_trained(digits, shuffle, seed, settings) for seed in range(settings.seeds)]
        first = np.concatenate(_batches(shuffle, 0, 0, len(digits.train[1]), settings.batch))
        scores[name] = quality(first, settings.batch).score
        tell(f"{name}: accuracy {100 * statistics.mean(a for a, _ in found[name]):.2f}%")
    return [accuracy_row(name, scores[name], results, found[str(FULL)]) for name, results in found.items()]


def accuracy_row(
    name: str, score: float, results: Sequence[tuple[float, float]], full: Sequence[tuple[float, float]]
) -> AccuracyRow:
    """A row from (accuracy, loss) of each seed, of this order and of the full permutation."""
    accuracy, loss = zip(*results, strict=True)
    full_accuracy, full_loss = zip(*full, strict=True)
    return AccuracyRow(
        shuffle=name,
        score=score,
        accuracy=Figure(values=accuracy, full=full_accuracy),
        loss=Figure(values=loss, full=full_loss),
    )


def _trained(
    digits: Digits, shuffle: Shuffle | None, seed: int, settings: AccuracySettings
) -> tuple[float, float]:
    """(accuracy, loss) of the held-out samples after the last epoch."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=settings.lr, momentum=0.9)
    images, labels = digits.train
    for epoch in range(settings.epochs):
        for batch in _batches(shuffle, seed, epoch, len(labels), settings.batch):
            ids = torch.from_numpy(batch)
            loss = nn.functional.cross_entropy(network(images[ids]), labels[ids])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    images, labels = digits.test
    with torch.no_grad():
        logits = network(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return accuracy, nn.functional.cross_entropy(logits, labels).item()


def _batches(shuffle: Shuffle | None, seed: int, epoch: int, count: int, batch: int) -> list[IntArray]:
    if shuffle is None:
        return trainer_batches(np.arange(count, dtype=np.int64), batch)
    return EpochOrder(seed=seed, shuffle=shuffle).batches(
        epoch, np.arange(count, dtype=np.int64), count, batch
    )
