"""Models to store and load: the generator of DStore's section 6.3, VGG19, and a classifier on BERT-large.

Only forms are made here; :mod:`benchmarks.models.content` fills them.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from hapi.errors import UsageError

ITEM_BYTES = 4
"""All tensors are float32."""
WHOLE = "100%"
_SYNTHETIC = re.compile(r"(\d{1,5})x(\d{1,5})(MB|GB)(?:~(\d{1,2})%)?")
_UNITS = {"MB": 10**6, "GB": 10**9}
_VGG19 = (64, 64, 0, 128, 128, 0, *[256] * 4, 0, *[512] * 4, 0, *[512] * 4)
"""Channels of its convolutions; 0 is a pooling."""
_BERT_WIDTH, _BERT_LAYERS, _HEAD_WIDTH, _HEAD_LAYERS = 1024, 24, 8192, 6
_BERT_PART = 18
"""Encoder layers of the part of BERT-large: with the embeddings 35 % of the model."""


@dataclass(frozen=True)
class LayerShape:
    """Name of a layer, and the shapes of its tensors by name."""

    name: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(math.prod(shape) for _, shape in self.tensors) * ITEM_BYTES


@dataclass(frozen=True)
class ModelShape:
    """Layers of a model in their order."""

    name: str
    layers: tuple[LayerShape, ...]
    prefix_layers: int = 0
    """Layers of the part that is asked for alone, as transfer learning does; 0 where there is no such part."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(layer.nbytes for layer in self.layers)

    def part(self, name: str) -> tuple[LayerShape, ...]:
        """Return the layers of a part.

        Args:
            name: ``prefix``, ``25%`` for the first layers that have a quarter of the bytes, or ``25% spread`` for as
                many layers all over the model.
        """
        if name == "prefix":
            return self.layers[: self.prefix_layers]
        share, _, spread = name.partition("% ")
        percent = int(share.rstrip("%"))
        if spread:
            step = 100 / percent
            return tuple(self.layers[int(number * step)] for number in range(int(len(self.layers) / step)))
        return self.layers[: _first(self.layers, percent / 100)]


def tensors_of(layers: Sequence[LayerShape]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of ``layers``."""
    for layer in layers:
        yield from layer.tensors


def _first(layers: Sequence[LayerShape], share: float) -> int:
    """Number of first layers whose bytes are nearest to ``share`` of all; at least one."""
    wanted = share * sum(layer.nbytes for layer in layers)
    counts, total = {0: 0}, 0
    for number, layer in enumerate(layers, 1):
        total += layer.nbytes
        counts[number] = total
    return max(1, min(counts, key=lambda number: abs(counts[number] - wanted)))


@cache
def shape_of(name: str) -> ModelShape:
    """Return the model of this name: ``vgg19``, ``bert``, or such as ``10x1GB`` and ``100x4GB~30%``.

    Raises:
        UsageError: there is no such model.
    """
    if name == "vgg19":
        return _vgg19()
    if name == "bert":
        return _bert()
    found = _SYNTHETIC.fullmatch(name)
    if found is None or not int(found[1]) or not int(found[2]):
        raise UsageError(
            f"model {name!r}: expected vgg19, bert, or LAYERSxSIZE such as 10x1GB or 100x4GB~30%"
        )
    layers, total = int(found[1]), int(found[2]) * _UNITS[found[3]]
    if total // layers < 1024:
        raise UsageError(f"model {name!r}: a layer has at least 1,024 bytes")
    deviation = int(found[4] or 0) / 100
    return synthetic(name, total, layers, round(2 * deviation * total / layers))


def synthetic(name: str, total: int, layers: int, difference: int, seed: int = 0) -> ModelShape:
    """Return a model of dense layers, made as DStore's generator does.

    Args:
        name: of the model.
        total: bytes of all layers.
        layers: their number.
        difference: largest difference between the sizes of two layers, in bytes.
        seed: of the order of the sizes, which are spread evenly over that difference.
    """
    offsets = [(number / max(1, layers - 1) - 0.5) * difference for number in range(layers)]
    random.Random(seed).shuffle(offsets)
    sizes = [total / layers + (offset if layers > 1 else 0.0) for offset in offsets]
    return ModelShape(name, tuple(_dense(f"layer{number}", size) for number, size in enumerate(sizes, 1)))


def _dense(name: str, nbytes: float) -> LayerShape:
    """A dense layer of about ``nbytes``, as square as it can be."""
    items = nbytes / ITEM_BYTES
    columns = max(1, math.isqrt(int(items)))
    return linear(name, max(1, round(items / (columns + 1))), columns)


def linear(name: str, rows: int, columns: int) -> LayerShape:
    """Return a dense layer with its bias."""
    return LayerShape(name, ((f"{name}.weight", (rows, columns)), (f"{name}.bias", (rows,))))


def _vgg19() -> ModelShape:
    layers, index, before = [], 0, 3
    for channels in _VGG19:
        if not channels:
            index += 1
            continue
        name = f"features.{index}"
        weight = (f"{name}.weight", (channels, before, 3, 3))
        layers.append(LayerShape(name, (weight, (f"{name}.bias", (channels,)))))
        index, before = index + 2, channels
    dense = [
        linear(f"classifier.{n}", *sides)
        for n, sides in ((0, (4096, 25088)), (3, (4096, 4096)), (6, (1000, 4096)))
    ]
    return ModelShape("vgg19", (*layers, *dense), prefix_layers=len(layers))


def _bert() -> ModelShape:
    width = _BERT_WIDTH
    tables = (("word", 30522), ("position", 512), ("token_type", 2))
    embeddings = tuple((f"embeddings.{table}_embeddings.weight", (rows, width)) for table, rows in tables)
    layers = [LayerShape("embeddings", (*embeddings, *_norm("embeddings.LayerNorm")))]
    layers += [_encoder_layer(f"encoder.layer.{number}") for number in range(_BERT_LAYERS)]
    layers.append(linear("pooler.dense", width, width))
    sides = [width] + [_HEAD_WIDTH] * (_HEAD_LAYERS + 1)
    layers += [linear(f"classifier.{n}", rows, columns) for n, (columns, rows) in enumerate(pairwise(sides))]
    layers.append(linear(f"classifier.{_HEAD_LAYERS + 1}", 3, _HEAD_WIDTH))
    return ModelShape("bert", tuple(layers), prefix_layers=1 + _BERT_PART)


def _encoder_layer(name: str) -> LayerShape:
    width = _BERT_WIDTH
    parts = [linear(f"{name}.attention.self.{part}", width, width) for part in ("query", "key", "value")]
    parts.append(linear(f"{name}.attention.output.dense", width, width))
    parts.append(LayerShape("", _norm(f"{name}.attention.output.LayerNorm")))
    parts.append(linear(f"{name}.intermediate.dense", 4 * width, width))
    parts.append(linear(f"{name}.output.dense", width, 4 * width))
    parts.append(LayerShape("", _norm(f"{name}.output.LayerNorm")))
    return LayerShape(name, tuple(tensors_of(parts)))


def _norm(name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return ((f"{name}.weight", (_BERT_WIDTH,)), (f"{name}.bias", (_BERT_WIDTH,)))
