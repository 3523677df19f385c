"""Pushed models: weights in a store, read tensor by tensor.

    STORE/models/NAME/PUSH/weights.safetensors   tensors in layer order: layers 1..s are one range
    STORE/models/NAME/model.json                 written last: a model without it does not exist

After DStore (tensor-level access by the identity of layers), with the content in the identity as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any, Protocol

import torch

from hapi.errors import (
    ConflictError,
    DataError,
    HapiError,
    ModelError,
    NotFoundError,
    UnprocessableError,
)
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec, skeleton
from hapi.models.zoo.names import is_file
from hapi.repository.built import BuiltModels, BuiltPrefix, check_size, spec_of
from hapi.repository.manifest import LayerEntry, ModelManifest, manifest_key, model_prefix
from hapi.repository.pushed import PushedModel
from hapi.repository.stored import StoredModel
from hapi.repository.weights_file import TensorEntry, encode
from hapi.store.base import ObjectStore
from hapi.store.commit import commit
from hapi.store.locking.locks import FORCE, LeaseLostError, is_lock_object
from hapi.wire.references import ModelReference, check_digest, check_name

LOCK_NAME = "push.lock"


@dataclass(frozen=True)
class ModelSummary:
    """One line about a pushed model; ``problem`` says why it cannot be used."""

    name: str
    architecture: str | None = None
    digest: str | None = None
    bytes: int | None = None
    layers: int | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def push(
    store: ObjectStore,
    name: str,
    model: LayeredModel,
    spec: ModelSpec,
    *,
    replace_existing: bool = False,
    force_lock: bool = False,
    advice: str = FORCE,
) -> StoredModel:
    """Write ``model``, built from ``spec``, into ``store`` as ``name``.

    A killed push leaves nothing that looks like a model.

    Args:
        store: where it is written.
        name: its name there.
        model: all layers, with weights.
        spec: the build that made it; whoever reads the model builds its layers from it.
        replace_existing: replace the model of this name.
        force_lock: take the lock of another writer that is known to be dead.
        advice: tells a person how to do that.

    Raises:
        ConflictError: the name is taken, or another process is pushing it.
    """
    check_name(name, "model")
    lock = f"{model_prefix(name)}/{LOCK_NAME}"
    with store.lock(lock, force=force_lock, advice=advice) as lease:
        mark = store.mark(manifest_key(name))
        if not replace_existing and mark is not None:
            raise ConflictError(f"model {name!r} is already in {store.url}; replace it with --replace")
        names = model.tensor_names(0, len(model))
        data, entries = encode([(n, model.tensors.get(n)) for n in names])
        for entry in entries:  # hashed once, while it was written
            model.remember_digest(entry.name, entry.digest)
        manifest = _manifest(name, model, spec, entries)
        store.put(manifest.weights_key, data)
        kept, parts = (manifest.weights_key, manifest_key(name)), {manifest.weights_key: len(data)}
        try:
            commit(store, manifest_key(name), manifest.to_bytes(), mark=mark, lease=lease, parts=parts)
        except LeaseLostError:
            with suppress(
                HapiError
            ):  # nobody else has this push's id, and the successor has cleaned up already
                store.delete(manifest.weights_key)
            raise
        left = [info.key for info in store.list(model_prefix(name)) if info.key not in kept]
        lease.check()  # after the listing: nothing in it can be of one that takes the lock from now on
        for key in left:
            if not is_lock_object(key, lock):
                store.delete(key)  # an earlier push, or what a killed one left
        store.clean_temporary(model_prefix(name))
    return StoredModel(store, manifest)


def _manifest(
    name: str, model: LayeredModel, spec: ModelSpec, entries: Sequence[TensorEntry]
) -> ModelManifest:
    if is_file(spec.weights):
        spec = replace(
            spec, weights=PurePath(spec.weights).name
        )  # where it lay on this machine is nobody's business
    output = model.output_shapes()[-1]
    return ModelManifest(
        name=name,
        push=f"push-{secrets.token_hex(6)}",
        spec=spec,
        digests=tuple(model.prefix_digests()),
        identities=tuple(model.identities()),
        classes=output[0] if len(output) == 1 else None,
        default_freeze=model.default_freeze,
        layers=tuple(LayerEntry(layer.name, layer.output_shape, layer.tensors) for layer in model.layers),
        tensors={entry.name: entry for entry in entries},
    )


def open_model(store: ObjectStore, name: str, digest: str | None = None) -> StoredModel:
    """Open the pushed model ``name``.

    Args:
        store: where it lies.
        name: its name there.
        digest: the digest that it must have; None for any.

    Raises:
        NotFoundError: there is no such model; the message names those that are there.
        ConflictError: the store holds a model with another digest.
    """
    key = manifest_key(name)
    try:
        data = store.get(key)
    except NotFoundError:
        known = ", ".join(store.list_names("models")[:8]) or "none"
        raise NotFoundError(
            f"{store.url} has no model {name!r}; it has: {known}",
            outside=f"there is no model {name!r} here; GET /v1/models and 'hapi ls' tell what there is",
        ) from None
    manifest = ModelManifest.from_bytes(data, f"{store.url}/{key}")
    if manifest.name != name:
        raise DataError(f"{store.url}/{key} describes a model {manifest.name!r}; push {name!r} again")
    if digest is not None and manifest.digest != check_digest(digest, "digest"):
        raise ConflictError(
            f"model {name!r} has digest {manifest.digest} here, not {digest}; it was replaced"
        )
    return StoredModel(store, manifest)


def list_models(store: ObjectStore) -> list[ModelSummary]:
    """Return a line about every model in the store, damaged ones included."""
    return [_summary(store, name) for name in store.list_names("models")]


def _summary(store: ObjectStore, name: str) -> ModelSummary:
    try:
        found = open_model(store, name).manifest
    except NotFoundError:
        return ModelSummary(name, problem="incomplete: push it again")
    except HapiError as error:
        return ModelSummary(name, problem=str(error))
    return ModelSummary(name, found.spec.architecture, found.digest, found.nbytes, len(found.layers))


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
        name=pushed.name,
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
        return model, stored
    spec = spec_of(reference)
    builds = builds or BuiltModels(kept=0)
    _check_split(skeleton(spec, allow_imports), split, reference)
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
    """Return the model of ``reference`` without weights; of a pushed one only the manifest is read.

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
    return skeleton(spec_of(reference), allow_imports)


def materialise(
    reference: ModelReference,
    split: int,
    store: ObjectStore,
    allow_imports: Collection[str] = (),
    max_bytes: int | None = None,
) -> LayeredModel:
    """Return the model of ``reference`` with the weights of layers 1..``split`` loaded, and no others.

    Its tensors are its own. Errors are those of :func:`open_prefix`.

    Args:
        reference: the model that a request names.
        split: last layer that is needed.
        store: where pushed models lie.
        allow_imports: factories or modules that may be imported.
        max_bytes: bound of the weights of a model from the zoo, which is built whole.
    """
    model, source = open_prefix(reference, split, store, allow_imports, max_bytes)
    for name, tensor in source.read(model.tensor_names(0, split)):
        model.assign(name, tensor, model.digest_of(name))
    return model


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
