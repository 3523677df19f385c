"""A run in words: its split and the reason for it, its duration, its bottleneck."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hapi.figures.reading import STAGES, Epoch, PlanPart, Run
from hapi.figures.reuse import mode_name
from hapi.text import counted
from hapi.units import format_bytes, format_duration


def state(run: Run) -> str:
    """Say how far the run came."""
    done = len(run.epochs)
    if run.epochs_asked is None or done >= run.epochs_asked:
        return counted(done, "epoch")
    how = run.ended if run.ended in ("diverged", "failed", "interrupted", "stopped early") else "stopped"
    return f"{how} after {done} of {counted(run.epochs_asked, 'epoch')}"


def layer(split: int, name: str) -> str:
    """Name a split for people."""
    return f"split {split}" + (f" ({name})" if name else "" if split else " (stored samples are sent)")


def steady(run: Run) -> tuple[Epoch, ...]:
    """Return the epochs that ran wholly at one split; all epochs if there is none."""
    return tuple(e for e in run.epochs if len(e.splits) <= 1) or run.epochs


def bottleneck(run: Run) -> tuple[str, float] | None:
    """Return the stage that took longest in the steady epochs, and its share of their time; None without
    measurements.
    """
    epochs = steady(run)
    whole = sum(e.seconds for e in epochs)
    sums = {stage: sum(getattr(e, stage) for e in epochs) for stage in STAGES}
    stage = max(sums, key=lambda name: sums[name])
    return (stage, sums[stage] / whole) if whole > 0 and sums[stage] > 0 else None


def summary(run: Run) -> list[str]:
    """Return sentences about the run, the most important first."""
    why = [f"It ended with: {run.ended_why}."] if run.ended_why else []
    offload = [] if run.offload is None else [run.offload.words]
    return [*_choice(run), *_course(run), *_estimate(run), *offload, *why]


def _choice(run: Run) -> Iterator[str]:
    where = layer(run.split, run.split_name)
    plan = run.plan
    if plan is None or run.strategy is None:
        yield f"The run used {where}, {'fixed by its settings' if run.strategy is None else run.strategy}."
    elif plan.other_version is not None:
        yield f"{plan.strategy} chose {where}."
    elif plan.profile is None:
        yield f"The run ended before {plan.strategy} had a profile to choose from; it was at {where}."
    else:
        yield from _kept_choice(plan, where) or _split_choice(plan, where, plan.profile.freeze)
        job = plan.job
        if job.memory_bytes is not None and not all(c.fits for c in plan.candidates):
            unfit = sum(not c.fits for c in plan.candidates)
            yield f"{unfit} of {len(plan.candidates)} splits do not fit the memory of {format_bytes(job.memory_bytes)}."


def _split_choice(plan: PlanPart, where: str, freeze: int) -> Iterator[str]:
    """Sentences about epochs that all cost the same."""
    chosen = plan.candidates[plan.split].estimate
    yield (
        f"{plan.strategy} chose {where}: by estimate an epoch takes {format_duration(chosen.epoch_seconds)} "
        f"there and {format_bytes(chosen.epoch_wire_bytes)} cross the network."
    )
    for words, split in (("sending the stored samples", 0), ("splitting at the freeze", freeze)):
        seconds = plan.candidates[split].estimate.epoch_seconds
        if split != plan.split and chosen.epoch_seconds > 0:
            times = seconds / chosen.epoch_seconds
            yield f"{words.capitalize()} would take {format_duration(seconds)} ({times:.2f}×)."


def _kept_choice(plan: PlanPart, where: str) -> Sequence[str]:
    """Sentences about a job whose later epochs use what is kept; none where nothing is."""
    reuse = plan.reuse
    cost = None if reuse is None or reuse.mode == "recompute" else reuse.cost_of(reuse.mode)
    if reuse is None or cost is None:
        return ()
    epochs = counted(reuse.epochs, "epoch")
    last = "" if cost.last is None else f", the last of them {format_duration(cost.last)},"
    choice = f"{plan.strategy} chose {where} and to keep {mode_name(reuse.mode)}"
    takes = f"{format_duration(cost.seconds)}{last} and {format_bytes(cost.received)} cross the network"
    found = [f"{choice}: by estimate {epochs} take {takes}."]
    nothing = reuse.cost_of("recompute")
    if nothing is not None and cost.seconds > 0:
        times = nothing.seconds / cost.seconds
        found.append(f"Keeping nothing would take {format_duration(nothing.seconds)} ({times:.2f}×).")
    return found


def _course(run: Run) -> Iterator[str]:
    if not run.epochs:
        yield "No epoch was completed, so nothing was measured over a whole one."
        return
    received = sum(e.received for e in run.epochs)
    yield f"{state(run).capitalize()} in {format_duration(run.seconds)}, {format_bytes(received)} received."
    found = bottleneck(run)
    if found is not None:
        stage, share = found
        stall = sum(e.stall for e in steady(run)) / max(sum(e.seconds for e in steady(run)), 1e-9)
        yield f"The {stage} was the bottleneck, at work {share:.0%} of the time; training waited {stall:.0%} of it."


def _estimate(run: Run) -> Iterator[str]:
    pairs = [(e.estimated, e.seconds) for e in run.epochs if e.estimated and min(e.estimated, e.seconds) > 0]
    if pairs:
        guessed, real = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
        word = "longer" if real >= guessed else "shorter"
        yield (
            f"Measured epochs took {format_duration(real)} on average, {abs(real / guessed - 1):.0%} {word} than "
            f"estimated ({format_duration(guessed)})."
        )
