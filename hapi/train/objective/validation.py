"""A pass over the validation samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hapi.client.session import Session
from hapi.train.objective.objective import Objective


def validate(session: Session, module: nn.Module, objective: Objective) -> dict[str, Any]:
    """Return the figures over the session's validation samples by their names in the report; none without samples.

    Args:
        session: delivers the samples' features.
        module: the layers after the freeze; in eval mode while this runs, in train mode afterwards.
        objective: sums the figures; what it held before is lost.
    """
    if not len(session.job_context.validation_ids):
        return {}
    objective.clear()
    module.eval()
    with torch.no_grad():
        for features, targets in session.validation():
            objective.note(module(features), targets)
    module.train()
    return {
        **{f"validation_{name}": value for name, value in objective.figures().items()},
        "validation_seconds": round(session.last.seconds, 4),
    }
