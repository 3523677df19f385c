"""Parts of a training's report that its session knows: job, settings, plan, memory."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import hapi
from hapi.client.session import Session
from hapi.config.fields import flat
from hapi.text import counted
from hapi.train.settings import TrainingSettings
from hapi.units import format_bytes


def job_facts(session: Session, training: TrainingSettings) -> dict[str, Any]:
    """Return the facts of the training: model, data, settings and versions."""
    job_context = session.job_context
    settings = {**flat(session.settings), **flat(training)}
    return {
        "hapi": hapi.__version__,
        "model": session.settings.model,
        "weights": job_context.weights,
        "layers": len(job_context.model.layers),
        "freeze": job_context.freeze,
        "freeze_name": job_context.model.layers[job_context.freeze - 1].name if job_context.freeze else "",
        "split": session.split,
        "split_name": job_context.job(session.split).split_name,
        "strategy": job_context.strategy,
        "dataset": job_context.description.reference.to_json(),
        "classes": list(job_context.description.classes),
        "batch_size": session.settings.bs,
        **job_context.order.identity(),
        "ranks": session.ranks.size,
        "request_size": session.settings.request_size,
        "servers": job_context.urls,
        "device": str(session.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
    }


def plan_facts(session: Session, epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The plan with every candidate, what is kept, and what comparing with other servers found, as far as there are
    these.
    """
    planning = session.planning
    plan: dict[str, Any] = (
        {} if planning is None else {"plan": {**planning.to_json(), "memory": _memory(session, epochs)}}
    )
    if session.settings.cache != "off":
        plan["cache"] = session.keeping.to_json()
    plan["wire_codec"] = session.codecs.to_json()
    return plan if session.recheck is None else {**plan, "recheck": session.recheck.to_json()}


def _memory(session: Session, epochs: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """The client's peak as the plan has it, of the splits that batches ran at, and as it was."""
    planning, predicted = session.planning, None
    if planning is not None and planning.plan is not None:
        ran = {split for epoch in epochs for split, _ in epoch["splits"]} or {planning.split}
        predicted = max(planning.plan.candidates[split].estimate.memory.peak for split in ran)
    return {"predicted": predicted, "observed": session.budget.highest()}


def offload_text(report: Mapping[str, Any]) -> str:
    """One line for people about where the optimiser's states were and what that cost; empty where all was in memory."""
    facts = report.get("offload", {})
    if "cost" not in facts:
        return ""
    cost = facts["cost"]
    moved = format_bytes(cost["bytes_read"] + cost["bytes_written"])
    where = cost["where"] or "host memory"
    return (
        f"offload: {facts['why']}; {counted(cost['taken_steps'], 'step')} read and wrote {moved} at {where}, "
        f"{cost['redone_steps']} were computed again"
    )


def kept_text(report: Mapping[str, Any]) -> str:
    """One line for people about a report's kept features; empty where there is nothing to say."""
    samples, hits, by_server, kept, written = (
        sum(epoch.get(name, 0) for epoch in report["epochs"])
        for name in (
            "samples",
            "feature_hits",
            "server_kept_samples",
            "features_kept",
            "feature_bytes_written",
        )
    )
    why = report.get("cache", {}).get("why", "")
    parts = []
    if hits or kept:
        parts.append(f"features of {hits / max(1, samples):.0%} of the samples came from the cache")
        parts.append(f"{kept} were kept, {format_bytes(written)}")
    if by_server:
        parts.append(
            f"features of {by_server / max(1, samples):.0%} of the samples had been kept by the server"
        )
    if why and (hits or kept or report["cache"]["mode"] == "on" or len(report["epochs"]) > 1):
        parts.append(f"not kept, or not all: {why}")
    return f"cache: {'; '.join(parts)}" if parts else ""
