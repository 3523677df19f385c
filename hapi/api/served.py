"""A fine-tuned network beside the data: frozen layers on the servers, as they were in training, the others here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from hapi.api.inference import Labelled, Outputs
from hapi.api.model_files import LoadedModel
from hapi.client.session import Session
from hapi.client.settings import STORE_PREFIX, SessionSettings
from hapi.closing import Closing
from hapi.data.manifest import SampleLayout
from hapi.data.transforms.pipeline import input_shape
from hapi.errors import ConflictError, HapiError, ModelError, NotFoundError, UsageError
from hapi.factories import is_factory
from hapi.models.graph.layers import LayeredModel
from hapi.models.model_file import ModelCard
from hapi.models.zoo.build import architecture_of, layers_of
from hapi.wire.transport.base import Transport

__all__ = ("ServedModel", "open_served")


Connections = Callable[[], Sequence[Transport]]
"""Connects to the servers; a session closes its connections."""


class ServedModel(Closing):
    """A network over a dataset of servers. Made by :func:`open_served`; close it."""

    def __init__(self, session: Session, model: LayeredModel, note: str | None) -> None:
        """See :func:`open_served`; ``model`` has the layers of the whole network."""
        self._session, self._model = session, model
        self.note = note
        """Why the servers send samples instead of features; None when they send features."""

    @property
    def split(self) -> int:
        """Layers that the servers run."""
        return self._session.split

    @property
    def facts(self) -> Labelled:
        """Facts of the dataset that the outputs are compared with."""
        described = self._session.job_context.description
        return Labelled(described.count, described.classes, described.label_kind)

    def outputs(self) -> Iterator[Outputs]:
        """Yield the outputs for all samples in the order of their ids, a batch at a time.

        Raises:
            HapiError: a server failed, or a sample is damaged.
        """
        session, done = self._session, 0
        tail = (
            self._model.segment(session.last_split, len(self._model), frozen=True).to(session.device).eval()
        )
        for features, labels in session.validation():
            with torch.inference_mode():
                logits = tail(features).float().to("cpu")
            names = [str(done + n) for n in range(len(labels))]
            done += len(labels)
            yield Outputs(names, labels.to("cpu").numpy(), logits)

    def close(self) -> None:
        """Drop the connections, and end the embedded server if there is one."""
        self._session.close()


def open_served(
    model: LoadedModel, settings: SessionSettings, *, transports: Connections | None = None
) -> ServedModel:
    """Connect, and let the servers run the network's frozen layers if they can make just these.

    Otherwise they send samples, all layers run here, and :attr:`ServedModel.note` says why.

    Args:
        model: the network, on the CPU.
        settings: servers or store, dataset, batch size and device; the rest is the model's.
        transports: makes connections that replace the servers of the settings.

    Raises:
        HapiError: the dataset is not there or does not fit the network, or no server answers.
    """
    card, name = model.card, settings.dataset
    if name is None:
        raise UsageError("give the dataset's name in the servers' store")
    spec = card.spec
    layers = layers_of(architecture_of(spec, allow_import=True), spec, model.module)
    side = None if card.transform is None else card.transform.crop
    settings = replace(
        settings, validation=name, image_size=side, shuffle="full", freeze=card.freeze, blocks=spec.blocks
    )
    try:
        session = Session.open(
            _prefix_settings(settings, card), transports=None if transports is None else transports()
        )
    except (ModelError, NotFoundError, ConflictError) as error:
        return _all_local(settings, model, layers, str(error), transports)
    found = session.job_context
    if found.prefix_digest != layers.prefix_digest(card.freeze):
        session.close()
        return _all_local(settings, model, layers, f"those of {found.weights} are others", transports)
    return _checked(session, model, layers, None)


def _prefix_settings(settings: SessionSettings, card: ModelCard) -> SessionSettings:
    spec = card.spec
    own = (spec.architecture,) if is_factory(spec.architecture) else ()
    if card.pushed is None:
        return replace(settings, model=spec.architecture, weights=spec.weights, split="freeze")
    return replace(settings, model=f"{STORE_PREFIX}{card.pushed}", blocks=(), split="freeze", allow_model=own)


def _all_local(
    settings: SessionSettings,
    model: LoadedModel,
    layers: LayeredModel,
    reason: str,
    transports: Connections | None,
) -> ServedModel:
    """All layers on this side, in a session that has the frozen ones from the network itself."""
    settings = replace(settings, model=model.card.spec.architecture, weights="random:0", split=0)
    session = Session.open(settings, transports=None if transports is None else transports())
    own = session.job_context.model
    with torch.no_grad():
        for name in own.tensor_names(0, session.last_split):
            own.tensors.get(name).copy_(layers.tensors.get(name))
    return _checked(
        session, model, layers, f"the servers do not have its frozen layers ({reason}), so all run here"
    )


def _checked(session: Session, model: LoadedModel, layers: LayeredModel, note: str | None) -> ServedModel:
    try:
        context, transform = session.job_context, model.card.transform
        found = input_shape(SampleLayout.from_json(context.description.layout, answer=True), transform)
        if found != layers.input_shape:
            raise UsageError(
                f"the dataset gives inputs of {list(found)}, the model takes {list(layers.input_shape)}"
            )
        context.use_transform(transform)
        return ServedModel(session, layers, note)
    except HapiError:
        session.close()
        raise
