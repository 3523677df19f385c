"""Judgement of the choice in one cell: what was chosen, beside everything that could have been, all replayed."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.keep.disks import CacheAtWork
from benchmarks.keep.grid import KeepCell, codecs_of, world_of
from benchmarks.keep.machines import Machines, SideCache
from benchmarks.keep.whole_job import JobFound, World, busy, epoch_bound, kept_share, replay
from hapi.cache.disk_rates import DiskRates
from hapi.client.planning.reuse_choice import ReuseChooser
from hapi.errors import UsageError
from hapi.profiler.reuse.choice import Choice, Crossing, Mode
from hapi.profiler.reuse.choose import ReusePlan, choose_reuse
from hapi.profiler.reuse.facts import RAW, CodecCost, CutCodecs, KeptShare, ReuseFacts, Storage
from hapi.profiler.stages.alternation import STEPS, Alternation

ENOUGH = 0.02
"""Part by which another choice must be able to be better for it to be replayed."""
PAIRS = 24
"""Pairs of splits that alternate of which the best is taken: those with the lowest bounds. All else is exhaustive."""
_SETTLED = 0.5
RATIO_ERROR, RATE_ERROR = 0.03, 0.2
"""Largest parts by which codecs tried on a few rows are taken to be off: rows and a busy processor differ so much."""


def judge(cell: KeepCell, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the record of a cell: seconds as planned, as a run chooses, and of the best choice there is.

    Args:
        cell: the conditions.
        known: an earlier record of the cell, whose best choice is taken in place of a search; None to search.

    Raises:
        UsageError: the replay of a choice that is in both records takes another time than then.
    """
    world = world_of(cell)
    codecs = codecs_of(cell.model, world.profile.last_split, cell.speed) if cell.codecs else ()
    plan = choose_reuse(world.profile, world.job, sampled_facts(world, codecs))
    planned = replay(world, lambda machines, epoch: planned_choice(plan, epoch))
    run = RunPolicy(world, codecs)
    ran = replay(world, run)
    if known is None:
        best, choice, replayed = best_of(world, codecs, min(planned.seconds, ran.seconds))
        best_text = text_of(plan.choice if choice is None else choice)
    else:
        if known["chosen"] == text_of(plan.choice) and abs(known["planned"] / planned.seconds - 1) > 1e-9:
            raise UsageError(
                f"cell {cell.key}: the replay is another one than in the known results; search anew"
            )
        best, best_text, replayed = known["best"], known["best_choice"], 0
    best = min(best, planned.seconds, ran.seconds)
    return {
        "kind": "choice",
        "cell": cell.key,
        **asdict(cell),
        "chosen": text_of(plan.choice),
        "mode": plan.mode,
        "forecast": plan.seconds,
        "forecast_bytes": plan.cost.kept_bytes,
        **_facts("planned", planned),
        **_facts("run", ran),
        "run_choices": run.texts,
        "best": best,
        "best_choice": best_text,
        "budget": [0 if side is None else side.budget for side in (world.client, world.server)],
        "replayed": replayed,
    }


def planned_choice(plan: ReusePlan, epoch: int) -> Choice:
    """Return the choice for ``epoch``, as it was planned before the first one."""
    settled = plan.cost.later_epoch is not None and epoch >= plan.cost.later_epoch
    return plan.choice.settled if settled else plan.choice.unchanging


def _facts(name: str, found: JobFound) -> dict[str, Any]:
    return {name: found.seconds, f"{name}_kept": found.kept_share, f"{name}_bytes": list(found.most_bytes)}


def text_of(choice: Choice) -> str:
    """Return a choice in a few words."""
    at = choice.crossing
    wire = "" if at.wire == RAW else f", {at.wire.name} on the wire"
    codec = "" if choice.codec == RAW else f" as {choice.codec.name}"
    limit = "" if choice.limit == 1 else f", {choice.limit:.0%} of the samples"
    kept = "" if choice.mode in ("recompute", "keep samples") else f" {choice.cut}{codec}"
    other = ""
    if at.alternation is not None:
        other = f", {at.alternation.text}"
        other += "" if at.other_wire == RAW else f", {at.other_wire.name} on the wire"
    later = "" if choice.later is None else f"; then {text_of(choice.settled)}"
    return f"{choice.mode}{kept}, split {at.split}{wire}{other}{limit}{later}"


def sampled_facts(world: World, codecs: tuple[CutCodecs, ...]) -> ReuseFacts:
    """Return the facts that ``hapi plan`` has: rates are those of a short probe, which a disk's fast part answers."""

    def storage(side: SideCache | None) -> Storage | None:
        """Return one side's room."""
        if side is None:
            return None
        disk = side.disk
        return Storage(bytes=side.budget, memory_bytes=side.memory_bytes, read=disk.read, write=disk.write)

    return ReuseFacts(
        client=storage(world.client),
        server=storage(world.server),
        codecs=codecs,
        wire_codecs=codecs,
        samples=world.job.samples,
    )


