"""``benchmarks ablate``: planning with each of its mechanisms off in turn, on the profiles that a sweep kept.

Two questions. Does the cost model's mechanism change the choices, and what do these cost by the sweep's measured
epochs? And does a mechanism of re-planning save time in a simulated world: a recorded profile is the truth, of which
the link, the server or the client changes while the job runs, and every batch is as noisy as on the machine. The
simulation is deterministic.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any
from unittest import mock

from benchmarks.split.replay import mean_profile, replayed
from benchmarks.split.study import measured_cells
from benchmarks.split.world import World, sizes_in
from benchmarks.testbed.conditions import recorded_conditions
from hapi.client.planning import drift, profile_phase
from hapi.client.planning.change_hold import ChangeHold
from hapi.client.planning.controller import SplitController
from hapi.client.planning.drift import Drift, DriftDetector
from hapi.client.planning.link_probe import LinkProbe
from hapi.profiler.cost import estimate
from hapi.profiler.profile import Job, Profile
from hapi.profiler.stages import pipeline

BATCHES = 20
"""Batches of an epoch."""
STRETCHES = 3
"""Stretches of :data:`EPOCHS` epochs each: as profiled, changed, and as profiled again."""
EPOCHS = 3
BATCH, EVERY = 48, 4
"""The training batch of the cells whose profiles are simulated, and of how many such cells one is taken."""
Switch = Callable[[ExitStack], Any]
"""Turns a mechanism off until the stack is closed."""


@dataclass(frozen=True)
class Scene:
    """Events in the world while a job runs."""

    link: float = 1.0
    """The link's rate in the second stretch, over that of the others."""
    server: float = 1.0
    """The server's seconds, as much."""
    client: float = 1.0
    overhead: float = 1.0
    """The server's seconds of reading, decoding and sending, as much."""
    step: float = 1.0
    """The training step's, as much."""
    period: int = 0
    """Batches after which the change comes or goes in the second stretch; 0: it stays."""
    bucket: float = 0.0
    """Batches of stored samples that cross at five times the link's rate once it has rested: a token bucket."""
    noise: float = 0.08
    """Standard deviation of each cost, as a share."""
    hiccups: float = 0.0
    """The part of the batches that take five times as long."""
    fresh: int = 0
    """Batches at a split that touch new memory first, and take twice as long."""


SCENES: Mapping[str, Scene] = {
    "steady": Scene(),
    "noisy": Scene(noise=0.3),
    "hiccups": Scene(hiccups=0.05),
    "new memory": Scene(fresh=5),
    "link /10": Scene(link=0.1),
    "link x10": Scene(link=10.0),
    "server x0.4": Scene(server=2.5),
    "client x0.4": Scene(client=2.5),
    "step x0.4": Scene(step=2.5),
    "link /10, sending x0.3": Scene(link=0.1, overhead=3.0),
    "bucket": Scene(bucket=4.0),
    "large bucket": Scene(bucket=40.0),
    "server to and fro": Scene(server=3.0, period=7),
    "link to and fro": Scene(link=0.2, period=7),
}


def set_values(target: Any, **values: Any) -> Switch:
    """A switch that replaces attributes of ``target``."""

    def switch(stack: ExitStack) -> None:
        for name, value in values.items():
            stack.enter_context(_patched(target, name, value))

    return switch


