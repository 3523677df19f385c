"""Plausibility of servers' answers: descriptions that fit this machine, features that are numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from hapi.arrays import IntArray
from hapi.data.manifest import SampleLayout
from hapi.data.transforms.pipeline import input_shape
from hapi.errors import DataError, HapiError, ModelError, UsageError, WireError
from hapi.models.devices import free_bytes
from hapi.models.zoo.architectures import ImportRule
from hapi.models.zoo.build import ModelSpec, skeleton
from hapi.models.zoo.head import find_head
from hapi.units import format_bytes
from hapi.wire.messages import DatasetDescription
from hapi.wire.references import Precision, TransformSpec

ORDER_BYTES = 48
"""Bytes of this side's memory for each sample of a dataset while an epoch's order is made."""
HEAD_COPIES = 3
"""Copies of a head in memory while it is trained: weights, gradients, momentum."""
FEW_CLASSES = 10_000
"""Classes whose head fits any machine."""
NAMED = 5
"""Samples that a message names."""
_CPU = torch.device("cpu")


def check_count(description: DatasetDescription) -> None:
    """Raise :class:`UsageError` unless this machine has the memory to order the dataset's samples."""
    count, free = description.count, free_bytes(_CPU)
    if free is not None and count * ORDER_BYTES > free:
        raise UsageError(
            f"dataset {description.reference.name!r} has {count} samples by its server's description: their order "
            f"would take {format_bytes(count * ORDER_BYTES)} here, where {format_bytes(free)} are free"
        )


def check_inputs(description: DatasetDescription, transform: TransformSpec | None) -> tuple[int, ...]:
    """Return the shape of one input; :class:`UsageError` unless some of them fit this machine."""
    shape = input_shape(SampleLayout.from_json(description.layout, answer=True), transform)
    nbytes, free = math.prod(shape) * torch.float32.itemsize, free_bytes(_CPU)
    if free is not None and HEAD_COPIES * nbytes > free:
        raise UsageError(
            f"dataset {description.reference.name!r} has samples of shape {shape} by its server's description: one "
            f"takes {format_bytes(nbytes)}, and {format_bytes(free)} are free here; give --image-size"
        )
    return shape


def check_head(spec: ModelSpec, classes: int, allow_import: ImportRule) -> None:
    """Raise :class:`UsageError` unless this machine has the memory to train a head of ``classes`` on that
    model.
    """
    free = free_bytes(_CPU)
    if classes <= FEW_CLASSES or free is None:
        return
    model = skeleton(spec, allow_import)
    try:
        head = model.module.get_submodule(find_head(model))
    except ModelError:
        return  # told by whoever needs it
    weight = next(head.parameters())
    nbytes = HEAD_COPIES * classes * weight[:1].numel() * weight.itemsize
    if nbytes > free:
        raise UsageError(
            f"the dataset has {classes} classes by its server's description: to train the head of "
            f"{spec.architecture} for them takes {format_bytes(nbytes)}, and {format_bytes(free)} are free here"
        )


def check_finite(
    values: torch.Tensor, ids: IntArray | Sequence[int], what: str, precision: Precision = "fp32"
) -> None:
    """Check that every row of ``values`` is finite.

    One pass over memory that has just been written: the sum is finite unless a value is not, or they are
    huge.

    Args:
        values: [n, ...] of any type; integers pass.
        ids: ids of the n samples, for the message.
        what: the values and their origin, for the message.
        precision: type that they were computed in.

    Raises:
        WireError: a row holds a value that is infinite or no number.
        DataError: the same in fp16, which larger values than 65504 do not fit.
    """
    if not values.is_floating_point():
        return
    total = values.sum(dtype=torch.float32 if values.itemsize < torch.float32.itemsize else None)
    if math.isfinite(total.item()):
        return
    bad = ~torch.isfinite(values.reshape(len(ids), -1)).all(1)
    if not bad.any():
        return
    wrong = [int(ids[row]) for row in bad.nonzero().flatten().tolist()]
    more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
    if precision == "fp16":
        raise DataError(
            f"{what} do not fit fp16, of sample {', '.join(map(str, wrong[:NAMED]))}{more}: it ends at 65504; "
            "give --frozen-precision bf16"
        )
    raise WireError(
        f"{what} are infinite or no numbers, of sample {', '.join(map(str, wrong[:NAMED]))}{more}: data, weights or "
        "the server are damaged; if these layers really give such values, allow them by --check-features off"
    )


def check_exactly_once(planned: Sequence[IntArray], delivered: Sequence[IntArray]) -> None:
    """Raise :class:`HapiError` unless every planned sample arrived once, by the ids that frames carried."""
    if not planned:
        return
    want, got = np.concatenate(planned), np.concatenate(delivered)
    size = int(max(want.max(), got.max())) + 1
    if not np.array_equal(np.bincount(want, minlength=size), np.bincount(got, minlength=size)):
        raise HapiError("an epoch did not use each sample exactly once; this is a defect of hapi")