class RunPolicy:
    """Choices of a run: made anew before each epoch, from what the run has measured by then."""

    def __init__(self, world: World, codecs: tuple[CutCodecs, ...]) -> None:
        """Begin without a measurement."""
        self._world, self._codecs = world, codecs
        self._machines: Machines | None = None
        self._chooser = ReuseChooser(self._known)
        self._estimates = {at.cut: estimated(at) for at in codecs}
        """Codecs as they were tried on a few rows of a batch that was profiled layer by layer."""
        self._tried = {world.profile.last_split}
        """Layers whose features crossed or were kept, so that more of them was measured."""
        self.texts: list[str] = []
        """The choices, each once."""

    def __call__(self, machines: Machines, epoch: int) -> Choice:
        """Return the choice for the epochs from ``epoch`` on."""
        self._machines = machines
        job = self._world.job
        left = replace(job, epochs=job.epochs - epoch)
        self._chooser.choose(self._world.profile, left, range(self._world.profile.last_split + 1))
        if self._chooser.plan is None:
            raise RuntimeError("a choice was made without one; this is a defect of hapi")
        choice = self._true(self._chooser.plan.choice.unchanging)
        at = choice.crossing
        self._tried |= {choice.cut, at.split}
        if at.alternation is not None:
            self._tried.add(at.alternation.other)
        if text_of(choice) not in self.texts:
            self.texts.append(text_of(choice))
        return choice

    def _true(self, choice: Choice) -> Choice:
        """Return ``choice`` with what its codecs do, which was estimated where they were not used yet."""

        def codec(cut: int, name: str) -> CodecCost:
            """Return the codec of this name at a cut."""
            at = (one for known in self._codecs if known.cut == cut for one in known.codecs)
            return next((one for one in at if one.name == name), RAW)

        at = choice.crossing
        other = at.split if at.alternation is None else at.alternation.other
        crossing = replace(
            at, wire=codec(at.split, at.wire.name), other_wire=codec(other, at.other_wire.name)
        )
        return replace(choice, codec=codec(choice.cut, choice.codec.name), crossing=crossing)

    def _known(self) -> ReuseFacts:
        world, machines = self._world, self._machines
        if machines is None:
            raise RuntimeError("asked before the first epoch; this is a defect of the benchmark")
        known = tuple(at if at.cut in self._tried else self._estimates[at.cut] for at in self._codecs)
        return ReuseFacts(
            client=self._storage(world.client, machines.client_cache),
            server=self._storage(world.server, machines.server_cache),
            client_kept=self._kept(machines, "keep here"),
            server_kept=self._kept(machines, "keep there"),
            codecs=tuple(map(self._at_rest, known)),
            wire_codecs=known,
            samples=world.job.samples,
        )

    def _at_rest(self, at: CutCodecs) -> CutCodecs:
        """Return the codecs at a cut; the one of what is kept already, if that is more than half."""
        cache = None if self._machines is None else self._machines.client_cache
        if cache is None or cache.share(at.cut) <= _SETTLED:
            return at
        ratio = cache.mean_ratio(at.cut)
        found = min((RAW, *at.codecs), key=lambda codec: abs(codec.ratio - ratio))
        return CutCodecs(cut=at.cut, codecs=() if found == RAW else (found,), or_raw=found == RAW)

    def _storage(self, side: SideCache | None, cache: CacheAtWork | None) -> Storage | None:
        if side is None or cache is None:
            return None
        # Both sides probe the disk, whose fast part answers, before there is anything else to go by.
        used = DiskRates(cache.reading.rate, cache.rate.rate)
        return Storage(
            bytes=side.budget,
            memory_bytes=side.memory_bytes,
            read=used.read or side.disk.read,
            write=used.write or side.disk.write,
        )

    def _kept(self, machines: Machines, mode: Mode) -> tuple[KeptShare, ...]:
        """Shares that are kept by the present choice."""
        plan = self._chooser.plan
        if plan is None or plan.mode == "recompute" or (plan.mode == "keep there") != (mode == "keep there"):
            return ()
        share = kept_share(machines, plan.choice)
        return (KeptShare(cut=plan.cut, share=share),) if share else ()


def estimated(at: CutCodecs) -> CutCodecs:
    """Return the codecs of a cut as a small sample tells them: off by chance, and always in the same way."""
    off = random.Random(at.cut)

    def figure(true: float, error: float) -> float:
        """Return a figure that is off by at most ``error``."""
        return true * (1 + off.uniform(-error, error))

    found = (
        replace(
            codec,
            ratio=max(1.0, figure(codec.ratio, RATIO_ERROR)),
            encode=figure(codec.encode, RATE_ERROR),
            decode=figure(codec.decode, RATE_ERROR),
        )
        for codec in at.codecs
    )
    return replace(at, codecs=tuple(found))


