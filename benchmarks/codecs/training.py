"""Networks of the seven families, trained on places in scikit-learn's photographs.

No weights of these networks come with a package, and the shape of features is that of trained layers only after
training. The task is real and quick to learn: in which of six parts of which of two photographs a crop lies. Crops that
the accuracy is of, and whose features are encoded, are none of those that were trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hapi.errors import UsageError
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec
from hapi.repository.sources.networks import build_network
from hapi.wire.references import TransformSpec

ROWS, COLUMNS, PHOTOS = 2, 3, 2
"""Parts of a photograph, and photographs."""
CLASSES = PHOTOS * ROWS * COLUMNS
BATCH, RATE = 16, 3e-4
ENOUGH = 0.9
"""Share of the held-out crops that are told right after which a training ends."""
HELD_OUT = 240
LOOK_STEPS = 25
"""Steps between two looks at the held-out crops."""
_TRAIN_SEED, _HELD_OUT_SEED = 1, 2


@dataclass(frozen=True, kw_only=True)
class Training:
    """Facts of a training that ended."""

    steps: int
    accuracy: float
    """Share of the held-out crops that were told right."""
    seconds: float


class Crops:
    """Crops of the photographs, drawn one batch after the other."""

    def __init__(self, side: int, seed: int) -> None:
        """Begin the draws of ``seed`` with crops of ``side`` pixels; :class:`UsageError` without scikit-learn."""
        try:
            from sklearn.datasets import load_sample_images
        except ImportError as error:
            raise UsageError(
                "the networks are trained on scikit-learn's photographs: pip install 'hapi-split[quickstart]' "
                f"({error})"
            ) from error
        self._photos = load_sample_images().images
        self._side, self._random = side, np.random.default_rng(seed)
        form = TransformSpec.for_image_size(side)
        self._mean, self._std = (torch.tensor(v)[:, None, None] for v in (form.mean, form.std))

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``count`` crops, float32 [count, 3, side, side], and their classes, int64 [count]."""
        labels = self._random.integers(0, CLASSES, count)
        crops = np.stack([self._crop(int(label)) for label in labels])
        pixels = torch.from_numpy(crops).permute(0, 3, 1, 2).float() / 255
        return (pixels - self._mean) / self._std, torch.from_numpy(labels)

    def _crop(self, label: int) -> Any:
        photo = self._photos[label % PHOTOS]
        row, column = divmod(label // PHOTOS, COLUMNS)
        height, width = photo.shape[0] // ROWS, photo.shape[1] // COLUMNS
        top = row * height + self._random.integers(0, height - self._side + 1)
        left = column * width + self._random.integers(0, width - self._side + 1)
        return photo[top : top + self._side, left : left + self._side]


def held_out_crops(side: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first ``count`` held-out crops of ``side`` pixels, and their classes."""
    return Crops(side, _HELD_OUT_SEED).draw(count)


def family(name: str, side: int, weights: str = "random:0") -> LayeredModel:
    """Return the network ``name`` with a head for the crops' classes.

    Args:
        name: one of the seven families.
        side: of its images.
        weights: ``random:SEED`` or a file of :func:`train`.
    """
    spec = ModelSpec(architecture=name, num_classes=CLASSES, weights=weights, input_shape=(3, side, side))
    return build_network(spec)


def train(name: str, side: int, most_steps: int, target: Path, tell: Callable[[str], None]) -> Training:
    """Train all layers of the network ``name`` from random weights, and write them to ``target``.

    Args:
        name: one of the seven families.
        side: of its images in pixels.
        most_steps: the training ends here, or when :data:`ENOUGH` of the held-out crops are told right.
        target: file of the weights.
        tell: gets a line at each look.
    """
    model, began = family(name, side), time.monotonic()
    network = model.segment(0, len(model))
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, fused=True)
    crops, held_out = Crops(side, _TRAIN_SEED), held_out_crops(side, HELD_OUT)
    torch.manual_seed(0)
    steps, accuracy = 0, 0.0
    while steps < most_steps and accuracy < ENOUGH:
        for _ in range(min(LOOK_STEPS, most_steps - steps)):
            inputs, labels = crops.draw(BATCH)
            loss = nn.functional.cross_entropy(network(inputs), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            steps += 1
        accuracy = _accuracy(network, *held_out)
        seconds = time.monotonic() - began
        tell(f"{name}: {steps} steps of {BATCH} crops, {accuracy:.1%} held-out, {seconds:.0f} s")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    torch.save(model.module.state_dict(), part)
    part.replace(target)
    return Training(steps=steps, accuracy=accuracy, seconds=time.monotonic() - began)


@torch.inference_mode()
def _accuracy(network: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    network.eval()
    found = torch.cat([network(part).argmax(1) for part in inputs.split(BATCH)])
    network.train()
    return float((found == labels).double().mean())
