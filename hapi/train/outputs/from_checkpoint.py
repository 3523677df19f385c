"""The whole network of a checkpoint: its trained layers, and the frozen ones from wherever their weights are now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi.client.connect import connect
from hapi.client.models import open_client_model
from hapi.client.settings import STORE_PREFIX, ModelSettings, SessionSettings
from hapi.config.token import read_token
from hapi.errors import HapiError, ModelError, UsageError
from hapi.factories import check_allowed
from hapi.models.model_file import ModelCard, read_card, read_model, untrained
from hapi.models.zoo.architectures import ImportRule
from hapi.models.zoo.build import architecture_of, layers_of
from hapi.models.zoo.weights import load_state
from hapi.paths import open_file, user_path
from hapi.repository.opening import open_model
from hapi.repository.sources.networks import build_network, weights_named
from hapi.store.open import open_store
from hapi.train.checkpoints.checkpoint import evaluated_layers, read_document
from hapi.train.outputs.model_out import after_epoch

_RETRY_SECONDS = 10.0
"""Seconds of trying to reach a server."""
_ARCHIVE = b"PK\x03\x04"
"""First bytes of a file of torch.save."""


@dataclass(frozen=True, kw_only=True)
class FrozenSource:
    """Where the frozen layers' weights are, if not where a checkpoint says."""

    weights: str | None = None
    """The file of weights with which training began."""
    store: str | None = None
    """Folder or URL of the store with the pushed model."""
    server: Sequence[str] = ()
    """URLs of servers that have the pushed model."""
    token_file: str | None = None
    ca_file: str | None = None


def is_checkpoint(path: str | Path) -> bool:
    """Return whether the file at ``path`` may be a checkpoint: one that torch.save wrote."""
    try:
        with open_file(Path(path).expanduser()) as file:
            return file.read(len(_ARCHIVE)) == _ARCHIVE
    except (OSError, RuntimeError):
        return False  # who reads it says so


def read_network(
    path: str | Path,
    source: FrozenSource | None = None,
    *,
    best: bool = False,
    allow_import: ImportRule = False,
) -> tuple[nn.Module, ModelCard]:
    """Return the network of a model file or a checkpoint in eval mode, on the CPU, and its card.

    Args:
        path: the file.
        source: where the weights of a checkpoint's frozen layers are, if no longer where they were.
        best: for a checkpoint: as it was after the best epoch.
        allow_import: whether the network's factory may be imported, if one makes it: yes, no, or which.

    Raises:
        ModelError: the file cannot be read, does not fit the installed library, or its frozen layers are not in reach.
        UsageError: ``best`` of a model file, or of a checkpoint that has no best epoch; the factory is not allowed.
    """
    if is_checkpoint(path):
        check_allowed(card_in(path).spec.architecture, allow_import, str(path))
        return read_checkpoint(path, source, best=best)
    if best and user_path(path, "model file").is_file():
        raise UsageError(
            f"--best: {path} is no checkpoint; the best epoch's model is best.safetensors beside it"
        )
    check_allowed(read_card(path).spec.architecture, allow_import, str(path))
    return read_model(path, allow_import=True)


def card_in(path: str | Path) -> ModelCard:
    """Return the facts of a checkpoint's network, without the measurements of an epoch.

    Raises:
        ModelError: it does not have them.
        UsageError: the file is no checkpoint.
    """
    return _card(path, read_document(str(path), "checkpoint"))


def _card(path: str | Path, document: Mapping[str, Any]) -> ModelCard:
    try:
        return ModelCard.from_metadata(document["network"]["card"])
    except (KeyError, TypeError, ValueError, HapiError) as error:
        raise ModelError(f"checkpoint {path} does not say how its network is built ({error})") from None


