"""The trained network as a whole: what was trained here, and the frozen layers from wherever their weights are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hapi.client.job_context import JobContext
from hapi.client.session import Session
from hapi.client.settings import default_store
from hapi.models.model_file import ModelCard
from hapi.models.zoo.names import is_checkpoint, is_file
from hapi.train.outputs.run_folder import BEST_FILE, MODEL_FILE
from hapi.train.settings import TrainSettings


def whole_state(job: JobContext, trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State dict of the whole network, in the names and the order of its own library.

    Args:
        job: what was trained; its frozen layers may have been released.
        trained: state of the trained layers, by the same names.
    """
    state = dict(job.model.module.state_dict())
    state.update((name, tensor) for name, tensor in trained.items() if name in state)
    absent = [name for name, tensor in state.items() if tensor.is_meta]
    if absent:
        state.update(job.client_model.read(absent))
    return state


def card_of(job: JobContext, entry: Mapping[str, Any]) -> ModelCard:
    """Return the facts for a model file of this job after the epoch whose element of the report is ``entry``."""
    spec, description, transform = job.client_model.spec, job.description, job.transforms[0]
    if is_file(spec.weights):  # the folder it was in says nothing to others
        spec = replace(spec, weights=Path(spec.weights).name)
    card = ModelCard(
        spec=spec,
        pushed=job.client_model.pushed,
        classes=description.classes,
        label_kind=description.label_kind,
        transform=None if transform is None else replace(transform, augment=None, draw=None),
        freeze=job.freeze,
        dataset=description.reference,
    )
    return after_epoch(card, entry)


def after_epoch(card: ModelCard, entry: Mapping[str, Any]) -> ModelCard:
    """Return ``card`` with the measurements of the epoch whose element of the report is ``entry`` (empty: none)."""
    return replace(
        card,
        epoch=entry["epoch"] + 1 if entry else 0,
        metrics={name: float(value) for name, value in entry.items() if _is_metric(name, value)},
    )


def _is_metric(name: str, value: Any) -> bool:
    known = name in ("loss", "accuracy") or (name.startswith("validation_") and name != "validation_seconds")
    return known and type(value) in (int, float) and math.isfinite(value)


def network_facts(session: Session) -> dict[str, Any]:
    """Return what a checkpoint says of its network: the card, and where the frozen layers' weights were."""
    job, settings = session.job_context, session.settings
    store = settings.store
    if job.embedded is not None and store is None:
        store = default_store()
    if store is not None and "://" not in store:
        store = _absolute(store)
    return {
        "card": card_of(job, {}).to_metadata(),
        "file": _absolute(settings.weights) if is_checkpoint(settings.weights) else None,
        "store": store,
        "servers": list(settings.server),
    }


def missing_bytes(session: Session, settings: TrainSettings) -> int:
    """Return the bytes that a run's model files and checkpoints in its folder will take, beside those there already.

    Each is written beside the one that it replaces, so for a moment there may be more.

    Args:
        session: of the run.
        settings: of the run; its folder exists.
    """
    network, output = session.job_context.model.module.state_dict().values(), Path(str(settings.output))
    files = dict.fromkeys((MODEL_FILE, BEST_FILE), sum(map(_nbytes, network)))
    if settings.checkpoint is None:
        count = settings.keep if settings.checkpoint_every else min(settings.keep, settings.epochs)
        trained = sum(map(_nbytes, session.trained.parameters()))
        names = (Path(str(settings.checkpoint_path)).name + (f".{n}" if n else "") for n in range(count))
        files.update(dict.fromkeys(names, int(trained * settings.checkpoint_factor)))
    held = (path.stat().st_size for name in files if (path := output / name).is_file())
    return sum(files.values()) - sum(held)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
