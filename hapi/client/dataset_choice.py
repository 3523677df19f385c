"""The samples that settings name: a dataset of the servers, its transform, and the samples that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hapi.arrays import IntArray
from hapi.client.augment import parsed
from hapi.client.settings import DataSettings
from hapi.client.soundness import check_count
from hapi.client.transport.server_pool import ServerPool
from hapi.data.epoch_order import HOLDOUT_EPOCH, epoch_sequence
from hapi.data.manifest import SampleLayout
from hapi.data.transforms.pipeline import input_shape
from hapi.errors import BadRequestError, ConflictError, NotFoundError, UnprocessableError, UsageError
from hapi.text import counted
from hapi.wire import messages
from hapi.wire.held_out import HeldOut, HeldOutCounts
from hapi.wire.messages import DatasetDescription
from hapi.wire.references import TransformSpec, check_name, given_name


def choose_dataset(servers: ServerPool, name: str | None, flag: str = "--dataset") -> DatasetDescription:
    """Return dataset ``name``, given as ``flag``, or the only one there; :class:`UsageError` names the
    choices.
    """
    if name is None:
        names = servers.get(messages.DATASETS_PATH, _names)
        if not names:
            raise UsageError("the store has no dataset; make one with 'hapi pack SOURCE STORE/NAME'")
        if len(names) > 1:
            raise UsageError(f"the store has several datasets, choose one with --dataset: {', '.join(names)}")
        name = names[0]
    given_name(name, flag)
    description = servers.get(f"{messages.DATASETS_PATH}/{name}", DatasetDescription.from_json)
    if description.count == 0:
        raise UsageError(f"dataset {name!r} has no samples")
    check_count(description)
    return description


def _names(listed: Any) -> list[str]:
    """The datasets that a server lists; what answers there may be anything."""
    try:
        return sorted(check_name(d["name"], "datasets[].name") for d in listed["datasets"])
    except (TypeError, KeyError):
        raise BadRequestError("the list of datasets has another form than agreed") from None


def transform_of(settings: DataSettings, own: TransformSpec | None) -> TransformSpec | None:
    """Return a dataset's ``own`` transform, or the settings' image size with the dataset's own normalisation."""
    if settings.image_size is None:
        return own
    spec = TransformSpec.for_image_size(settings.image_size)
    return spec if own is None else replace(spec, mean=own.mean, std=own.std)


def augmented(
    transform: TransformSpec | None, layout: SampleLayout, augment: Sequence[str]
) -> TransformSpec | None:
    """Return ``transform`` with the random parts that ``augment`` names.

    Args:
        transform: the dataset's transform; None for stored tensors.
        layout: form of the stored samples.
        augment: names with options, or presets.

    Raises:
        UsageError: a name or option is unknown, or does not fit the samples.
    """
    if not augment:
        return transform
    if transform is None:
        raise UsageError(
            "--augment: these samples are stored ready for the model and have no transform; pack images or uint8 "
            "instead, or give --image-size"
        )
    random = replace(transform, augment=parsed(augment))
    try:
        input_shape(layout, random)
    except UnprocessableError as error:
        raise UsageError(f"--augment: {error}") from None
    return random


def hold_out(
    settings: DataSettings, servers: ServerPool, description: DatasetDescription
) -> tuple[IntArray, IntArray, DatasetDescription | None]:
    """Return (training ids, validation ids, description of the validation dataset when it is another one).

    Raises:
        UsageError: the share leaves no samples on one side, or the labels of the other dataset mean something else.
    """
    everything = np.arange(description.count, dtype=np.int64)
    none = everything[:0]
    validation = settings.validation
    if validation is None:
        return everything, none, None
    if isinstance(validation, str):
        other = choose_dataset(servers, validation, "--validation")
        if other.label_kind != description.label_kind:
            raise UsageError(
                f"--validation {validation}: it has {other.label_kind} labels, the training data has "
                f"{description.label_kind} ones; pack both with the same --label-kind"
            )
        if other.label_kind != "single" and len(other.classes) != len(description.classes):
            raise UsageError(
                f"--validation {validation}: its labels have {counted(len(other.classes), 'value')}, those of "
                f"the training data {len(description.classes)}; pack both with the same columns"
            )
        if other.classes != description.classes[: len(other.classes)]:
            raise UsageError(
                f"--validation {validation}: its classes are others than the training data's, or in another order, so "
                "its labels mean something else; pack both with the same classes"
            )
        return everything, np.arange(other.count, dtype=np.int64), other
    count = round(description.count * float(validation))
    if not 0 < count < description.count:
        raise UsageError(
            f"--validation {validation}: expected a share between 0 and 1 that leaves samples on both sides"
        )
    order = epoch_sequence(settings.seed, HOLDOUT_EPOCH, description.count)
    return np.sort(order[count:]), np.sort(order[:count]), None


def training_counts(
    settings: DataSettings, servers: ServerPool, description: DatasetDescription, held_out: int
) -> tuple[int, ...] | None:
    """Return how many training samples each class has; None when the server does not tell, or labels are numbers.

    Args:
        settings: their seed picks the held-out samples.
        servers: asked for the classes of the held-out samples.
        description: the dataset.
        held_out: samples of it that :func:`hold_out` holds out.

    Raises:
        ConflictError: the dataset was replaced since it was described.
    """
    if not description.label_counts or not held_out:
        return description.label_counts or None
    name, whole = description.reference.name, description.label_counts
    try:
        path = HeldOut(name=name, seed=settings.seed, count=held_out).path
        found = servers.get(path, HeldOutCounts.from_json)
    except NotFoundError:  # a server of an earlier version
        return None
    if found.version != description.reference.version:
        raise ConflictError(f"dataset {name!r} was replaced while this training began; start it again")
    held = found.label_counts
    if len(held) != len(whole) or any(part > of_class for part, of_class in zip(held, whole, strict=True)):
        raise BadRequestError(f"dataset {name!r}: the server's held-out samples do not fit its classes")
    return tuple(of_class - part for part, of_class in zip(held, whole, strict=True))
