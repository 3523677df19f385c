"""``hapi plan MODEL``: the cost of every split, and the choice of each strategy. No server is needed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hapi import units
from hapi.cli.planning import offload as plan_offload
from hapi.cli.planning import reuse as plan_reuse
from hapi.cli.planning.flags import BANDWIDTH, LOOPBACK, STORED, USUAL_JOB
from hapi.cli.planning.flags import configure as configure
from hapi.cli.planning.reuse import print_table
from hapi.errors import ConfigError, UsageError
from hapi.figures.canvas import check_suffix
from hapi.figures.plan import plan_figure
from hapi.models.zoo.names import check_model
from hapi.paths import check_outputs
from hapi.profiler import machine_cache as cache
from hapi.profiler.cost import Estimate, estimate
from hapi.profiler.offload_costs import PricedOffload
from hapi.profiler.profile import PROFILE_VERSION, Job, Profile
from hapi.profiler.reuse.choose import choose_reuse
from hapi.profiler.reuse.over_epochs import courses
from hapi.profiler.stages.alternation import Alternation
from hapi.profiler.stages.pipeline import Form
from hapi.profiler.strategies import (
    PLANNERS,
    Candidate,
    Plan,
    alternation_of,
    choices,
    plan,
    seconds_at,
)
from hapi.text import counted

_KIND = "plan"
_MEASURE_FORM = 2
"""Version of the way in which layers are measured and sized."""
_ANSWER_SECONDS = 3.4
"""Seconds from the command's beginning at which timing layers ends; sizing the layers is still to come."""
_MEASURE_SECONDS, _LEAST_SECONDS = 0.8, 0.2
"""Seconds for timing layers."""
_COLUMNS = (
    "SPLIT",
    "LAYER",
    "SERVER",
    "NETWORK",
    "CLIENT",
    "WIRE/BATCH",
    "MEMORY",
    "EPOCH",
    "PAPER'S FORM",
    "",
)


def run(args: argparse.Namespace) -> int:
    """Print the candidates and the choice of each strategy."""
    if args.named is not None:
        if args.model is not None:
            raise UsageError(
                f"--model {args.named}: a model is given already, {args.model}; give one of them"
            )
        args.model = args.named
    if args.strategy not in PLANNERS:
        raise UsageError(f"--strategy {args.strategy!r}: known are {', '.join(PLANNERS)}")
    if args.figure is not None:
        check_suffix(args.figure)
    check_outputs(
        (("--save-profile", args.save_profile), ("--figure", args.figure)), [("--profile", args.profile)]
    )
    terms = plan_reuse.terms_of(args)
    job = _job(args)  # before measuring, so that a wrong flag is told at once
    profile = _what_if(_own(args) if args.profile is None else _replayed(args), args)
    if args.save_profile is not None:
        profile.save(args.save_profile)
    priced = plan_offload.price_of(args, profile, job, terms.disk)
    profile = priced.profile
    found = plan(args.strategy, profile, job)
    chosen = {
        name: None if split is None else found.candidates[split]
        for name, split in choices(profile, job).items()
    }
    alternation = alternation_of(profile, job, tuple(c.estimate.split for c in found.candidates if c.fits))
    forms = _forms(profile, job)
    facts, prices, objective = terms.facts, terms.prices, terms.objective
    reuse = choose_reuse(profile, job, facts, prices=prices, objective=objective)
    if args.figure is not None:
        over_epochs = courses(profile, job, facts, prices, objective)
        plan_figure(found, profile, job, args.figure, courses=over_epochs, kept=reuse.mode)
    if args.json:
        document = _document(found, chosen, forms, profile, job)
        document["alternation"] = None if alternation is None else dataclasses.asdict(alternation)
        document["offload"] = plan_offload.document_of(found, priced, job)
        document["reuse"] = plan_reuse.document_of(reuse, prices)
        print(json.dumps(document, indent=1))
    else:
        _print(found, chosen, forms, priced, job)
        if alternation is not None:
            _print_alternation(profile, job, alternation)
        plan_reuse.print_reuse(reuse, job, prices)
        for note in profile.notes:
            print(note)
    return 0


def _job(args: argparse.Namespace) -> Job:
    own = None if args.profile is None else Job.load(args.profile)
    asked = {name: getattr(args, name) for name in ("bs", "samples", "epochs", "request_size", "micro_batch")}
    asked["memory_bytes"] = args.memory
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(own or USUAL_JOB, **given)


