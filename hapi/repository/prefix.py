"""Models as a server needs them: the prefix that a reference names, from the zoo or from the store.

After DStore (tensor-level access by the identity of layers), with the content in the identity as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch

from hapi.errors import ConflictError, ModelError, UnprocessableError
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec, common_skeleton
from hapi.models.zoo.names import is_file
from hapi.repository.built import BuiltModels, BuiltPrefix, check_size, spec_of
from hapi.repository.loading.load import IDENTITY
from hapi.repository.opening import open_model
from hapi.repository.pushed import PushedModel
from hapi.repository.stored import StoredModel
from hapi.store.base import ObjectStore
from hapi.wire.references import ModelReference


def zoo_reference(spec: ModelSpec, model: LayeredModel, split: int) -> ModelReference:
    """Return the reference to layers 1..``split`` of ``model``, which the server builds from the same
    ``spec``.
    """
    if is_file(spec.weights):
        raise ModelError(
            f"the server cannot read {spec.weights}; push the model into the store (hapi push"
            f" {spec.architecture} STORE/NAME --weights {spec.weights}) and train with store:NAME"
        )
    return ModelReference(
        source="zoo",
        name=spec.architecture,
        weights=spec.weights,
        digest=model.prefix_digest(split),
        blocks=spec.blocks,
        input_shape=spec.input_shape,
    )


def store_reference(pushed: PushedModel, model: LayeredModel, split: int) -> ModelReference:
    """Return the reference to layers 1..``split`` of a pushed model, for the input shape of ``model``."""
    return ModelReference(
        source="store",
        name=pushed.reference,
        weights="pushed",
        digest=model.prefix_digest(split),
        blocks=pushed.spec.blocks,
        input_shape=model.input_shape,
    )


class PrefixSource(Protocol):
    """Source of the weights of a prefix, tensor by tensor."""

    def key(self, name: str) -> str:
        """Key of a tensor's content (:func:`hapi.models.graph.digest.content_key`), known before it is loaded."""

    def read(self, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield tensors ``names``, verified, in any order, on the CPU."""


class PushedPrefix:
    """Weights of a pushed model. Tenants share them by their digest, so that is verified too."""

    def __init__(self, stored: StoredModel) -> None:
        self._stored = stored

    def key(self, name: str) -> str:
        """Return the key of a tensor's content."""
        return self._stored.key(name)

    def read(self, names: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield tensors ``names``, verified, on the CPU."""
        return self._stored.read(names, IDENTITY)


def open_prefix(
    reference: ModelReference,
    split: int,
    store: ObjectStore,
    allow_imports: Collection[str] = (),
    max_bytes: int | None = None,
    builds: BuiltModels | None = None,
) -> tuple[LayeredModel, PrefixSource]:
    """Return the layers of ``reference`` without weights, and the source of the weights; the digest is
    checked.

    Args:
        reference: the model that a request names.
        split: last layer that is needed.
        store: where pushed models lie.
        allow_imports: factories or modules that may be imported.
        max_bytes: bound of the weights of a model from the zoo, which is built whole.
        builds: facts of earlier builds, which save building again.

    Raises:
        ConflictError: the model here has another digest.
        UnprocessableError: the model has no such split.
        ModelError: the model cannot be built.
        TooLargeError: its weights have more than ``max_bytes``.
    """
    if reference.source == "store":
        stored = open_model(store, reference.name)
        model = stored.prefix_structure(reference.input_shape, allow_imports)
        _check_split(model, split, reference)
        _check_digest(model, split, reference)  # before anything is read
        return model, PushedPrefix(stored)
    spec = spec_of(reference)
    builds = builds or BuiltModels(kept=0)
    _check_split(common_skeleton(spec, allow_imports), split, reference)
    if max_bytes is not None:
        check_size(spec, allow_imports, max_bytes)
    with builds.building.holding(spec):
        remembered = builds.find(spec)
        if remembered is not None and remembered.prefix_digest(split) == reference.digest:
            return remembered, BuiltPrefix(builds, spec, allow_imports, remembered)
        model, weights = builds.build(spec, allow_imports)
    try:
        _check_digest(model, split, reference)
    except ConflictError:
        weights.clear()  # the error's frames live on until the garbage collector comes by, the weights must not
        raise
    return model, BuiltPrefix(builds, spec, allow_imports, model, weights)


def structure_of(
    reference: ModelReference, split: int, store: ObjectStore, allow_imports: Collection[str] = ()
) -> LayeredModel:
    """Return the model of ``reference`` without weights, to be read; of a pushed one only the manifest is read.

    Args:
        reference: the model that a request names.
        split: last layer that is needed.
        store: where pushed models lie.
        allow_imports: factories or modules that may be imported.

    Raises:
        ConflictError: layers 1..``split`` have another digest here, since the model was replaced.
    """
    if reference.source == "store":
        model = open_model(store, reference.name).prefix_structure(reference.input_shape, allow_imports)
        _check_split(model, split, reference)
        _check_digest(model, split, reference)
        return model
    return common_skeleton(spec_of(reference), allow_imports)


def _check_split(model: LayeredModel, split: int, reference: ModelReference) -> None:
    if not 0 <= split <= len(model):
        raise UnprocessableError(
            f"split {split}: {reference.name} has layers 1 to {len(model)} (0 pushes nothing)"
        )


def _check_digest(model: LayeredModel, split: int, reference: ModelReference) -> None:
    digest = model.prefix_digest(split)
    if digest != reference.digest:
        raise ConflictError(
            f"layers 1..{split} of {reference.name} have digest {digest} here, but the request expects"
            f" {reference.digest}: other weights, or other versions of torch, torchvision or hapi on the two sides"
        )
