"""Comparison of two pushed models by the identities of their layers. Pure: it reads two manifests, and no weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hapi.repository.manifest import ModelManifest
from hapi.repository.relatives import shared_prefix
from hapi.repository.structure import LayerEntry

Change = Literal["weights", "tensors", "operations", "only in the first", "only in the second"]
"""Other content of the same tensors; tensors of other names, shapes or types; other operations, settings or
connections; no layer of this name in the other model."""


@dataclass(frozen=True, kw_only=True)
class LayerChange:
    """A layer that differs by itself, not only by what comes before it."""

    layer: int
    """Its number in the first model; in the second if it is in that alone."""
    name: str
    change: Change
    tensors: tuple[str, ...]
    """Tensors that differ, or are in one of the models alone."""
    nbytes: int
    """Their bytes; in the second model where they are in both."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Comparison of two models."""

    layers: tuple[int, int]
    """Numbers of layers."""
    same_structure: int
    """Layers from the first on that both have."""
    same_weights: int
    """Layers from the first on that both have with the same weights: a frozen prefix that they can share."""
    changes: tuple[LayerChange, ...]

    @property
    def same(self) -> bool:
        """Return whether the models are the same, names and cuts of their layers aside."""
        return not self.changes and self.same_weights == self.layers[0]

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {**asdict(self), "same": self.same}


def compare(first: ModelManifest, second: ModelManifest) -> Difference:
    """Return what the two models share, and the layers that differ by themselves."""
    shared = shared_prefix(first, second)
    return Difference(
        layers=(len(first.layers), len(second.layers)),
        same_structure=shared.same_structure,
        same_weights=shared.same_weights,
        changes=tuple(_changes(first, second, shared.same_structure, shared.same_weights)),
    )


def _changes(
    first: ModelManifest, second: ModelManifest, structure: int, content: int
) -> Iterator[LayerChange]:
    others = {layer.name: layer for layer in second.layers}
    for number, layer in enumerate(first.layers, start=1):
        if number <= content:
            continue
        other = others.get(layer.name)
        if other is None:
            yield _alone(first, number, layer, "only in the first")
            continue
        found = _own_change(first, second, layer, other)
        if found is None and number == structure + 1:
            found = ("operations", ())  # its tensors are the same, and so is all before it
        if found is not None:
            change, tensors = found
            nbytes = sum(second.tensors[name].nbytes for name in tensors if name in second.tensors)
            yield LayerChange(layer=number, name=layer.name, change=change, tensors=tensors, nbytes=nbytes)
    known, shared = {layer.name for layer in first.layers}, shared_prefix(second, first).same_weights
    for number, layer in enumerate(second.layers, start=1):
        if layer.name not in known and number > shared:
            yield _alone(second, number, layer, "only in the second")


def _own_change(
    first: ModelManifest, second: ModelManifest, layer: LayerEntry, other: LayerEntry
) -> tuple[Change, tuple[str, ...]] | None:
    forms = [
        {name: (model.tensors[name].dtype, model.tensors[name].shape) for name in entry.tensors}
        for model, entry in ((first, layer), (second, other))
    ]
    if forms[0] != forms[1]:
        names = [*layer.tensors, *(name for name in other.tensors if name not in forms[0])]
        return "tensors", tuple(name for name in names if forms[0].get(name) != forms[1].get(name))
    changed = tuple(n for n in layer.tensors if first.tensors[n].digest != second.tensors[n].digest)
    return ("weights", changed) if changed else None


def _alone(model: ModelManifest, number: int, layer: LayerEntry, change: Change) -> LayerChange:
    nbytes = sum(model.tensors[name].nbytes for name in layer.tensors)
    return LayerChange(layer=number, name=layer.name, change=change, tensors=layer.tensors, nbytes=nbytes)
