"""The client's model: built here, or pushed into the store and fetched from its server, only the needed
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hapi.client.settings import STORE_PREFIX, ModelSettings
from hapi.client.soundness import check_head
from hapi.client.transport.server_pool import ServerPool
from hapi.client.transport.stored_tensors import fetch_tensors
from hapi.errors import BadRequestError, ConflictError, UsageError, WeightsAbsentError
from hapi.factories import check_allowed
from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.build import ModelSpec
from hapi.models.zoo.names import is_file, with_seed
from hapi.repository.entries import TensorEntry
from hapi.repository.known.structures import StructureCache
from hapi.repository.loading.load import Loaded
from hapi.repository.manifest import ModelManifest, structure_of_document
from hapi.repository.prefix import store_reference, zoo_reference
from hapi.repository.push import push
from hapi.repository.pushed import PushedModel
from hapi.repository.sources.networks import build_network, weights_named
from hapi.repository.structure import ModelStructure
from hapi.store.open import open_store
from hapi.wire import messages
from hapi.wire.references import ModelReference, given_model


@dataclass(frozen=True, eq=False)
class ClientModel:
    """A model's layers, the reference to its prefix for a server, and a source of the weights from a layer
    on.
    """

    layered: LayeredModel
    reference: Callable[[int], ModelReference]
    """Split to the reference of layers 1..split."""
    load_from: Callable[[int], None]
    """Make sure that the weights of the layers after this one are in memory."""
    weights: str
    """Final source of the weights: ``random:SEED``, a library's name, or ``pushed:NAME@VERSION``."""
    spec: ModelSpec
    """How the model is built, with its head for the dataset's classes."""
    read: Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
    """Read parameters and buffers once more from where the weights came from, by name, on the CPU."""
    pushed: str | None = None
    """Pushed model that they come from, as NAME@VERSION; None for weights that every tier can make."""


def open_client_model(
    settings: ModelSettings,
    servers: ServerPool,
    store: str | None,
    *,
    seed: int,
    classes: int,
    shape: tuple[int, ...],
) -> ClientModel:
    """Return the model of the settings with a fresh head.

    Weights from a local file are pushed into ``store`` first, under a name made of their content, since the
    server must read them too.

    Args:
        settings: the model.
        servers: that have pushed models.
        store: where weights from a file are pushed; None for nowhere.
        seed: of the head, and of random weights.
        classes: outputs of the head.
        shape: shape of one sample (C, H, W).

    Raises:
        UsageError: weights from a file and no store; the message says how to push them.
    """
    if settings.model.startswith(STORE_PREFIX):
        name = given_model(settings.model.removeprefix(STORE_PREFIX), "--model")
        return _pushed(settings, servers, name, settings.allow_model, seed, classes, shape)
    spec = ModelSpec(
        architecture=settings.model,
        num_classes=classes,
        weights="DEFAULT" if settings.weights == "auto" else weights_named(with_seed(settings.weights, seed)),
        input_shape=shape,
        blocks=settings.blocks,
        head_seed=seed,
    )
    check_head(spec, classes, allow_import=True)
    if settings.weights == "auto":
        spec, layered = _pretrained_or_random(spec, seed)
    else:
        layered = build_network(spec, allow_import=True)
    if is_file(spec.weights):
        name = _push_file(spec, layered, store)
        return _pushed(settings, servers, name, (*settings.allow_model, settings.model), seed, classes, shape)
    return ClientModel(
        layered,
        lambda split: zoo_reference(spec, layered, split),
        lambda split: None,
        spec.weights,
        spec,
        lambda names: _named(build_network(spec, allow_import=True), names),
    )


def _named(layered: LayeredModel, names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: layered.tensors.get(name).detach() for name in names}


