"""Choices of strategies from a profile, also from those that a sweep kept, with the present cost model. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.testbed.cells import cells_of
from hapi.errors import ConfigError
from hapi.profiler.cost import estimate
from hapi.profiler.profile import Job, Profile
from hapi.profiler.strategies import PLANNERS, plan


def priced(profile: Profile, job: Job) -> dict[str, Any]:
    """Every strategy's choice, and every split's estimates: seconds of an epoch in three forms, and bytes.

    :class:`DeviceMemoryError` when no split fits the job's memory.
    """
    estimates = [estimate(profile, job, split) for split in range(profile.last_split + 1)]
    return {
        "choices": {name: plan(name, profile, job).split for name in PLANNERS},
        "auto": [e.epoch_seconds for e in estimates],
        "paper": [e.paper_epoch_seconds for e in estimates],
        "sum": [
            (e.stages.server_waves + e.stages.network + e.stages.client) * job.samples / job.bs
            for e in estimates
        ],
        "wire": [e.epoch_wire_bytes for e in estimates],
        "memory": [e.memory.peak for e in estimates],
    }


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the mean of ``profiles`` of one job; counted figures are those of the last one."""
    mean: Profile = _mean(profiles)
    return replace(mean, notes=(*profiles[-1].notes, f"the mean of {len(profiles)} profiles"))


def _mean(values: Sequence[Any]) -> Any:
    last = values[-1]
    if dataclasses.is_dataclass(last) and not isinstance(last, type):
        names = [field.name for field in dataclasses.fields(last)]
        return replace(last, **{name: _mean([getattr(value, name) for value in values]) for name in names})
    if isinstance(last, tuple) and last and dataclasses.is_dataclass(last[0]):
        return tuple(_mean(one) for one in zip(*values, strict=True))
    return statistics.fmean(values) if isinstance(last, float) else last


def replayed(records: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A sweep's ``records``, the plans of whole cells made anew from the profiles that they hold.

    :class:`ConfigError` for a profile of another version.
    """
    cells, grid = cells_of(dict(r) for r in records), {}
    for record in records:
        if record["kind"] == "conditions":
            grid = record.get("grid", {})
        if record["kind"] != "plan" or record["cell"] not in cells:
            yield dict(record)
            continue
        cell = cells[record["cell"]]
        if "profile" not in record or "request_size" not in grid:
            raise ConfigError(
                f"{cell.key}: its profile or its grid was not recorded; it cannot be planned anew"
            )
        job = Job(
            bs=cell.bs,
            samples=record["samples"],
            request_size=grid["request_size"],
            memory_bytes=grid.get("memory"),
            alternate=False,  # what was measured is one split alone
        )
        yield {**record, **priced(Profile.from_json(record["profile"]), job)}
