"""Cost of ``--augment-views K`` in accuracy: scikit-learn's digits with a random crop, drawn K times for each sample.

    python -m benchmarks.storage.view_accuracy

A small network is trained from random weights on few samples, so that augmentation matters, with the draws that
``hapi-train`` would make. Every seed has the same weights, order and draws of view 0 for each K.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.storage.shuffle_accuracy import Digits
from hapi.data.epoch_order import FULL, EpochOrder
from hapi.data.transforms.random_params import padded_crop, uniforms

SAMPLES, EPOCHS, BATCH, PADDING, SIDE = 300, 32, 32, 1, 8
VIEWS: tuple[int | None, ...] = (1, 2, 4, 8, None)
"""Draws of each sample; None: a new one in each epoch."""


def trained(digits: Digits, seed: int, views: int | None, augment: bool = True) -> float:
    """Return the share of held-out samples that are told right after the last epoch."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    # Stored by class: a sample every so often has all classes in equal shares.
    chosen = torch.linspace(0, len(digits.train[1]) - 1, SAMPLES).long()
    images, labels = digits.train[0][chosen], digits.train[1][chosen]
    order = EpochOrder(seed=seed, shuffle=FULL)
    for epoch in range(EPOCHS):
        view = epoch if views is None else epoch % views
        seen = cropped(images, seed, view) if augment else images
        for batch in order.batches(epoch, torch.arange(SAMPLES).numpy(), SAMPLES, BATCH):
            ids = torch.from_numpy(batch)
            loss = nn.functional.cross_entropy(network(seen[ids]), labels[ids])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return float((network(digits.test[0]).argmax(1) == digits.test[1]).double().mean())


def cropped(images: torch.Tensor, seed: int, view: int) -> torch.Tensor:
    """Return the images of one view, float32 [n, 1, 8, 8]: a crop of each with a black border around it."""
    numbers = uniforms(seed, view, torch.arange(len(images)).numpy())
    framed = nn.functional.pad(images, (PADDING,) * 4)
    found = []
    for image, drawn in zip(framed, numbers, strict=True):
        top, left, height, width = padded_crop(drawn, SIDE, SIDE, PADDING, SIDE)
        found.append(
            image[:, top + PADDING : top + PADDING + height, left + PADDING : left + PADDING + width]
        )
    return torch.stack(found)


def line(name: str, accuracies: Sequence[float], unlimited: Sequence[float]) -> str:
    """Return a row: mean, spread over seeds, and the mean difference from a new draw in each epoch."""
    pairs = [100 * (a - b) for a, b in zip(accuracies, unlimited, strict=True)]
    spread, error = 100 * statistics.stdev(accuracies), statistics.stdev(pairs) / len(pairs) ** 0.5
    mean = 100 * statistics.mean(accuracies)
    return f"| {name} | {mean:.2f} % | {spread:.2f} | {statistics.mean(pairs):+.2f} +- {error:.2f} |"


def main(seeds: int = 8) -> None:
    """Train each with ``seeds`` seeds, and print a table."""
    torch.set_num_threads(1)
    digits = Digits()
    found = {k: [trained(digits, seed, k) for seed in range(seeds)] for k in VIEWS}
    plain = [trained(digits, seed, None, augment=False) for seed in range(seeds)]
    print("| views | accuracy | spread | less than a new draw in each epoch |\n|---|---|---|---|")
    print(line("not augmented", plain, found[None]))
    for views, accuracies in found.items():
        print(line("new in each epoch" if views is None else str(views), accuracies, found[None]))


if __name__ == "__main__":
    main()
