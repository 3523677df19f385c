"""The trained network as a whole: what was trained here, and the frozen layers from wherever their weights are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hapi.client.prepare import JobContext
from hapi.models.model_file import ModelCard, write_model
from hapi.models.zoo.weights import is_file


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


def card_of(job: JobContext, *, epoch: int, metrics: Mapping[str, float]) -> ModelCard:
    """What a model file says of this job after ``epoch`` epochs that measured ``metrics``."""
    spec, description, transform = job.client_model.spec, job.description, job.transforms[0]
    if is_file(spec.weights):  # the folder it was in says nothing to others
        spec = replace(spec, weights=Path(spec.weights).name)
    return ModelCard(
        spec=spec,
        classes=description.classes,
        transform=None if transform is None else replace(transform, augment=None, draw=None),
        freeze=job.freeze,
        dataset=description.reference,
        epoch=epoch,
        metrics=metrics,
    )


def save_model(
    path: str | Path, job: JobContext, trained: nn.Module, *, epoch: int, metrics: Mapping[str, float]
) -> None:
    """Write the trained network to ``path``, see :func:`hapi.models.model_file.write_model`."""
    write_model(path, whole_state(job, trained.state_dict()), card_of(job, epoch=epoch, metrics=metrics))