def _replayed(args: argparse.Namespace) -> Profile:
    profile = Profile.load(args.profile)
    if args.model is not None and args.model != profile.model:
        raise UsageError(f"--profile {args.profile} is of {profile.model!r}, not of {args.model!r}")
    flags = (
        ("--freeze", args.freeze),
        ("--blocks", args.blocks),
        ("--frozen-precision", args.frozen_precision),
    )
    for flag, value in flags:
        if value is not None:
            raise UsageError(f"{flag} is part of the profile; leave it out, or measure without --profile")
    return profile


def _own(args: argparse.Namespace) -> Profile:
    """This machine's profile of the model: the one that is kept, or measured now and kept."""
    started = time.monotonic()
    if args.model is None:
        raise UsageError("give a MODEL, such as resnet50, or a --profile FILE")
    check_model(args.model)
    key = _key(args)
    kept = None if args.remeasure or key is None else cache.load(_KIND, key)
    if kept is not None:
        with contextlib.suppress(ConfigError):
            return _noted(Profile.from_json(kept.content), f"kept in {kept.path}; --remeasure measures again")
    with _without_collections():
        profile = _measured(args, started)
    problem = "" if key is None else cache.save(_KIND, key, profile.to_json())
    return _noted(profile, problem) if problem else profile


def _key(args: argparse.Namespace) -> tuple[str, ...] | None:
    """Facts that a kept profile depends on; None for a user's own model, whose code may change at any time."""
    if ":" in args.model and not args.model.startswith("timm:"):
        return None
    names = ("model", "input_size", "blocks", "freeze", "frozen_precision", "device")
    form = (f"profile={PROFILE_VERSION}", f"measure={_MEASURE_FORM}")
    return (*cache.identity(), *form, *(f"{name}={getattr(args, name)}" for name in names))


def _noted(profile: Profile, note: str) -> Profile:
    return replace(profile, notes=(*profile.notes, note))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Python's garbage collector stands still: nearly everything made here stays, and looking at it takes 0.3 s."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _measured(args: argparse.Namespace, started: float) -> Profile:
    # Torch is imported only where it measures: a replay answers at once.
    from hapi.cli.models.push import spec_of
    from hapi.models.devices import resolve_device, set_arithmetic
    from hapi.models.graph.precision import check_kernels, in_precision
    from hapi.models.zoo.build import structure
    from hapi.models.zoo.freeze import choose_freeze
    from hapi.profiler.machine import constants
    from hapi.profiler.measure import Conditions, measure

    device = resolve_device(args.device, "--device")
    set_arithmetic(device)
    model = structure(spec_of(args, "random:0"), allow_import=True)
    freeze = choose_freeze(model, args.freeze)
    last = model.last_split(freeze)
    model = in_precision(model, args.frozen_precision or "fp32", device, last)
    check_kernels(model, 0, last, device)
    machine = constants(device, args.input_size, remeasure=args.remeasure)
    stored = units.parse_bytes(STORED)
    conditions = Conditions(stored_bytes=stored, bits_per_second=units.parse_bandwidth(BANDWIDTH))
    left = _ANSWER_SECONDS - (time.monotonic() - started)
    budget = min(_MEASURE_SECONDS, max(_LEAST_SECONDS, left))
    return measure(model, args.model, freeze, conditions, machine=machine, device=device, budget=budget)


def _what_if(profile: Profile, args: argparse.Namespace) -> Profile:
    """The profile as the flags would have it."""
    if args.one_machine:
        if args.server_speed is not None:
            raise UsageError(
                "--server-speed: with --one-machine both tiers are as fast; leave one of them out"
            )
        rate = profile.link.bits_per_second if profile.one_machine else units.parse_bandwidth(LOOPBACK)
        link = replace(profile.link, bits_per_second=rate)
        profile = replace(profile, one_machine=True, link=link)
    if args.bandwidth is not None:
        profile = replace(profile, link=replace(profile.link, bits_per_second=args.bandwidth))
    if args.stored_bytes is not None:
        profile = _stored_as(profile, args.stored_bytes or None)
    if args.server_speed is None:
        return profile
    speed = args.server_speed
    tier = profile.server_tier
    return replace(
        profile,
        layers=tuple(replace(x, server_seconds=x.server_seconds / speed) for x in profile.layers),
        server_tier=replace(
            tier,
            decode_seconds=tier.decode_seconds / speed,
            codec_seconds_per_byte=tier.codec_seconds_per_byte / speed,
            overhead_seconds=tier.overhead_seconds / speed,
        ),
    )


