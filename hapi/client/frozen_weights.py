"""The trainer's frozen weights in memory that it shares with the other processes of its machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from hapi.models.graph.digest import content_key
from hapi.models.graph.layers import LayeredModel
from hapi.models.graph.precision import rounded_weight
from hapi.models.shared.keys import rounded_key
from hapi.models.shared.pack import PACK_BYTES, divided
from hapi.models.shared.weights import SharedWeights

Read = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


class FrozenWeights:
    """Puts shared tensors in the place of a job's frozen weights. Not thread-safe.

    A tensor that trained layers read too stays the job's own.
    """

    def __init__(
        self, model: LayeredModel, frozen: LayeredModel, last_split: int, shared: SharedWeights, read: Read
    ) -> None:
        """Share the weights of layers 1 to ``last_split``.

        Args:
            model: all layers; weights of it that are in memory are not read again.
            frozen: the layers up to ``last_split`` as they run: ``model``, or its layers in fewer bits.
            last_split: number of frozen layers.
            shared: memory of all processes.
            read: reads weights of ``model`` that are not in memory, by name.
        """
        self._model, self._frozen, self._last_split = model, frozen, last_split
        self._shared, self._read = shared, read
        self._own = set(model.tensor_names(last_split, len(model)))
        self._placed: set[str] = set()

    def bring(self, split: int) -> None:
        """Bring the weights of the frozen layers after ``split``; errors are those of reading."""
        self._take(self._missing(split))

    def share(self) -> None:
        """Put shared tensors in the place of those frozen weights that are in memory in the type that they run in."""
        if self._frozen is self._model:
            self._take([name for name in self._missing(0) if not self._model.tensors.get(name).is_meta])

    def _missing(self, split: int) -> list[str]:
        wanted = [n for n in self._frozen.tensor_names(split, self._last_split) if n not in self._own]
        return [n for n in wanted if n not in self._placed or self._frozen.tensors.get(n).is_meta]

    def _take(self, wanted: Sequence[str]) -> None:
        names: dict[str, list[str]] = {}
        forms: dict[str, torch.Tensor] = {}
        digests: dict[str, str] = {}
        for name in wanted:
            digest = self._model.digest_of(name)
            key = rounded_key(self._frozen, name, content_key(digest, self._model.tensors.get(name)))
            names.setdefault(key, []).append(name)
            forms[key] = self._frozen.tensors.get(name)
            digests[key] = digest
        firsts = {key: found[0] for key, found in names.items()}
        for key, tensor in self._shared.take(forms, lambda keys: self._load(keys, firsts)):
            for name in names[key]:
                self._frozen.assign(name, tensor, digests[key] if self._frozen is self._model else None)
                self._placed.add(name)

    def _load(self, keys: Collection[str], names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        absent: dict[str, int] = {}
        for key in keys:
            weight = self._model.tensors.get(names[key])
            if weight.is_meta:
                absent[key] = weight.numel() * weight.itemsize
            else:
                yield key, rounded_weight(self._frozen, names[key], weight.detach())
        for part in divided(absent.items(), PACK_BYTES):
            found = self._read([names[key] for key in part])
            for key in part:
                yield key, rounded_weight(self._frozen, names[key], found[names[key]])