def _pretrained_or_random(spec: ModelSpec, seed: int) -> tuple[ModelSpec, LayeredModel]:
    """The library's own weights if they are in its cache or can be fetched, else random ones from ``seed``.

    Only absence makes random ones take their place: weights that do not fit are an error.
    """
    try:
        return spec, build_network(spec, allow_import=True)
    except WeightsAbsentError:
        spec = replace(spec, weights=f"random:{seed}")
    return spec, build_network(spec, allow_import=True)


def _push_file(spec: ModelSpec, layered: LayeredModel, store: str | None) -> str:
    """The name under which the weights are in ``store``, pushed by this job or by another one with the same file."""
    if store is None:
        raise UsageError(
            f"--weights {spec.weights}: the server must read these weights too; push them into its store with "
            f"'hapi push {spec.architecture} STORE/NAME --weights {spec.weights}' and train with --model store:NAME"
        )
    name = f"file-{layered.prefix_digest(len(layered))[:16]}"
    push(open_store(store), name, layered, spec)
    return name


def _pushed(
    settings: ModelSettings,
    servers: ServerPool,
    name: str,
    allowed: Sequence[str],
    seed: int,
    classes: int,
    shape: tuple[int, ...],
) -> ClientModel:
    """Model ``name`` as a server describes it; made by a factory only if that is ``allowed``."""
    pushed = _describe(servers, name)
    if settings.blocks and settings.blocks != pushed.spec.blocks:
        raise UsageError(f"--blocks: model {name!r} was pushed with its own; push it again with these")
    check_allowed(pushed.spec.architecture, allowed, name)
    check_head(replace(pushed.spec, input_shape=shape), classes, allow_import=allowed)
    layered = pushed.layered(num_classes=classes, head_seed=seed, input_shape=shape, allow_import=allowed)
    _check_forms(pushed, layered)

    def fetch(entries: Sequence[TensorEntry]) -> Iterable[Loaded]:
        return fetch_tensors(servers, pushed, entries)

    def load_from(split: int) -> None:
        pushed.load_from(fetch, layered, split, len(layered))

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return pushed.state(fetch, layered, names, allowed)

    spec = replace(pushed.spec, num_classes=classes, input_shape=shape, head_seed=seed)
    return ClientModel(
        layered,
        lambda split: store_reference(pushed, layered, split),
        load_from,
        f"pushed:{pushed.reference}",
        spec,
        read,
        pushed.reference,
    )


def _described(document: Any) -> Any:
    """Return a model's description; :class:`BadRequestError` for what is none."""
    if not isinstance(document, dict) or "format" not in document:
        raise BadRequestError("it is no description of a model")
    return document


def _describe(servers: ServerPool, name: str) -> PushedModel:
    """Model ``name`` (a reference) as a server describes it."""
    document = servers.get(f"{messages.MODELS_PATH}/{name}", _described, provider_of=name)
    digest = structure_of_document(document)

    def described() -> ModelStructure:
        """Return the structure as a server has it."""
        path = f"{messages.STRUCTURES_PATH}/{digest}"
        return servers.get(path, ModelStructure.from_json, provider_of=name)

    structure = StructureCache().find(digest, described)
    return PushedModel(ModelManifest.from_json(document, structure, answer=True))


def _check_forms(pushed: PushedModel, layered: LayeredModel) -> None:
    """:class:`ConflictError` unless the tensors have the model's own forms: by theirs, memory is taken for them."""
    for name in layered.tensor_names(0, len(layered)):
        entry, own = pushed.manifest.tensors.get(name), layered.tensors.get(name)
        if entry is None or name in layered.fresh:
            continue
        dtype = str(own.dtype).removeprefix("torch.")
        if (entry.dtype, entry.shape) != (dtype, tuple(own.shape)):
            raise ConflictError(
                f"model {pushed.name!r}: tensor {name!r} was pushed as {entry.dtype} {list(entry.shape)}, but is "
                f"{dtype} {list(own.shape)} in {pushed.spec.architecture} here; push it again with the installed "
                "version of its library, for inputs of this size"
            )
