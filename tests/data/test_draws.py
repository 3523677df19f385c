"""What is random depends on seed, epoch and sample alone, never changes, and is distributed as torchvision's is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torchvision import transforms

from hapi.data.epoch_order import epoch_sequence, sample_hash
from hapi.data.transforms.random_params import (
    ATTEMPTS,
    FLIP,
    JITTER,
    LEFT,
    ORDER,
    SLOTS,
    TOP,
    flips,
    jitter,
    padded_crop,
    resized_crop,
    uniforms,
)

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
seeds = st.integers(0, (1 << 63) - 1)
GOLDEN_NUMBERS = [
    ["0x1.e45de15fa5e63p-1", "0x1.6fc484011c951p-1", "0x1.875654468048cp-3", "0x1.bce1e4a6f0064p-1"],
    ["0x1.9a3f2c9b804d2p-1", "0x1.e8e6072cefb0dp-1", "0x1.7cbcffc44c4d4p-1", "0x1.47de6bc6b815cp-1"],
    ["0x1.9ce70ea5d3d80p-6", "0x1.ba9dcd593bd74p-2", "0x1.6f5a536867b7cp-2", "0x1.88b02a34eec58p-1"],
]
GOLDEN_BOXES = [(49, 154, 307, 265), (52, 79, 321, 339), (105, 191, 132, 146)]
GOLDEN_PADDED = [(6, 10, 32, 32), (9, 6, 32, 32), (2, 7, 32, 32)]
GOLDEN_ORDERS = [[0, 1, 2, 3], [1, 2, 3, 0], [1, 2, 0, 3]]


def many(count: int, seed: int = 5, epoch: int = 2) -> Any:
    return uniforms(seed, epoch, np.arange(count))


def test_they_never_change() -> None:
    """Written down once: a resumed run, an older server and another machine draw the same."""
    numbers = uniforms(7, 3, np.array([0, 41, 1 << 40]))
    assert [[float(n).hex() for n in row[[0, TOP, FLIP, SLOTS - 1]]] for row in numbers] == GOLDEN_NUMBERS
    boxes = [tuple(resized_crop(row, 375, 500, SCALE, RATIO)) for row in numbers]
    assert boxes == GOLDEN_BOXES
    assert [tuple(padded_crop(row, 37, 45, 4, 32)) for row in numbers] == GOLDEN_PADDED
    assert [[k for k, _ in jitter(row, (0.4, 0.4, 0.4, 0.1))] for row in numbers] == GOLDEN_ORDERS


@given(seeds, seeds, st.lists(st.integers(0, 1 << 48), min_size=1, max_size=20))
def test_pure(seed: int, epoch: int, ids: list[int]) -> None:
    together = uniforms(seed, epoch, np.array(ids))
    assert together.shape == (len(ids), SLOTS) and (together >= 0).all() and (together < 1).all()
    for sample, row in zip(ids, together, strict=True):
        assert np.array_equal(uniforms(seed, epoch, np.array([sample]))[0], row)


def test_seeds_epochs_samples_and_slots_are_independent() -> None:
    base = many(2000)
    assert len(np.unique(base)) == base.size
    for other in (many(2000, seed=6), many(2000, epoch=3), many(2001)[1:], many(2000, seed=2, epoch=5)):
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.02
    assert np.abs(np.corrcoef(base.T) - np.eye(SLOTS)).max() < 0.1
    order = np.argsort(
        epoch_sequence(5, 2, 2000)
    )  # where each sample comes in its epoch says nothing of its crop
    assert np.abs([np.corrcoef(order, slot)[0, 1] for slot in base.T]).max() < 0.1
    assert not set((sample_hash(5, 2, 2000) >> np.uint64(11)).tolist()) & set(
        (base * 2.0**53).astype(np.uint64).ravel()
    )


@pytest.mark.parametrize("slot", range(SLOTS))
def test_every_slot_is_uniform(slot: int) -> None:
    assert stats.kstest(many(20_000)[:, slot], "uniform").pvalue > 1e-4


# -- beside torchvision ------------------------------------------------------------------------------------------


class Fed:
    """Torch's generator as ``get_params`` of a RandomResizedCrop asks it, but with numbers of ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._numbers: Iterator[float] = iter(())
        self._place: list[float] = []
        monkeypatch.setattr(torch, "empty", lambda *_: self)
        monkeypatch.setattr(torch, "randint", self._randint)

    def feed(self, row: Any) -> None:
        self._numbers = (float(row[k + half]) for k in range(ATTEMPTS) for half in (0, ATTEMPTS))
        self._place = [float(row[TOP]), float(row[LEFT])]

    def uniform_(self, low: float, high: float) -> torch.Tensor:
        return torch.tensor(
            float(low) + next(self._numbers) * (float(high) - float(low)), dtype=torch.float64
        )

    def _randint(self, low: int, high: int, size: Any) -> torch.Tensor:
        return torch.tensor(int(self._place.pop(0) * high))


