"""Pushes of models by their address, with what was moved: networks, model files, and any checkpoint as tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hapi.errors import DataError, ModelError, NotFoundError, UsageError
from hapi.factories import check_allowed, is_factory
from hapi.models.graph.layers import LayeredModel
from hapi.models.model_file import ModelCard, read_card
from hapi.models.zoo.architectures import ImportRule
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.names import is_checkpoint, with_seed
from hapi.paths import is_folder
from hapi.repository.entries import SourceTensor
from hapi.repository.opening import open_model
from hapi.repository.packs.hashing import HashProgress
from hapi.repository.push import Pushed, SourceLayer, push, push_tensors, silent
from hapi.repository.side_files import FILES_LAYER, FILES_PREFIX, find_side_files
from hapi.repository.sources.files import SourceFile
from hapi.repository.sources.fitting import fitted
from hapi.repository.sources.open import TensorSource, open_source
from hapi.repository.sources.sharded import INDEX_SUFFIX
from hapi.repository.versions import add_tag, drop_versions
from hapi.store.base import ObjectStore
from hapi.store.open import open_store, split_address

log = logging.getLogger("hapi.push")


@dataclass(frozen=True)
class PushOptions:
    """Choices for a push, whatever is pushed."""

    replace: bool = False
    """Remove the earlier versions of the name that no tag holds."""
    repair: bool = False
    """Check and mend what the store has of the tensors."""
    tag: str | None = None
    """Name of the version."""
    allow_import: ImportRule = False
    """Whether the factory that a model file names may be imported."""


def push_model(
    model: str,
    address: str,
    *,
    weights: str | None = None,
    num_classes: int | None = None,
    input_size: int | None = None,
    blocks: Sequence[str] = (),
    options: PushOptions = PushOptions(),
    progress: HashProgress = silent,
    on_note: Callable[[str], None] = log.warning,
) -> Pushed:
    """Do as :func:`hapi.push`, and say what was written.

    Args:
        model: see :func:`hapi.push`, also for the arguments that are not here.
        address: STORE/NAME.
        weights: the weights.
        num_classes: classes of the head.
        input_size: side of the input.
        blocks: layers' ends.
        options: what becomes of it.
        progress: told of it.
        on_note: told lines that a user should see.
    """
    url, name = split_address(address)
    source, card = _source(model, weights)
    for line in () if source is None else source.notes:
        on_note(line)
    store = open_store(url)
    if source is not None and card is None and is_checkpoint(model):
        if num_classes is not None or input_size is not None or blocks:
            raise UsageError(
                f"{model} does not say its architecture, so it is pushed as tensors only, without input, classes or "
                f"blocks; give one: hapi push ARCHITECTURE {address} --weights {model}"
            )
        layers = [*_source_layers(source), *_files_layer(source, model, on_note)]
        pushed = push_tensors(store, name, layers, repair=options.repair, progress=progress)
    else:
        spec = _spec(model, source, weights, card, num_classes, input_size, blocks)
        check_allowed(spec.architecture, card is None or options.allow_import, model)
        network, tensors = _network(spec, source)
        pushed = push(
            store,
            name,
            network,
            spec,
            parent=None if card is None else _parent(store, card),
            card=card.facts() if card is not None and _is_that_of(card, spec) else None,
            sources=None if tensors is None else tensors.__getitem__,
            repair=options.repair,
            progress=progress,
        )
    version = pushed.model.manifest.version
    if options.tag is not None:
        add_tag(store, name, options.tag, version)
    if options.replace:
        drop_versions(store, name, before=version)
    return pushed


def _source(model: str, weights: str | None) -> tuple[TensorSource | None, ModelCard | None]:
    """The checkpoint that is pushed, or has the weights, and what a model file says of its network."""
    if not is_checkpoint(model):
        return open_source(weights) if weights is not None and is_checkpoint(weights) else None, None
    if weights is not None:
        raise UsageError(
            f"--weights {weights}: {model} has weights already; give an architecture, or leave it out"
        )
    source = open_source(model)
    return source, read_card(source.path) if "spec" in source.metadata else None


def _source_layers(source: TensorSource) -> list[SourceLayer]:
    reserved = next((name for name in source.tensors if name.startswith(FILES_PREFIX)), None)
    if reserved is not None:
        raise ModelError(
            f"{source.path}: tensor {reserved[:80]!r} has a name that Hapi gives to files beside tensors; rename it"
        )
    return [SourceLayer(layer, tuple(tensors)) for layer, tensors in source.layers()]


def _files_layer(source: TensorSource, model: str, on_note: Callable[[str], None]) -> list[SourceLayer]:
    """The small files beside a checkpoint that was named by its folder or index; none for a single file."""
    if not is_folder(model) and not model.endswith(INDEX_SUFFIX):
        return []
    files, notes = find_side_files(source.path.parent)
    for line in notes:
        on_note(line)
    return [SourceLayer(FILES_LAYER, tuple(map(_file_tensor, files, files.values())))] if files else []


def _file_tensor(name: str, path: Path) -> SourceTensor:
    file = SourceFile.at(path)
    return SourceTensor(f"{FILES_PREFIX}{name}", "uint8", (file.size,), lambda: file.pieces(0, file.size))


def _is_that_of(card: ModelCard, spec: ModelSpec) -> bool:
    """Return whether flags left the network of a model file as the file says it is."""
    return replace(card.spec, weights=spec.weights) == spec


def _spec(
    model: str,
    source: TensorSource | None,
    weights: str | None,
    card: ModelCard | None,
    num_classes: int | None,
    input_size: int | None,
    blocks: Sequence[str],
) -> ModelSpec:
    if card is not None:
        spec = card.spec
    else:
        usual = "random:0" if is_factory(model) else "DEFAULT"
        spec = ModelSpec(architecture=model, weights=usual if weights is None else with_seed(weights, 0))
    return replace(
        spec,
        weights=spec.weights if source is None else str(source.path),
        num_classes=spec.num_classes if num_classes is None else num_classes,
        input_shape=spec.input_shape if input_size is None else (3, input_size, input_size),
        blocks=tuple(blocks) or spec.blocks,
    )


def _network(
    spec: ModelSpec, source: TensorSource | None
) -> tuple[LayeredModel, Mapping[str, SourceTensor] | None]:
    """The layers, and their tensors where these are streamed; None for tensors that are in memory."""
    if source is None:
        return build(spec, allow_import=True), None
    return fitted(spec, source) or (build(spec, allow_import=True, state=source.load), None)


def _parent(store: ObjectStore, card: ModelCard) -> str | None:
    """The model that a model file was fine-tuned from, if ``store`` has it."""
    if card.pushed is None:
        return None
    try:
        return open_model(store, card.pushed).reference
    except (NotFoundError, DataError):
        return None
