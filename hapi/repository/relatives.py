"""Models of a store that share layers with another one: queries for the longest common prefix (DStore, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from hapi.errors import HapiError
from hapi.models.graph.architecture import LayerIdentity, shared_layers
from hapi.repository.known.documents import KnownDocuments
from hapi.repository.known.side_by_side import side_by_side
from hapi.repository.manifest import ModelManifest
from hapi.repository.opening import read_manifest
from hapi.repository.versions import list_versions, model_names
from hapi.store.base import ObjectStore


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A model that shares layers with another one."""

    name: str
    version: int
    """The version of that name that shares most: weights first, then structure, then the newest."""
    same_structure: int
    """Layers of the other one, from the first on, that it has."""
    same_weights: int
    """Layers of the other one, from the first on, that it has with the same weights."""

    @property
    def reference(self) -> str:
        """Return NAME@VERSION."""
        return f"{self.name}@{self.version}"

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
    return Relative(name=other.name, version=other.version, same_structure=structure, same_weights=weights)


def relatives(store: ObjectStore, model: ModelManifest) -> list[Relative]:
    """Return what of ``store`` shares a layer with ``model``, other versions of it too, as :func:`relatives_of`
    does.
    """
    return relatives_of(store, model.identities, without=(model.name, model.version))


def relatives_of(
    store: ObjectStore, identities: Sequence[LayerIdentity], without: tuple[str, int] | None = None
) -> list[Relative]:
    """Return the models of ``store`` that share a layer with a model, pushed or not, those with most weights first.

    Each is there once, by the version that shares most. The manifests of all versions are read, and no weights; those
    of a remote store that this machine has read are not read again. One that cannot be read is left out.

    Args:
        store: of the others.
        identities: of the model's splits 0 to L (:meth:`hapi.models.graph.layers.LayeredModel.identities`).
        without: name and version that are left out.
    """

    def versions_of(name: str) -> list[tuple[str, int]]:
        try:
            return [(name, number) for number in list_versions(store, name)]
        except HapiError:
            return []

    def relative(version: tuple[str, int]) -> Relative | None:
        """Return what a version shares; None for a manifest that cannot be read."""
        try:
            return _shared(identities, read_manifest(store, *version, known))
        except HapiError:  # incomplete or damaged: hapi ls says so
            return None

    versions = chain(*side_by_side(store, versions_of, model_names(store)))
    with KnownDocuments(store) as known:
        relations = side_by_side(store, relative, [each for each in versions if each != without])
    best: dict[str, Relative] = {}
    for each in relations:
        if each is not None and each.same_structure:
            best[each.name] = max(each, best.get(each.name, each), key=_closeness)
    return sorted(best.values(), key=lambda r: (-r.same_weights, -r.same_structure, r.name))


def _closeness(relative: Relative) -> tuple[int, int, int]:
    return relative.same_weights, relative.same_structure, relative.version
