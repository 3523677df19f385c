"""Models of a store that share layers with another one: queries for the longest common prefix (DStore, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hapi.errors import HapiError
from hapi.models.graph.architecture import LayerIdentity, shared_layers
from hapi.repository.known.documents import KnownDocuments
from hapi.repository.known.side_by_side import side_by_side
from hapi.repository.manifest import ModelManifest
from hapi.repository.opening import read_manifest
from hapi.repository.versions import ModelAddress, model_names, resolve
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
    return _shared(model.identities, other)


def _shared(identities: Sequence[LayerIdentity], other: ModelManifest) -> Relative:
    structure, weights = (
        shared_layers(
            [getattr(identity, kind) for identity in identities],
            [getattr(identity, kind) for identity in other.identities],
        )
        for kind in ("structure", "content")
    )
    return Relative(name=other.name, same_structure=structure, same_weights=weights)


def relatives(store: ObjectStore, model: ModelManifest) -> list[Relative]:
    """Return the other models of ``store`` that share a layer with ``model``, as :func:`relatives_of` does."""
    return relatives_of(store, model.identities, without=model.name)


def relatives_of(
    store: ObjectStore, identities: Sequence[LayerIdentity], without: str | None = None
) -> list[Relative]:
    """Return the models of ``store`` that share a layer with a model, pushed or not, those with most weights first.

    It reads the manifest of each model, and no weights; those of a remote store that this machine has read are not read
    again. A model whose manifest cannot be read is left out.

    Args:
        store: of the others.
        identities: of the model's splits 0 to L (:meth:`hapi.models.graph.layers.LayeredModel.identities`).
        without: name of a model that is left out.
    """

    def relative(name: str) -> Relative | None:
        """Return what the latest version of a model shares; None for a manifest that cannot be read."""
        try:
            version = resolve(store, ModelAddress(name, None))
            return _shared(identities, read_manifest(store, name, version, known))
        except HapiError:  # incomplete or damaged: hapi ls says so
            return None

    names = [name for name in model_names(store) if name != without]
    with KnownDocuments(store) as known:
        relations = side_by_side(store, relative, names)
    found = [each for each in relations if each is not None and each.same_structure]
    return sorted(found, key=lambda r: (-r.same_weights, -r.same_structure, r.name))
