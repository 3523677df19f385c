"""The HTML report of a run: one file that loads nothing and is readable without script.

Every text from a report is escaped where it enters the page (:func:`hapi.figures.markup.escaped`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hapi.figures.findings import findings
from hapi.figures.kept import kept_features
from hapi.figures.markup import decimal, escaped, figure, percent, section, table
from hapi.figures.offload import offload_part
from hapi.figures.plan import layers_svg, stages_svg
from hapi.figures.reading import Epoch, PlanPart, Run
from hapi.figures.reuse import reuse_choice
from hapi.figures.run import epochs_svg, learning_svg, timeline_svg
from hapi.figures.style import STYLE
from hapi.figures.words import bottleneck, layer, state, summary
from hapi.paths import write_whole
from hapi.profiler.profile import PROFILE_VERSION, Profile
from hapi.profiler.strategies import Candidate
from hapi.text import counted
from hapi.units import format_bandwidth, format_bytes, format_count, format_duration

_WIDE = 60
"""Layers from which a figure gets more room than a page, and is scrolled."""


def write_html(run: Run, path: str) -> None:
    """Write the page of ``run``, whole or not at all; :class:`UsageError` when that fails."""
    write_whole(path, page(run), "--html")


def page(run: Run) -> str:
    """Return the whole document."""
    title = f"{run.model} on {run.dataset}"
    parts = [_head(run, title), _epochs(run.epochs), kept_features(run.kept), _learning(run.epochs)]
    parts += [offload_part(run.offload), findings(run.details)]
    if run.plan is not None:
        parts += [reuse_choice(run.plan.reuse), _choice(run.plan), _layers(run.plan), _changes(run.plan)]
    parts += [_timeline(run), _memory(run), _conditions(run)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n'
        f"<title>{escaped(title)} – Hapi</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def _head(run: Run, title: str) -> str:
    sentences = summary(run)
    last = run.epochs[-1] if run.epochs else None
    found = bottleneck(run)
    tiles = [
        ("split", f"{run.split} of {run.layers}"),
        ("freeze", str(run.freeze)),
        ("run", format_duration(run.seconds)),
        ("bottleneck", "–" if found is None else f"{found[0]}, {found[1]:.0%}"),
        ("received", format_bytes(sum(e.received for e in run.epochs))),
        ("final loss", decimal(last.loss if last else None)),
        ("accuracy", percent(last.accuracy if last else None)),
        ("peak memory", format_bytes(run.peak_memory)),
    ]
    cells = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in tiles)
    return (
        f'<header><h1>{escaped(title)}</h1>\n<p class="sub">{escaped(state(run))}, batch {run.batch_size}, '
        f"strategy {escaped(run.strategy or 'fixed split')}, Hapi report of a run</p></header>\n"
        f'<section aria-label="Summary"><p class="lead"><strong>{escaped(sentences[0])}</strong></p>\n'
        f"<p>{escaped(' '.join(sentences[1:]))}</p>\n"
        f'<dl class="tiles">{cells}</dl></section>'
    )


def _epochs(epochs: Sequence[Epoch]) -> str:
    if not epochs:
        return section("Epochs", "<p>No epoch was completed.</p>")
    caption = (
        "Stages run at the same time, so an epoch (line) may take less than their sum. Stall is the time in which "
        "training waited for data."
    )
    rows = [
        (
            str(e.number),
            ", ".join(f"{split} ({counted(n, 'batch')})" for split, n in e.splits) or str(e.split),
            format_duration(e.seconds),
            "–" if e.estimated is None else format_duration(e.estimated),
            format_duration(e.server),
            format_duration(e.network),
            format_duration(e.client),
            format_duration(e.stall),
            format_bytes(e.received),
            f"{e.samples / e.seconds:.0f}" if e.seconds > 0 else "–",
        )
        for e in epochs
    ]
    head = (
        "Epoch",
        "Split",
        "Seconds",
        "Estimated",
        "Server",
        "Network",
        "Client",
        "Stall",
        "Received",
        "Samples/s",
    )
    measured = table("Measured seconds and bytes of each epoch", head, rows)
    return section("Where the time went", figure(epochs_svg(epochs), caption) + measured)


def _learning(epochs: Sequence[Epoch]) -> str:
    if not epochs:
        return ""
    rows: list[tuple[str, ...]] = [
        (
            str(e.number),
            decimal(e.loss),
            percent(e.accuracy),
            decimal(e.validation_loss),
            percent(e.validation_accuracy),
        )
        for e in epochs
    ]
    head: tuple[str, ...] = ("Epoch", "Loss", "Accuracy", "Validation loss", "Validation accuracy")
    if all(e.validation_loss is None and e.validation_accuracy is None for e in epochs):
        head, rows = head[:3], [row[:3] for row in rows]
    others = tuple(dict.fromkeys(name for e in epochs for name, _ in e.metrics))
    head += tuple(f"Validation {name}" for name in others)
    rows = [
        (*row, *(decimal(dict(e.metrics).get(n)) for n in others))
        for row, e in zip(rows, epochs, strict=True)
    ]
    lost = (
        ""
        if all(e.loss is not None for e in epochs)
        else "<p>A loss that was not a number is shown as –.</p>"
    )
    return section(
        "Loss and accuracy", figure(learning_svg(epochs), "") + lost + table("Per epoch", head, rows)
    )


def _choice(plan: PlanPart) -> str:
    if plan.profile is None:
        return section("The choice of the split", f"<p>{escaped(_why_no_plan(plan))}</p>")
    profile, job = plan.profile, plan.job
    drawing = stages_svg(plan.candidates, plan.split, profile, job)
    caption = (
        f"Estimated for a training batch of {job.bs} over {format_bandwidth(profile.link.bits_per_second)}. Bars are "
        "the stages; the line is what a batch takes when they overlap. Hatched splits do not fit the memory."
    )
    head = (
        "Split",
        "Layer",
        "Server",
        "Network",
        "Client",
        "Bytes/batch",
        "Memory",
        "Epoch",
        "Paper’s form",
        "",
    )
    rows = [_candidate(c, plan.strategy, plan.split) for c in plan.candidates]
    classes = [
        "chosen" if c.estimate.split == plan.split else "" if c.fits else "unfit" for c in plan.candidates
    ]
    measured = table(
        "Every split that was considered; stages in seconds of one batch", head, rows, classes, {1, 9}
    )
    others = [
        (name, "nothing fits" if split is None else str(split), _strategy_seconds(plan, split))
        for name, split in plan.strategies
    ]
    other = table(
        "What each strategy would choose", ("Strategy", "Split", "Estimated epoch"), others, left={0}
    )
    notes = "".join(f"<p>{escaped(note)}</p>" for note in profile.notes[:20])
    return section(
        "The choice of the split",
        figure(drawing, caption, wide=len(plan.candidates) > _WIDE)
        + measured
        + (other if others else "")
        + notes,
    )


def _why_no_plan(plan: PlanPart) -> str:
    if plan.other_version is None:
        return "The run ended while it was being profiled; there is no plan."
    return (
        f"The plan is in a form of another version of Hapi ({plan.other_version}, this one reads {PROFILE_VERSION}) "
        "and is not shown; the version that made the report can draw it."
    )


def _strategy_seconds(plan: PlanPart, split: int | None) -> str:
    if split is None or split >= len(plan.candidates):
        return "–"
    return format_duration(plan.candidates[split].estimate.epoch_seconds)


def _candidate(candidate: Candidate, strategy: str, split: int) -> tuple[str, ...]:
    e = candidate.estimate
    verdict = f"chosen by {strategy}" if e.split == split else candidate.rejected
    if not candidate.fits and e.split == split:
        verdict += "; does not fit the memory"
    return (
        str(e.split),
        candidate.name or "(stored samples)",
        format_duration(e.stages.server),
        format_duration(e.stages.network),
        format_duration(e.stages.client),
        format_bytes(e.wire_bytes),
        format_bytes(e.memory.peak),
        format_duration(e.epoch_seconds),
        format_duration(e.paper_epoch_seconds),
        verdict,
    )


def _layers(plan: PlanPart) -> str:
    profile = plan.profile
    if profile is None:
        return ""
    caption = (
        "Per sample, as measured in this run. Layers that put out less than the stored size save network."
    )
    drawing = figure(layers_svg(profile, plan.split), caption, wide=len(profile.layers) > _WIDE)
    return section("Layers", drawing + _layer_table(profile))


def _layer_table(profile: Profile) -> str:
    rows = [
        (
            str(number),
            x.name,
            format_bytes(x.output_bytes),
            format_duration(x.server_seconds),
            format_duration(x.client_seconds),
            format_bytes(x.working_bytes),
            format_bytes(x.parameter_bytes),
            format_count(x.flops),
        )
        for number, x in enumerate(profile.layers, 1)
    ]
    head = ("Layer", "Name", "Output", "Server", "Client", "Live tensors", "Weights", "Operations")
    measured = table("Per sample, weights per layer", head, rows, left={1})
    return f"<details><summary>All {len(rows)} layers as a table</summary>{measured}</details>"


def _changes(plan: PlanPart) -> str:
    if not plan.changes:
        return section("Changes of the split", "<p>The split never changed.</p>")
    rows = [(str(c.epoch), str(c.batch), str(c.before), str(c.after), c.why) for c in plan.changes]
    head = ("Epoch", "Batch", "From", "To", "Why")
    return section("Changes of the split", table("When the split changed, and why", head, rows, left={4}))


def _timeline(run: Run) -> str:
    if not run.timeline:
        return ""
    batch = "" if run.timeline_batch is None else f" Batch {run.timeline_batch}."
    caption = (
        f"Seconds since the batch’s first request.{batch} In gaps a stage waits, or works on other batches."
    )
    totals: dict[tuple[str, str], float] = {}
    for span in run.timeline:
        key = (span.stage, span.name)
        totals[key] = totals.get(key, 0.0) + span.end - span.start
    rows = [(stage, name, format_duration(seconds)) for (stage, name), seconds in totals.items()]
    measured = table("Its parts", ("Stage", "What", "In all"), rows, left={0, 1})
    return section("One training batch in time", figure(timeline_svg(run.timeline), caption) + measured)


def _memory(run: Run) -> str:
    plan = run.plan
    rows = [("process, at its peak", format_bytes(run.peak_memory))]
    if plan is not None:
        if plan.predicted_memory is not None:
            rows.append(("training, as predicted", format_bytes(plan.predicted_memory)))
        if plan.observed_memory is not None:
            rows.append(("training, as observed", format_bytes(plan.observed_memory)))
        if plan.job.memory_bytes is not None:
            rows.append(("budget", format_bytes(plan.job.memory_bytes)))
    return section("Memory of the client", table("Bytes", ("What", "Size"), rows, left={0}))


def _conditions(run: Run) -> str:
    facts = [*run.facts, ("freeze", layer(run.freeze, run.freeze_name).replace("split ", "", 1))]
    facts.append(("retries", str(run.retries)))
    body = table("Conditions and versions", ("What", "Value"), facts, left={0, 1}, long={1})
    if run.settings:
        body += table("Settings", ("Setting", "Value"), run.settings, left={0, 1}, long={1})
    return section("Conditions and settings", f'<div class="columns">{body}</div>')