def every_choice(world: World, codecs: tuple[CutCodecs, ...]) -> Iterator[Choice]:
    """Yield all modes, cuts, splits and codecs there are, without leaving anything out but batches that alternate."""
    table: dict[int, tuple[CodecCost, ...]] = {at.cut: (RAW, *at.codecs) for at in codecs}
    last = world.profile.last_split
    if world.client is not None:
        yield Choice(mode="keep samples", cut=0, crossing=Crossing(split=0))
    for split in range(last + 1):
        wires = table.get(split, (RAW,)) if split else (RAW,)
        for wire in wires:
            crossing = Crossing(split=split, wire=wire)
            yield Choice(mode="recompute", cut=0, crossing=crossing)
            if world.server is not None and split:
                yield Choice(mode="keep there", cut=split, crossing=crossing, codec=wire)
            if world.client is not None:
                for cut in range(max(1, split), last + 1):
                    for codec in table.get(cut, (RAW,)):
                        yield Choice(mode="keep here", cut=cut, crossing=crossing, codec=codec)


def _job_bounds(world: World, every: Sequence[Choice]) -> list[float]:
    later = (epoch_bound(world, choice, _most_kept(world, choice)) for choice in every)
    first = (epoch_bound(world, choice, 0.0) for choice in every)
    return [one + (world.job.epochs - 1) * other for one, other in zip(first, later, strict=True)]


def alternations(world: World, every: Sequence[Choice], below: float) -> list[tuple[float, Choice]]:
    """Return the :data:`PAIRS` pairs of choices with the lowest bounds, and these; of each pair at its best share.

    Both keep the same, so that their batches can alternate.

    Args:
        world: the truth.
        every: choices of one split.
        below: seconds of a job that nobody wants to know if it takes longer.
    """
    groups: dict[tuple[Mode, int, CodecCost], list[Choice]] = {}
    for choice in every:
        if choice.mode in ("recompute", "keep here"):
            groups.setdefault((choice.mode, choice.cut, choice.codec), []).append(choice)
    steps = np.arange(1, STEPS)[:, None, None] / STEPS
    found: list[tuple[float, Choice]] = []
    for choices in groups.values():
        share = _most_kept(world, choices[0])
        epochs = [np.array([busy(world, choice, kept) for choice in choices]) for kept in (0.0, share)]
        for number, choice in enumerate(choices[1:], 1):
            first, later = (
                ((1 - steps) * work[number] + steps * work[None, :number]).max(axis=2) for work in epochs
            )
            bounds = world.job.samples * (first + (world.job.epochs - 1) * later)
            best = bounds.argmin(axis=0)
            found += [
                (float(bounds[step, at]), _both(choice, choices[at], float(steps[step, 0, 0])))
                for at, step in enumerate(best.tolist())
                if bounds[step, at] < below and choices[at].crossing.split != choice.crossing.split
            ]
        found = heapq.nsmallest(PAIRS, found, key=lambda one: one[0])
    return found


def _both(one: Choice, other: Choice, share: float) -> Choice:
    """``one`` with this share of its batches as ``other`` has them."""
    if share > 0.5:
        one, other, share = other, one, 1 - share
    at, also = one.crossing, other.crossing
    alternation = Alternation(split=at.split, other=also.split, share=share)
    return replace(one, crossing=replace(at, alternation=alternation, other_wire=also.wire))


def best_of(world: World, codecs: tuple[CutCodecs, ...], known: float) -> tuple[float, Choice | None, int]:
    """Return the seconds of the best choice, the choice, and how many were replayed.

    What is bound to take longer than the best that is known, but for :data:`ENOUGH`, is not replayed; so the best is
    that of all choices to within this part.

    Args:
        world: the truth.
        codecs: that may be used.
        known: seconds of a choice that was replayed already.
    """
    every = list(every_choice(world, codecs))
    bounds = list(zip(_job_bounds(world, every), every, strict=True))
    if world.job.alternate:
        bounds += alternations(world, every, known * (1 - ENOUGH))
    bounds.sort(key=lambda one: one[0])
    best, found, replayed = known, None, 0
    for bound, choice in bounds:
        if bound >= best * (1 - ENOUGH):
            break
        replayed += 1
        seconds = replay(
            world,
            lambda machines, epoch, c=choice: c,  # type: ignore[misc]
            limit=best * (1 - ENOUGH),
            bound=lambda c: epoch_bound(world, c, _most_kept(world, c)),
        ).seconds
        if seconds < best:
            best, found = seconds, choice
    return best if math.isfinite(best) else known, found, replayed


def _most_kept(world: World, choice: Choice) -> float:
    """Largest share of the samples for which there is room."""
    side = world.server if choice.mode == "keep there" else world.client
    if choice.mode == "recompute" or side is None:
        return 0.0
    stored = world.profile.sent_bytes(choice.cut) / choice.codec.ratio
    return min(1.0, side.budget / (world.job.samples * stored))
