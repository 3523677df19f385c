"""The part of ``hapi plan`` about memory: the optimiser's states elsewhere, at which price."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from hapi.profiler.cost import Estimate, memory
from hapi.profiler.offload_costs import (
    STATES,
    OffloadName,
    OffloadTerms,
    PricedOffload,
    fitting_elsewhere,
    price_offload,
)
from hapi.profiler.profile import MAX_PROFILE_BYTES, Job, Profile
from hapi.profiler.reading import load_document
from hapi.profiler.strategies import Plan
from hapi.units import format_bytes, format_duration

_WITH_MOMENTUM = {"sgd": "sgd with momentum"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags about offloading."""
    parser.add_argument(
        "--offload",
        choices=get_args(OffloadName),
        default="auto",
        help="place of the optimiser's states, as for hapi-train; auto takes a disk where no split fits --memory, or a "
        "faster one fits so (default auto)",
    )
    parser.add_argument(
        "--optimizer",
        choices=("sgd", "adam", "adamw"),
        help="optimiser of the trained layers, sgd with momentum (default sgd, or the profile's run's)",
    )


def price_of(
    args: argparse.Namespace, profile: Profile, job: Job, rates: tuple[float, float]
) -> PricedOffload:
    """Choose the place of the states as a run would, and price it.

    Args:
        args: the command's.
        profile: measurements.
        job: the training.
        rates: bytes a second that the disk reads and writes.
    """
    states, profile = _optimizer(args, replace(profile, offloaded_bytes=0))
    return price_offload(profile, job, OffloadTerms(wanted=args.offload, states=states), lambda: rates)


def candidates(found: Plan, priced: PricedOffload, job: Job) -> dict[int, Estimate]:
    """Return the estimates with offloading of those splits that fit the memory only so."""
    if priced.choice.where != "off" or priced.elsewhere is priced.in_memory:
        return {}
    unfit = (c.estimate.split for c in found.candidates if not c.fits)
    return {e.split: e for e in fitting_elsewhere(priced.elsewhere, job, unfit)}


def _optimizer(args: argparse.Namespace, profile: Profile) -> tuple[int, Profile]:
    """Tensors that the optimiser keeps, and the profile with all of them in memory."""
    if args.optimizer is not None:
        states = STATES[_WITH_MOMENTUM.get(args.optimizer, args.optimizer)]
        return states, replace(profile, optimizer_bytes_per_parameter_byte=float(states))
    run = None if args.profile is None else _states_of(args.profile)
    return max(0, min(2, int(profile.optimizer_bytes_per_parameter_byte))) if run is None else run, profile


def _states_of(path: str) -> int | None:
    """States of the optimiser in a run's report; None for a profile, and for an optimiser that has to be in memory."""
    document = load_document(path, MAX_PROFILE_BYTES, "give a report of hapi-train, or a profile")
    settings = document.get("settings") if isinstance(document, Mapping) else None
    if not isinstance(settings, Mapping):
        return None
    name = settings.get("optimizer")
    if name == "sgd" and settings.get("momentum"):
        name = _WITH_MOMENTUM[name]
    return STATES.get(name) if isinstance(name, str) else None


def verdict(with_offload: Estimate) -> str:
    """Say in the table that a split fits with offloading."""
    return (
        f"does not fit the memory; with offload {format_bytes(with_offload.memory.peak)}, "
        f"epoch {format_duration(with_offload.epoch_seconds)}"
    )


def print_offload(found: Plan, priced: PricedOffload, job: Job) -> None:
    """Print where the states go, why, what it costs and what would make it free; nothing where it is no question."""
    lines = list(_lines(found, priced, job))
    if lines:
        print("\n".join((*lines, "")))


def _lines(found: Plan, priced: PricedOffload, job: Job) -> list[str]:
    choice, others = priced.choice, candidates(found, priced, job)
    room = "no bound" if job.memory_bytes is None else format_bytes(job.memory_bytes)
    states = f"parameters, gradients and states of {format_bytes(choice.costs.memory_without)}"
    if choice.where == "off" and not others:
        return []
    if choice.where == "off":
        lines = [f"offload: not needed; {len(others)} more splits fit {room} with the states on a disk:"]
    elif choice.faster is not None:
        lines = [f"offload: to the {choice.where}, {choice.faster}"]
    elif choice.is_needed:
        lines = [f"offload: to the {choice.where}, no split fits {room} with its {states}"]
    else:
        freed = (
            f"{format_bytes(choice.freed)} of {states}" if choice.freed else "no memory that a CPU trains in"
        )
        lines = [f"offload: to the {choice.where}, asked for; it frees {freed}"]
    if priced.price is not None:
        lines.append(f"  {priced.price}{_room_of_batch(found, priced, job)}")
    if choice.fitting_freeze is not None:
        lines.append(f"  --freeze {choice.fitting_freeze} would fit without")
    return lines


def _room_of_batch(found: Plan, priced: PricedOffload, job: Job) -> str:
    """Say how much memory the batch takes that would hide the price, where that is more than there is."""
    batch = None if priced.price is None or not priced.price.added_seconds else priced.price.free_batch
    if batch is None or job.memory_bytes is None:
        return ""
    peak = memory(priced.elsewhere, replace(job, bs=batch), found.split).peak
    return f", which takes {format_bytes(peak)} of memory" if peak > job.memory_bytes else ""


def document_of(found: Plan, priced: PricedOffload, job: Job) -> dict[str, Any]:
    """Return the choice, its price and the candidates that need it, as JSON."""
    choice, price = priced.choice, priced.price
    document: dict[str, Any] = {
        "where": choice.where,
        "needed": choice.is_needed,
        "freed_bytes": choice.freed,
        "fitting_freeze": choice.fitting_freeze,
        "candidates": [
            {"split": split, "memory": e.memory.peak, "epoch_seconds": e.epoch_seconds}
            for split, e in candidates(found, priced, job).items()
        ],
    }
    if price is not None:
        document["price"] = {
            "bytes_read": price.costs.read,
            "bytes_written": price.costs.written,
            "disk_bytes": price.costs.disk_bytes,
            "read_rate": price.read_rate,
            "write_rate": price.write_rate,
            "transfer_seconds": price.transfer_seconds,
            "step_seconds": price.step_seconds,
            "added_seconds": price.added_seconds,
            "free_batch": price.free_batch,
            "free_freeze": price.free_freeze,
        }
    return document
