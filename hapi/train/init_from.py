"""``--init-from``: a new training from an old one's weights, with other data, layers or steps.

The frozen layers run on the server, so it must be able to make them: unchanged ones come from where the old training
had them; ones that it trained must be in the store first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from hapi.client.session import Session
from hapi.client.settings import STORE_PREFIX, ModelSettings
from hapi.errors import ModelError, UsageError
from hapi.factories import check_allowed, is_factory
from hapi.models.graph.layers import LayeredModel
from hapi.models.model_file import ModelCard, read_card
from hapi.models.zoo.build import ModelSpec, architecture_of, layers_of, structure
from hapi.models.zoo.head import find_head, resize_head
from hapi.train.outputs.from_checkpoint import FrozenSource, card_in, is_checkpoint, read_network
from hapi.train.settings import TrainSettings

log = logging.getLogger("hapi.client")


def started(settings: TrainSettings, *, has_model: bool) -> TrainSettings:
    """Return the settings with model, weights, blocks and freeze of ``init_from`` where none are given.

    Args:
        settings: as given; without ``init_from`` they are returned as they are.
        has_model: False when ``model`` is only the default.

    Raises:
        UsageError: it is a network of another architecture, or the server cannot have its frozen layers.
        ModelError: the file is neither a model file nor a checkpoint.
    """
    path = settings.init_from
    if path is None:
        return settings
    card = card_in(path) if is_checkpoint(path) else read_card(path)
    spec = card.spec
    check_allowed(spec.architecture, _allowed(settings), path)
    freeze = _freeze(settings.freeze, card)
    settings = replace(settings, freeze=freeze)
    if has_model and settings.model.startswith(STORE_PREFIX):
        return settings
    if has_model and ModelSpec(architecture=settings.model).architecture != spec.architecture:
        raise UsageError(
            f"--model {settings.model}: --init-from {path} is a {spec.architecture}; leave --model out, or give "
            "another file"
        )
    settings = replace(settings, model=spec.architecture, blocks=settings.blocks or spec.blocks)
    if settings.weights != "auto":
        return settings
    if freeze > card.freeze:
        return _with_trained_prefix(settings, path, card, freeze)
    if card.pushed is None:
        return replace(settings, weights=spec.weights)
    own = (spec.architecture,) if is_factory(spec.architecture) else ()
    return replace(
        settings,
        model=f"{STORE_PREFIX}{card.pushed}",
        blocks=(),
        allow_model=tuple(dict.fromkeys((*settings.allow_model, *own))),
    )


def _allowed(settings: ModelSettings) -> tuple[str, ...]:
    """Factories that the settings name or allow."""
    return (*settings.allow_model, settings.model)


def _freeze(asked: int | str | None, card: ModelCard) -> int:
    """The freeze as a number: as asked, else the old training's."""
    if asked is None:
        return card.freeze
    try:
        return structure(card.spec, allow_import=True).resolve(asked)
    except ModelError as error:
        raise UsageError(f"--freeze: {error} ('hapi layers MODEL' lists them)") from None


def _with_trained_prefix(settings: TrainSettings, path: str, card: ModelCard, freeze: int) -> TrainSettings:
    """The settings of a training some of whose frozen layers are the file's own."""
    if not is_checkpoint(path) and (not settings.server or settings.store is not None):
        return replace(settings, weights=path)  # into the store, as any file of weights
    raise UsageError(
        f"--init-from {path}: layers {card.freeze + 1} to {freeze} were trained and are frozen now, so the server must "
        f"have them: {_by_hand(path)}, or give a --freeze of at most {card.freeze}"
    )


def _by_hand(path: str) -> str:
    file, first = path, ""
    if is_checkpoint(path):
        file, first = "model.safetensors", f"'hapi export {path} --output model.safetensors', "
    return f"{first}'hapi push {file} STORE/NAME', then --model store:NAME --init-from {file}"


def begin_from(session: Session, path: str) -> None:
    """Load the weights of the network in the file at ``path`` into the session's trained layers.

    The head is new where the classes are others, with a line that says so.

    Raises:
        UsageError: it is a network of another architecture, or its frozen layers are not the session's.
        ModelError: the file cannot be read, or its tensors do not fit.
    """
    settings, job = session.settings, session.job_context
    source = FrozenSource(
        store=settings.store, server=settings.server, token_file=settings.token_file, ca_file=settings.ca_file
    )
    module, card = read_network(path, source, allow_import=_allowed(settings))
    spec = job.client_model.spec
    if card.spec.architecture != spec.architecture:
        raise UsageError(
            f"--init-from {path} is a {card.spec.architecture}, --model {settings.model} is a {spec.architecture}; "
            "give the same, or leave --model out"
        )

    def layered() -> LayeredModel:
        """The layers of the module as it is now."""
        return layers_of(architecture_of(spec, allow_import=True), spec, module)

    outputs, classes = len(card.classes), job.description.classes
    if classes != card.classes:
        head = find_head(layered())
        resize_head(module, head, len(classes), settings.seed)
        now = f"{len(classes)} classes now, {outputs} there" if len(classes) != outputs else "other classes"
        log.warning("--init-from %s: the head (%s) is new: %s", path, head, now)
    if layered().prefix_digest(job.freeze) != job.prefix_digest:
        raise UsageError(
            f"--init-from {path}: its layers 1 to {job.freeze} are not those of {job.weights}, which the server would "
            f"run: {_by_hand(path)}"
        )
    _load(session.trained, module.state_dict(), path)


def _load(trained: torch.nn.Module, state: Mapping[str, torch.Tensor], path: str) -> None:
    own = trained.state_dict()
    try:
        trained.load_state_dict({name: state[name] for name in own})
    except (KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1].strip()[:200]
        raise ModelError(f"--init-from {path} does not fit the trained layers: {reason}") from None