def read_checkpoint(
    path: str | Path, source: FrozenSource | None = None, *, best: bool = False
) -> tuple[nn.Module, ModelCard]:
    """Return the network of a checkpoint in eval mode, on the CPU, and its card.

    Args:
        path: a file of ``--checkpoint`` or in the folder of ``--output``.
        source: where the frozen layers' weights are; None: where they were when it was written.
        best: as it was after the best epoch, instead of at the checkpoint.

    Raises:
        ModelError: the frozen layers' weights cannot be reached, or are others than those of the training.
        UsageError: the file is no checkpoint, or has no best epoch.
    """
    document = read_document(str(path), "checkpoint")
    facts, found, card = document["network"], document.get("best"), _card(path, document)
    try:
        epochs = document["epochs"]
        trained, entry = evaluated_layers(document), epochs[-1] if epochs else {}
        digest = str(document["identity"]["frozen layers"])
        if best:
            if found is None or found["entry"] is None:
                raise UsageError(
                    f"checkpoint {path} has no best epoch (one is kept with --output, after an epoch)"
                )
            trained, entry = dict(found["trained"]), found["entry"]
        card = after_epoch(card, entry)
        others = [(str(why), read) for why, read in _sources(facts, card, source or FrozenSource())]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"checkpoint {path} does not say how its network is built ({error})") from None
    module = _assembled(str(path), card, trained, digest, others)
    return module.eval(), card


Reader = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Reads tensors of the network as they were before training, by name."""


def _assembled(
    path: str,
    card: ModelCard,
    trained: Mapping[str, torch.Tensor],
    digest: str,
    sources: Sequence[tuple[str, Reader]],
) -> nn.Module:
    module = untrained(card.spec, allow_import=True)
    names = list(module.state_dict())
    absent, failed = [name for name in names if name not in trained], []
    for why, read in sources if absent else [("", lambda names: {})]:
        try:
            frozen = read(absent)
        except HapiError as error:
            failed.append(f"{why}: {str(error).rstrip('.')}")
            continue
        load_state(
            module, {**frozen, **{n: t for n, t in trained.items() if n in names}}, f"checkpoint {path}"
        )
        layers = layers_of(architecture_of(card.spec, allow_import=True), card.spec, module)
        if layers.prefix_digest(card.freeze) == digest:
            return module
        failed.append(f"{why}: these are other weights than those of the training")
    raise ModelError(
        f"checkpoint {path}: the weights of its frozen layers (1 to {card.freeze}) are not in reach; "
        f"give --weights FILE, --store STORE or --server URL ({'; '.join(failed)})"
    )


def _sources(facts: Mapping[str, Any], card: ModelCard, given: FrozenSource) -> Iterator[tuple[str, Reader]]:
    """Where the weights may be and what reads them there, those that were given first."""
    if given.weights is not None:
        yield f"--weights {given.weights}", _built(card, given.weights)
    for store, servers in ((given.store, given.server), (facts["store"], facts["servers"])):
        if card.pushed is not None and store is not None:
            yield f"store {store}", _stored(card, store)
        if card.pushed is not None and servers:
            yield f"server {', '.join(servers)}", _served(card, tuple(servers), given)
    if facts["file"] is not None and given.weights is None:
        yield f"weights file {facts['file']}", _built(card, facts["file"])
    if card.pushed is None:
        yield f"weights {card.spec.weights}", _built(card, card.spec.weights)


def _built(card: ModelCard, weights: str) -> Reader:
    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read from the network as it is built with these weights."""
        spec = replace(card.spec, weights=weights_named(weights))
        state = build_network(spec, allow_import=True).module.state_dict()
        return {name: state[name] for name in names}

    return read


def _stored(card: ModelCard, store: str) -> Reader:
    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Read from the pushed model in the store."""
        stored, spec = open_model(open_store(store), str(card.pushed)), card.spec
        allowed = (spec.architecture,)  # not what others may have put into the store since
        layered = stored.layered(
            num_classes=spec.num_classes, input_shape=spec.input_shape, allow_import=allowed
        )
        return stored.state(stored.tensors, layered, names, allowed)

    return read


def _served(card: ModelCard, servers: tuple[str, ...], given: FrozenSource) -> Reader:
    def read(names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Read from the servers, which check a digest of each tensor."""
        model = ModelSettings(model=f"{STORE_PREFIX}{card.pushed}", allow_model=(card.spec.architecture,))
        connected = connect(
            SessionSettings(server=servers, ca_file=given.ca_file, patience=_RETRY_SECONDS),
            read_token(given.token_file),
        )
        try:
            client_model = open_client_model(
                model, connected.servers, None,
                seed=card.spec.head_seed, classes=len(card.classes), shape=card.spec.input_shape,
            )  # fmt: skip
            return client_model.read(names)
        finally:
            connected.close()

    return read
