"""A check, before training begins, that its smallest batch is large enough for the trained layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hapi.client.joint.ranks import part_size
from hapi.client.session import Session
from hapi.errors import UsageError
from hapi.models.graph.segment import Segment
from hapi.train.distributed.batch_norm import has_batch_norm


def check_smallest_batch(session: Session, sizes: Sequence[int]) -> None:
    """Raise :class:`UsageError` where BatchNorm in the trained layers would refuse a batch of one sample.

    Otherwise that is found where the batch comes, which mostly is the epoch's last.

    Args:
        session: has the layers, in train mode, and the ranks.
        sizes: samples of each batch of an epoch.
    """
    ranks, job = session.ranks, session.job_context
    small = {
        size
        for size in set(sizes)
        if min(part_size(size, rank, ranks.size) for rank in range(ranks.size)) < 2
    }
    layers = session.trained
    if not small or not isinstance(layers, Segment) or not has_batch_norm(layers):
        return
    shape, dtype = (
        job.model.output_shapes()[session.last_split],
        job.model.output_dtypes()[session.last_split],
    )
    if not refuses_one(layers, torch.empty((1, *shape), dtype=dtype, device="meta")):
        return
    number = next(number for number, size in enumerate(sizes) if size in small)
    where = f"1 sample on a rank ({sizes[number]} on {ranks.size})" if ranks.size > 1 else "1 sample"
    raise UsageError(
        f"batch {number} of each epoch has {where}, too few for BatchNorm in the trained layers; give --drop-last or "
        "another --bs"
    )


def refuses_one(layers: Segment, sample: torch.Tensor) -> bool:
    """Return whether BatchNorm refuses a batch, tried without memory and without a change of the layers.

    Args:
        layers: the trained ones.
        sample: the batch [1, ...], on the meta device.
    """
    run = layers.over(lambda tensor: torch.empty_like(tensor, device="meta"))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            run(sample)
    except ValueError as error:
        return "more than 1 value per channel" in str(error)
    except Exception:  # code that needs numbers: the step itself tells
        return False
    return False
