"""Ray Serve's autoscaling by what trainers wait (:mod:`hapi.cluster.scaling`). Lives in Serve's controller."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hapi.cluster.scaling import FleetReading, ScalingRule, ScalingState, wanted_servers

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

log = logging.getLogger("ray.serve")

READINGS = ("wait", "stalled", "busy", "jobs")
"""Names of what each replica tells of itself."""


class TrainerWaitPolicy:
    """Says how many replicas there should be, or leaves them as they are and only tells it.

    Both are logged when they change, and exported as the gauge ``hapi_servers_wanted``.
    """

    def __init__(self, rule: Mapping[str, Any], act: bool) -> None:
        """``rule``: fields of :class:`ScalingRule`; without ``act`` nothing changes."""
        from ray.util.metrics import Gauge

        self._rule, self._act = ScalingRule(**rule), act
        self._state = ScalingState()
        self._said: int | None = None
        self._gauge = Gauge(
            "hapi_servers_wanted", "Servers that there should be by what trainers wait.", ("application",)
        )

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and Serve's state of a policy, which is not used."""
        current, reading = context.target_num_replicas, reading_of(context.aggregated_metrics or {})
        wanted, self._state = wanted_servers(
            self._rule, self._state, reading, current, context.current_time or 0.0
        )
        self._gauge.set(wanted, tags={"application": context.app_name or ""})
        if wanted != current and wanted != self._said:
            verb = "scaling" if self._act else "advice: scale"
            log.info("hapi: %s from %d to %d servers: %s", verb, current, wanted, asdict(reading))
        self._said = wanted
        return wanted if self._act else current, {}


def reading_of(metrics: Mapping[str, Mapping[Any, float]]) -> FleetReading:
    """Return the fleet's means of what replicas tell, by name and replica; a stall counts by its number of jobs."""
    busy = metrics.get("busy", {})
    jobs = {replica: n for replica, n in metrics.get("jobs", {}).items() if n > 0}
    stalled = sum(metrics.get("stalled", {}).get(replica, 0.0) * n for replica, n in jobs.items())
    return FleetReading(
        servers=len(busy),
        asked=len(jobs),
        wait=_mean(metrics.get("wait", {})),
        stalled=stalled / sum(jobs.values()) if jobs else 0.0,
        busy=_mean(busy),
    )


def _mean(values: Mapping[Any, float]) -> float:
    return sum(values.values()) / len(values) if values else 0.0