@pytest.mark.parametrize(
    "shape", [(375, 500), (500, 375), (64, 64), (7, 3), (1, 1), (1, 400), (900, 2), (33, 100)]
)
@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        (SCALE, RATIO),
        pytest.param((0.9, 1.0), (1.9, 2.0), marks=pytest.mark.slow),
        pytest.param((0.01, 0.02), (0.5, 0.6), marks=pytest.mark.slow),
    ],
)
def test_the_same_numbers_give_torchvisions_box(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> None:
    """Its own logarithms are float32: a side may round to the next pixel, of one box in hundreds."""
    rows, image = many(300), torch.zeros((3, *shape), dtype=torch.uint8)
    with monkeypatch.context() as patch:
        fed, theirs = Fed(patch), []
        for row in rows:
            fed.feed(row)
            theirs.append(transforms.RandomResizedCrop.get_params(image, scale, ratio))
    mine = np.array([resized_crop(row, *shape, scale, ratio) for row in rows])
    difference = np.abs(mine - np.array(theirs))
    assert difference.max() <= 1 and (difference.any(axis=1)).mean() <= 0.01
    top, left, height, width = mine.T
    assert (mine[:, :2] >= 0).all() and (top + height <= shape[0]).all() and (left + width <= shape[1]).all()
    assert (mine[:, 2:] > 0).all()


@pytest.mark.parametrize("shape", [(375, 500), (30, 80)])
def test_resized_crops_are_distributed_as_torchvisions(shape: tuple[int, int]) -> None:
    image = torch.zeros((3, *shape), dtype=torch.uint8)
    torch.manual_seed(0)
    theirs = np.array(
        [transforms.RandomResizedCrop.get_params(image, SCALE, RATIO) for _ in range(1500)], float
    )
    mine = np.array([resized_crop(row, *shape, SCALE, RATIO) for row in many(1500)], float)
    for of in (
        lambda b: b[:, 0], lambda b: b[:, 1], lambda b: b[:, 2], lambda b: b[:, 3],
        lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0] / np.maximum(1, shape[0] - b[:, 2]), lambda b: b[:, 1] / np.maximum(1, shape[1] - b[:, 3]),
    ):  # fmt: skip
        assert stats.ks_2samp(of(mine), of(theirs)).pvalue > 1e-4


@given(st.integers(1, 80), st.integers(0, 60), st.integers(0, 60), st.integers(0, 20), seeds)
def test_padded_crops_lie_within_the_padding(
    side: int, more: int, wider: int, padding: int, seed: int
) -> None:
    for row in uniforms(seed, 0, np.arange(5)):
        box = padded_crop(row, side + more, side + wider, padding, side)
        assert box[2:] == (side, side)
        assert -padding <= box.top <= more + padding and -padding <= box.left <= wider + padding


def test_padded_crops_are_everywhere_alike() -> None:
    boxes = np.array([padded_crop(row, 32, 34, 4, 32)[:2] for row in many(20_000)])
    counts = np.unique(boxes, axis=0, return_counts=True)[1]
    assert len(counts) == 9 * 11 and stats.chisquare(counts).pvalue > 1e-4


def test_flips() -> None:
    rows = many(20_000)
    for probability in (0.0, 0.3, 0.5, 1.0):
        share = np.mean([flips(row, probability) for row in rows])
        assert abs(share - probability) <= 4 * math.sqrt(probability * (1 - probability) / len(rows))


def test_jitter_is_distributed_as_torchvisions() -> None:
    amounts = (0.4, 1.0, 0.2, 0.1)
    drawn = [jitter(row, amounts) for row in many(3000)]
    orders = np.unique([[k for k, _ in steps] for steps in drawn], axis=0, return_counts=True)[1]
    assert len(orders) == 24 and stats.chisquare(orders).pvalue > 1e-4
    torch.manual_seed(0)
    jitters = transforms.ColorJitter(*amounts)
    asked = (jitters.brightness, jitters.contrast, jitters.saturation, jitters.hue)
    theirs = np.array([transforms.ColorJitter.get_params(*asked)[1:] for _ in range(3000)])
    for kind in range(4):
        mine = [dict(steps)[kind] for steps in drawn]
        assert asked[kind][0] <= min(mine) and max(mine) <= asked[kind][1]
        assert stats.ks_2samp(mine, theirs[:, kind]).pvalue > 1e-4
    assert {tuple(k for k, _ in jitter(row, (0.0, 0.5, 0.0, 0.1))) for row in many(50)} == {(1, 3), (3, 1)}
    assert ORDER == JITTER + 4 and ORDER + 4 == SLOTS