def _stored_as(profile: Profile, stored: int | None) -> Profile:
    old = profile.samples
    if stored is not None and not old.encoded:
        raise UsageError(
            "--stored-bytes: the profile is of stored tensors and knows no decoding; measure anew"
        )
    size = old.tensor_bytes if stored is None else stored
    samples = replace(old, stored_bytes=size, encoded=stored is not None)
    read = profile.server.read_seconds * size / max(1, old.stored_bytes)
    profile = replace(profile, samples=samples, server=replace(profile.server, read_seconds=read))
    if stored is not None:
        return profile
    return replace(
        profile,
        server_tier=replace(profile.server_tier, decode_seconds=0.0),
        client_tier=replace(profile.client_tier, decode_seconds=0.0),
    )


def _forms(profile: Profile, job: Job) -> list[Estimate]:
    """Split 0 in the other forms in which samples could be sent, to compare with."""
    names: tuple[Form, ...] = ("uint8", "tensor") if profile.samples.encoded else ()
    return [estimate(profile, job, 0, form) for form in names]


def _document(
    found: Plan, chosen: dict[str, Candidate | None], forms: list[Estimate], profile: Profile, job: Job
) -> dict[str, Any]:
    return {
        "model": profile.model,
        "strategy": found.strategy,
        "split": found.split,
        "freeze": profile.freeze,
        "job": dataclasses.asdict(job),
        "bits_per_second": profile.link.bits_per_second,
        "candidates": [dataclasses.asdict(c) for c in found.candidates],
        "not_split_in_other_forms": [dataclasses.asdict(e) for e in forms],
        "strategies": {name: c.estimate.split if c else None for name, c in chosen.items()},
        "notes": list(profile.notes),
    }


def _print(
    found: Plan, chosen: dict[str, Candidate | None], forms: list[Estimate], priced: PricedOffload, job: Job
) -> None:
    profile, offloaded = priced.profile, plan_offload.candidates(found, priced, job)
    bandwidth = units.format_bandwidth(profile.link.bits_per_second)
    print(
        f"{profile.model}: freeze {profile.freeze}, training batch {job.bs}, "
        f"{counted(job.samples, 'sample')} an epoch, {bandwidth}"
        f"{', both tiers on one machine' if profile.one_machine else ''}; seconds of each stage are for "
        "one training batch"
    )
    rows: list[Sequence[str]] = [_COLUMNS]
    for candidate in found.candidates:
        verdict = candidate.rejected or f"<- {found.strategy}"
        if not candidate.fits and not candidate.rejected:
            verdict += ", but does not fit the memory"
        if candidate.estimate.split in offloaded and candidate.rejected:
            verdict = plan_offload.verdict(offloaded[candidate.estimate.split])
        rows.append(_row(candidate.estimate, candidate.name or "(stored samples)", verdict))
    rows += [_row(e, f"(as {e.sent}s)" if e.sent == "tensor" else "(as uint8)", "to compare") for e in forms]
    print_table(rows, left=(1, len(_COLUMNS) - 1))
    print()
    plan_offload.print_offload(found, priced, job)
    print(f"choice of each strategy (epoch, {counted(job.epochs, 'epoch')}):")
    for name, candidate_or_none in chosen.items():
        print(f"  {name:<9} {_summary(candidate_or_none, job)}")
    print()


def _print_alternation(profile: Profile, job: Job, at: Alternation) -> None:
    seconds = seconds_at(profile, job, at)
    print(
        f"with auto batches alternate: split {at.split}, {at.text}: {units.format_duration(seconds)}, "
        f"{units.format_duration(seconds * job.epochs)}\n"
    )


def _row(e: Estimate, layer: str, verdict: str) -> tuple[str, ...]:
    return (
        str(e.split),
        layer,
        units.format_duration(e.stages.server),
        units.format_duration(e.stages.network),
        units.format_duration(e.stages.client),
        units.format_bytes(e.wire_bytes),
        units.format_bytes(e.memory.peak),
        units.format_duration(e.epoch_seconds),
        units.format_duration(e.paper_epoch_seconds),
        verdict,
    )


def _summary(candidate: Candidate | None, job: Job) -> str:
    if candidate is None:
        return "nothing fits the memory"
    e = candidate.estimate
    name = f" ({candidate.name})" if candidate.name else ""
    seconds = units.format_duration(e.epoch_seconds)
    whole = units.format_duration(e.epoch_seconds * job.epochs)
    return f"split {e.split}{name}: {seconds}, {whole}" + (
        "" if candidate.fits else "; does not fit the memory"
    )
