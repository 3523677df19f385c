"""Parameters of trained layers that may get no gradient: a user's own module may have layers that it does not run."""

from __future__ import annotations

import torch

from hapi.client.session import Session
from hapi.models.graph.segment import Segment

_SAMPLES = 2
"""Samples of the batch that is tried: BatchNorm refuses one."""


def may_be_unused(session: Session) -> bool:
    """Return whether a step may leave a parameter of the session's trained layers without a gradient.

    That is tried once, without memory and without a change of the layers; code that needs numbers may do anything.
    """
    layers, job = session.trained, session.job_context
    if not isinstance(layers, Segment):
        return True
    shape = job.model.output_shapes()[session.last_split]
    sample = torch.empty(
        (_SAMPLES, *shape), dtype=job.model.output_dtypes()[session.last_split], device="meta"
    )
    return leaves_out(layers, sample)


def leaves_out(layers: Segment, sample: torch.Tensor) -> bool:
    """Return whether a backward pass over ``sample`` leaves a parameter out, or cannot be tried.

    Args:
        layers: the trained ones.
        sample: a batch [B, ...] on the meta device.
    """
    twins: dict[int, torch.Tensor] = {}

    def substitute(tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without memory, which gets a gradient where ``tensor`` does; one for each, under all its names."""
        if id(tensor) not in twins:
            twins[id(tensor)] = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        return twins[id(tensor)]

    run = layers.over(substitute)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            run(sample).sum().backward()
    except Exception:
        return True
    return any(twin.requires_grad and twin.grad is None for twin in twins.values())
