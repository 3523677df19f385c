"""Parts of a training's report that its session knows: job, settings, plan, memory."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import hapi
from hapi.client.session import Session
from hapi.config.fields import flat
from hapi.train.settings import TrainingSettings


def job_facts(session: Session, training: TrainingSettings) -> dict[str, Any]:
    """Return the facts of the training: model, data, settings and versions."""
    prepared = session.prepared
    settings = {**flat(session.settings), **flat(training)}
    return {
        "hapi": hapi.__version__,
        "model": session.settings.model,
        "weights": prepared.weights,
        "layers": len(prepared.model.layers),
        "freeze": prepared.freeze,
        "freeze_name": prepared.model.layers[prepared.freeze - 1].name if prepared.freeze else "",
        "split": session.split,
        "split_name": prepared.job(session.split).split_name,
        "strategy": prepared.strategy,
        "dataset": prepared.description.reference.to_json(),
        "classes": list(prepared.description.classes),
        "batch_size": session.settings.bs,
        **prepared.order.identity(),
        "request_size": session.settings.request_size,
        "servers": prepared.urls,
        "device": str(session.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
    }


def plan_facts(session: Session, epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The plan with every candidate, and what comparing with other servers found, where there are these."""
    planning = session.planning
    plan = {} if planning is None else {"plan": {**planning.to_json(), "memory": _memory(session, epochs)}}
    return plan if session.recheck is None else {**plan, "recheck": session.recheck.to_json()}


def _memory(session: Session, epochs: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """The client's peak as the plan has it, of the splits that batches ran at, and as it was."""
    planning, predicted = session.planning, None
    if planning is not None and planning.plan is not None:
        ran = {split for epoch in epochs for split, _ in epoch["splits"]} or {planning.split}
        predicted = max(planning.plan.candidates[split].estimate.memory.peak for split in ran)
    return {"predicted": predicted, "observed": session.budget.highest()}