def _patched(target: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    return mock.patch.object(target, name, value, create=True)


def _whole_tiers(stack: ExitStack) -> None:
    """A tier's parts are compared as one."""
    ratios, parts = DriftDetector._ratios, (("forward", "overhead"), ("suffix", "step"))

    def whole(self: DriftDetector, observed: Any) -> dict[str, float]:
        found = ratios(self, observed)
        if observed is None:
            return found
        expected = self._estimated(observed.split)
        measured = {**drift._client_parts(observed), **drift._server_parts(observed)}
        for names in parts:
            known = [name for name in names if name in measured]
            total = sum(expected[name] for name in known)
            if total > 0 and any(name in found for name in known):
                ratio = sum(measured[name] for name in known) / total
                found.update(dict.fromkeys(known, ratio))
        return found

    stack.enter_context(_patched(DriftDetector, "_ratios", whole))


def _without_small(scaled: Callable[..., Profile]) -> Callable[..., Profile]:
    """A part changes the unmeasured rest of its tier, however small it is."""

    def all_rests(*args: Any) -> Profile:
        with _patched(DriftDetector, "SIGNIFICANT", 0.0):
            return scaled(*args)

    return all_rests


MECHANISMS: Mapping[str, Switch] = {
    "none (all on)": lambda stack: None,
    "re-planning at all": set_values(
        SplitController, _follow_plan=lambda self, at: None, _probe_link=lambda *a: None
    ),
    "evidence of two batches": set_values(Drift, EVIDENCE=1),
    "margin of 25%": set_values(Drift, MARGIN=0.05),
    "parts of a tier apart": _whole_tiers,
    "small parts left out": set_values(DriftDetector, SIGNIFICANT=0.0),
    "hysteresis of 5%": set_values(DriftDetector, HYSTERESIS=0.0),
    "holds": set_values(ChangeHold, FIRST=0, LONGEST=0),
    "growing holds": set_values(ChangeHold, LONGEST=ChangeHold.FIRST),
    "leaving at once what is worse": set_values(
        SplitController, _worse=property(lambda self: False, lambda self, value: None)
    ),
    "link probes": set_values(SplitController, _probe_link=lambda *a: None),
    "small unmeasured rests left out": lambda stack: stack.enter_context(
        _patched(drift, "_scaled", _without_small(drift._scaled))
    ),
    "a probe's share of time": set_values(LinkProbe, SHARE=math.inf),
    "outlier filter": set_values(profile_phase, OUTLIER_FACTOR=1e9),
    "new-memory filter": set_values(profile_phase, FEW_PAGES=1 << 40),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One simulated job."""

    over: float
    """Its seconds after the profiled epoch, over those of the best split at every moment."""
    splits: tuple[int, ...]
    """At each stretch's end."""
    changes: int


@dataclass(frozen=True, kw_only=True)
class AblateResult:
    """A row for each mechanism that is off, and one for each norm."""

    mechanisms: tuple[Mapping[str, Any], ...]
    norms: tuple[Mapping[str, Any], ...]
    conditions: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        return {
            "benchmark": "ablate",
            "scenes": {name: asdict(scene) for name, scene in SCENES.items()},
            "mechanisms": list(self.mechanisms),
            "norms": list(self.norms),
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        lines = [
            "simulated seconds over those of the best split at every moment; runs that end at other splits",
            f"{'off':<34}{'mean':>8}{'worst':>8}{'changes':>9}{'other ends':>12}  scene that loses most",
        ]
        for row in self.mechanisms:
            lines.append(
                f"{row['off']:<34}{row['mean']:>8.4f}{row['worst']:>8.2f}{row['changes']:>9.1f}{row['other_ends']:>12}"
                f"  {row['scene']} {row['scene_over']:+.3f}"
            )
        lines += ["", f"{'norm':>6}{'mean over best':>16}{'worst':>8}{'within 5%':>11}{'other choices':>15}"]
        for row in self.norms:
            lines.append(
                f"{row['norm']:>6}{row['mean']:>16.2%}{row['worst']:>8.1%}{row['within']:>11}{row['other_choices']:>15}"
            )
        return lines


def simulate(profile: Profile, job: Job, scene: Scene, seed: int) -> Run:
    """A job whose truth is ``profile`` and what ``scene`` makes of it."""
    source, world = Random(seed), World(profile)
    world.noise = lambda: max(0.2, source.gauss(1.0, scene.noise))
    planning = SplitController("auto", sizes_in(profile), job, world)
    spent = best = 0.0
    seen: dict[int, int] = {}
    ends: list[int] = []
    burst = _changed(profile, Scene(link=5.0))
    worlds = [(true, _seconds(true, job)) for true in (profile, _changed(profile, scene), burst)]
    before, rate = -1, profile.link.bits_per_second / 8
    tokens = full = scene.bucket * job.bs * profile.sent_bytes(0)
    for stretch in range(STRETCHES):
        for number in range(EPOCHS):
            epoch = stretch * EPOCHS + number
            planning.begin_pass(epoch, BATCHES)
            for batch in range(BATCHES):
                round_index = (number * BATCHES + batch) // scene.period if scene.period else 0
                split, timed = planning.open(epoch, batch)
                sent = job.bs * profile.sent_bytes(split)
                bursting = full > 0 and tokens >= sent
                world.true, (costs, fills) = worlds[2 if bursting else stretch % 2 and round_index % 2 == 0]
                tokens = min(full, tokens + rate * costs[split] - sent)
                first = seen.setdefault(split, 0) < scene.fresh
                seen[split] += 1
                slow = 2.0 if first else 5.0 if source.random() < scene.hiccups else 1.0
                world.slower = world.server_slower = slow
                world.pages = world.server_pages = 1 << 12 if first else 0
                planning.batch_done(epoch, batch, split, world.batch(split, job.bs, timed))
                if epoch:
                    spent, best = spent + costs[split], best + min(costs)
                    spent += fills[split] if split != before else 0.0  # the pipeline fills anew
                before = split
        ends.append(planning.split)
    return Run(over=spent / best, splits=tuple(ends), changes=len(planning.changes))


def _seconds(true: Profile, job: Job) -> tuple[list[float], list[float]]:
    """(of a batch, of filling the pipeline) by split."""
    found = [estimate(true, job, split) for split in range(true.last_split + 1)]
    return [e.epoch_seconds / BATCHES for e in found], [e.stages.fill for e in found]


def _changed(profile: Profile, scene: Scene) -> Profile:
    tier = profile.server_tier
    return replace(
        profile,
        link=replace(profile.link, bits_per_second=profile.link.bits_per_second * scene.link),
        layers=tuple(
            replace(
                layer,
                server_seconds=layer.server_seconds * scene.server,
                client_seconds=layer.client_seconds * scene.client,
            )
            for layer in profile.layers
        ),
        server_tier=replace(
            tier,
            decode_seconds=tier.decode_seconds * scene.server * scene.overhead,
            overhead_seconds=tier.overhead_seconds * scene.server * scene.overhead,
            codec_seconds_per_byte=tier.codec_seconds_per_byte * scene.server * scene.overhead,
        ),
        step_seconds=profile.step_seconds * scene.client * scene.step,
    )


def ablate(records: Sequence[Mapping[str, Any]], tell: Callable[[str], None]) -> AblateResult:
    """Take planning apart on the cells that a sweep recorded; ``tell`` gets a line for each mechanism.

    :class:`UsageError` when there is no whole cell among ``records``.
    """
    truths = list(_truths(records))[::EVERY]
    known: Mapping[str, list[Run]] = {}
    rows = []
    for name, switch in MECHANISMS.items():
        with ExitStack() as stack:
            switch(stack)
            found = {
                scene: [
                    simulate(profile, job, SCENES[scene], seed) for seed, (profile, job) in enumerate(truths)
                ]
                for scene in SCENES
            }
        known = known or found
        rows.append(_row(name, found, known))
        tell(f"{name}: {rows[-1]['mean']:.4f}")
    found_norms = [_norm(records, norm) for norm in (pipeline.OVERLAP_NORM, 2.0, 4.0, 16.0, 512.0)]
    choices = found_norms[0]["choices"]
    norms = tuple(
        {**row, "other_choices": sum(a != b for a, b in zip(row["choices"], choices, strict=True))}
        for row in found_norms
    )
    return AblateResult(mechanisms=tuple(rows), norms=norms, conditions=dict(recorded_conditions(records)))


def _row(name: str, found: Mapping[str, list[Run]], known: Mapping[str, list[Run]]) -> dict[str, Any]:
    means = {scene: statistics.fmean(run.over for run in runs) for scene, runs in found.items()}
    lost = {scene: means[scene] - statistics.fmean(run.over for run in known[scene]) for scene in means}
    worst = max(lost, key=lambda scene: lost[scene])
    runs = [run for scene in found.values() for run in scene]
    return {
        "off": name,
        "mean": statistics.fmean(run.over for run in runs),
        "worst": max(run.over for run in runs),
        "changes": statistics.fmean(run.changes for run in runs),
        "other_ends": sum(
            a.splits != b.splits for s in found for a, b in zip(found[s], known[s], strict=True)
        ),
        "scene": worst,
        "scene_over": lost[worst],
        "scenes": {scene: round(mean, 4) for scene, mean in means.items()},
    }


def _truths(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Profile, Job]]:
    """The mean profile and the job of each cell."""
    profiles: dict[str, list[Profile]] = {}
    for record in records:
        if record["kind"] == "plan":
            profiles.setdefault(record["cell"], []).append(Profile.from_json(record["profile"]))
    for one in measured_cells(records):
        if one.cell.bs == BATCH:
            job = Job(
                bs=BATCH,
                samples=BATCH * BATCHES,
                epochs=STRETCHES * EPOCHS,
                request_size=16,
                alternate=False,  # what was measured is one split alone
            )
            yield mean_profile(profiles[one.cell.key]), job


def _norm(records: Sequence[Mapping[str, Any]], norm: float) -> dict[str, Any]:
    """Cost of the choices of ``auto`` over the best measured split, with this norm for stages that overlap."""
    with _patched(pipeline, "OVERLAP_NORM", norm):
        cells = measured_cells(list(replayed(records)))
    choices = [one.choices["auto"] for one in cells]
    over = [one.slower(choice) for one, choice in zip(cells, choices, strict=True)]
    known = [value for value in over if value is not None]
    return {
        "norm": norm,
        "mean": statistics.fmean(known),
        "worst": max(known),
        "within": f"{sum(value <= 0.05 for value in known)} of {len(over)}",
        "choices": choices,
    }
