"""Content of the models: random weights, as many bytes as DStore's, and their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash

from benchmarks.models.shapes import LayerShape, tensors_of
from hapi.models.tensors import tensor_bytes

Tensors = Mapping[str, torch.Tensor]


def filled(layers: Sequence[LayerShape], seed: int) -> dict[str, torch.Tensor]:
    """Return all tensors of ``layers`` with random content, the same for the same ``seed``."""
    found = {name: torch.empty(sides) for name, sides in tensors_of(layers)}
    for name, tensor in found.items():
        generator = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
        generator.random(out=tensor.numpy(), dtype=np.float32)
    return found


def touched(layers: Sequence[LayerShape]) -> dict[str, torch.Tensor]:
    """Return tensors of ``layers`` whose memory is there already, so that no way pays for its first use."""
    return {name: torch.full(sides, -1.0) for name, sides in tensors_of(layers)}


def checksums(tensors: Tensors) -> dict[str, str]:
    """Return the xxh3-64 of each tensor by name."""
    return {name: xxhash.xxh3_64_hexdigest(tensor_bytes(tensor)) for name, tensor in tensors.items()}
