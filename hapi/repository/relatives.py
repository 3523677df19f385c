"""Models of a store that share layers with another one: queries for the longest common prefix (DStore, section 4)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hapi.errors import HapiError
from hapi.models.graph.architecture import shared_layers
from hapi.repository.manifest import ModelManifest
from hapi.repository.opening import open_model
from hapi.repository.versions import model_names
from hapi.store.base import ObjectStore


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A model that shares layers with another one."""

    name: str
    same_structure: int
    """Layers of the other one, from the first on, that it has."""
    same_weights: int
    """Layers of the other one, from the first on, that it has with the same weights."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def shared_prefix(model: ModelManifest, other: ModelManifest) -> Relative:
    """Return how many layers of ``model``, from the first on, ``other`` has."""
    structure, weights = (
        shared_layers(
            [getattr(identity, kind) for identity in model.identities],
            [getattr(identity, kind) for identity in other.identities],
        )
        for kind in ("structure", "content")
    )
    return Relative(name=other.name, same_structure=structure, same_weights=weights)


def relatives(store: ObjectStore, model: ModelManifest) -> list[Relative]:
    """Return the other models of ``store`` that share a layer with ``model``, those with most weights first.

    It reads the manifest of each model, and no weights. A model whose manifest cannot be read is left out.
    """
    found = []
    for name in model_names(store):
        if name == model.name:
            continue
        try:
            relative = shared_prefix(model, open_model(store, name).manifest)
        except HapiError:  # incomplete or damaged: hapi ls says so
            continue
        if relative.same_structure:
            found.append(relative)
    return sorted(found, key=lambda r: (-r.same_weights, -r.same_structure, r.name))
