"""Codecs tried on small samples of every cut, so that a plan knows them before a batch crosses or is kept there.

A profile runs all frozen layers that may move on this side, one by one, in a few batches. Of the first one, a few
hundred kB of each layer's output are copied, and the codecs are tried on them once the batch was trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hapi.codecs.choose import CodecFigures
from hapi.codecs.measure import measure
from hapi.codecs.names import EXACT, ITEM_BYTES, LOSSY, NONE
from hapi.models.tensors import tensor_bytes

PARTS, PART_BYTES = 4, 64 << 10
"""Parts of a cut's features on which codecs are tried, of as many samples, and their bytes: it takes milliseconds."""
ROWS = 16
"""Short samples that are tried one by one, as records are: less of them repeats."""


class TriedCodecs:
    """Ratio and speeds of codecs by cut, from small samples. :attr:`cuts` and :meth:`at` may be used by any thread."""

    def __init__(self, *wanted: str) -> None:
        """Try the codecs that settings of these values may take: ``auto``, or one codec."""
        names = [name for one in wanted for name in (EXACT if one == "auto" else (one,))]
        self._names = tuple(name for name in dict.fromkeys(names) if name != NONE)
        self._waiting: dict[int, tuple[int, list[torch.Tensor]]] = {}
        """Elements of a sample, and parts of features that codecs were not tried on yet."""
        self._figures: dict[int, tuple[CodecFigures, ...]] = {}
        """Those of parts, which hold several samples if they are short."""
        self._records: dict[int, tuple[CodecFigures, ...]] = {}
        """Those of single samples."""

    def sample(self, cut: int, features: torch.Tensor) -> None:
        """Copy a sample of a layer's output, unless there was one.

        Args:
            cut: the layer's number.
            features: its output for a few training samples, [n, ...], on any device.
        """
        known = cut in self._figures or cut in self._waiting
        if known or not self._names or not features.numel() or features.element_size() not in ITEM_BYTES:
            return
        self._waiting[cut] = (features[0].numel(), _parts(features))

    def measure(self) -> None:
        """Try the codecs on the samples that were copied."""
        while self._waiting:
            cut, (each, parts) = self._waiting.popitem()
            first = parts[0]
            # Codecs that round take float32 alone.
            names = [name for name in self._names if name not in LOSSY or first.dtype == torch.float32]
            self._records[cut] = figures = _measured(parts, names)
            if len(first) > each:
                self._records[cut] = _measured(first.split(each)[:ROWS], names)
            self._figures[cut] = figures

    @property
    def cuts(self) -> tuple[int, ...]:
        """Cuts that codecs were tried at, in order."""
        return tuple(sorted(self._figures))

    def at(self, cut: int, wanted: str, *, records: bool = False) -> tuple[CodecFigures, ...]:
        """Return what was found at ``cut`` of the codecs that a setting of value ``wanted`` may take.

        Args:
            cut: the layer's number.
            wanted: ``auto``, or a codec.
            records: whether samples are encoded one by one, as in a cache.
        """
        names: Sequence[str] = EXACT if wanted == "auto" else (wanted,)
        figures = (self._records if records else self._figures).get(cut, ())
        return tuple(found for found in figures if found.name in names)


def _measured(parts: Sequence[torch.Tensor], names: Sequence[str]) -> tuple[CodecFigures, ...]:
    return measure([tensor_bytes(part) for part in parts], parts[0].element_size(), names)


def _parts(features: torch.Tensor) -> list[torch.Tensor]:
    """Flat parts of samples in even distances, each at another place of its sample; on the host."""
    count, each = len(features), features[0].numel()
    length = max(1, PART_BYTES // features.element_size())
    found = []
    for part in range(min(PARTS, count)):
        start = part * count // PARTS if count > PARTS else part
        rows = features[start : start + max(1, length // each)].reshape(-1)
        begin = part * max(0, len(rows) - length) // max(1, PARTS - 1)
        found.append(rows[begin : begin + length].to("cpu", copy=True))
    return found
