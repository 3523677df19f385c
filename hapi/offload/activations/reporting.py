"""Words and numbers of a plan of activations, for people and programs."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from hapi.offload.activations.counters import Counters
from hapi.offload.layer_memory import Action
from hapi.offload.loop.notices import notice
from hapi.offload.planner import Case, Plan, Problem
from hapi.units import format_bytes

log = logging.getLogger("hapi.offload")


def moved(counters: Counters) -> dict[str, Any]:
    """Return what was moved so far."""
    return {
        "bytes_written": counters.written_bytes,
        "bytes_read": counters.read_bytes,
        "bytes_to_host": counters.host_bytes,
        "seconds_waited": counters.waited_seconds,
        "tensors_stored": counters.stored_tensors,
        "tensors_shared": counters.shared_tensors,
        "peak_bytes": counters.peak_bytes,
    }


def planned(problem: Problem, plan: Plan, reasons: Mapping[str, str | None]) -> dict[str, Any]:
    """Return a plan and its prediction.

    Args:
        problem: that the plan solves.
        plan: chosen one.
        reasons: why a layer of that name cannot be recomputed; None where it can.
    """
    layers = [
        {
            "name": layer.name,
            "action": str(treated.action),
            "flops": layer.flops,
            "saved_bytes": layer.saved_bytes,
            "input_bytes": layer.input_bytes,
            "kept_bytes": treated.kept_bytes,
            "host_bytes": treated.host_bytes,
            "disk_bytes": treated.disk_bytes,
            "not_recomputed": reasons[layer.name],
        }
        for layer, treated in zip(problem.layers, plan.layers, strict=True)
    ]
    return {
        "case": str(plan.case),
        "forward_seconds": _known(plan.forward_seconds),
        "backward_seconds": _known(plan.backward_seconds),
        "predicted_peak_bytes": plan.peak_bytes,
        "swapped_bytes": plan.swapped_bytes,
        "saved_bytes": plan.saved_bytes,
        "rates": {
            "flops": problem.machine.thp_g,
            "disk_read": problem.machine.bw_s2m,
            "disk_write": problem.machine.bw_m2s,
        },
        "layers": layers,
    }


def _known(seconds: float) -> float | None:
    """Return None where a disk's rate was not measured, as nothing was swapped: JSON has no infinite numbers."""
    return seconds if math.isfinite(seconds) else None


def tell(problem: Problem, plan: Plan, memory: int, policy: str, *, has_disk: bool) -> None:
    """Say in a line what is done with the activations, and warn where the memory is too small for them.

    Args:
        problem: that the plan solves.
        plan: chosen one.
        memory: bytes that a pass may take.
        policy: the user's.
        has_disk: whether there is one to swap to.
    """
    if plan.peak_bytes > memory:
        log.warning(
            "a pass takes %s of activations and working memory, and has %s: %s",
            format_bytes(plan.peak_bytes),
            format_bytes(memory),
            "take a smaller batch, or split larger layers" if has_disk else "give disk=",
        )
    recomputed_layers = sum(treated.action is Action.RECOMPUTE for treated in plan.layers)
    notice(
        f"activations: {format_bytes(plan.swapped_bytes)} of {format_bytes(problem.all_bytes)} swapped, "
        f"{recomputed_layers} of {len(plan.layers)} layers recomputed "
        f"({plan.case if plan.case is not Case.FIXED else policy})"
    )
