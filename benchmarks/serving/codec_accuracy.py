"""Held-out accuracy of heads on digits whose features were rounded on the wire, over several seeds.

The digits go through a ResNet18 of random weights up to a cut, cross in a codec, and go on to the last frozen layer.
The head is then trained on three quarters of them; seeds draw the quarter that is held out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from hapi.codecs.codec import decode_into, encode
from hapi.codecs.names import LOSSY, NONE
from hapi.models.graph.layers import LayeredModel
from hapi.models.tensors import tensor_bytes
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.freeze import choose_freeze

CUTS, SEEDS, SIDE = (3, 8, 11), 5, 32
STEPS, RATE = 150, 0.01
_BATCH = 128


def measure_accuracy(tell: Callable[[str], None]) -> dict[int, dict[str, list[float]]]:
    """Return the held-out accuracies by cut and codec, one for each seed."""
    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32) / 8 - 1)[:, None].expand(-1, 3, -1, -1)
    inputs = nn.functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear")
    labels = torch.from_numpy(digits.target.astype(np.int64))
    model = build(ModelSpec(architecture="resnet18", weights="random:0", input_shape=(3, SIDE, SIDE)))
    found: dict[int, dict[str, list[float]]] = {}
    for cut in CUTS:
        found[cut] = {}
        for codec in (NONE, *LOSSY):
            features = _features(model, inputs, cut, codec)
            found[cut][codec] = [_head_accuracy(features, labels, seed) for seed in range(SEEDS)]
        tell(f"accuracy at cut {cut}")
    return found


@torch.inference_mode()
def _features(model: LayeredModel, inputs: torch.Tensor, cut: int, codec: str) -> torch.Tensor:
    last = model.last_split(choose_freeze(model, None))
    before, after = model.segment(0, cut, frozen=True), model.segment(cut, last, frozen=True)
    parts = [after(_crossed(before(part), codec)) for part in inputs.split(_BATCH)]
    return torch.cat(parts).flatten(1)


def _crossed(features: torch.Tensor, codec: str) -> torch.Tensor:
    features = features.contiguous()
    buffers = encode(codec, tensor_bytes(features), 4, len(features))
    if buffers is None:
        return features
    decoded = torch.empty_like(features)
    decode_into(codec, b"".join(buffers), tensor_bytes(decoded), 4, len(features))
    return decoded


def _head_accuracy(features: torch.Tensor, labels: torch.Tensor, seed: int) -> float:
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=random)
    held_out, training = order[: len(order) // 4], order[len(order) // 4 :]
    spread = features[training].std(0) + 1e-6
    x: Any = ((features - features[training].mean(0)) / spread).clone()
    head = nn.Linear(x.shape[1], 10)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.Adam(head.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(x[training]), labels[training]).backward()
        optimizer.step()
    return float((head(x[held_out]).argmax(1) == labels[held_out]).float().mean())
