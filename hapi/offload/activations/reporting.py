"""Words and numbers of a plan of activations, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hapi.offload.planner import Plan, Problem


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
        "forward_seconds": plan.forward_seconds,
        "backward_seconds": plan.backward_seconds,
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
