"""The part of ``hapi plan`` about memory: the optimiser's states elsewhere, at which price."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from hapi.profiler.cost import Estimate, estimate, memory
from hapi.profiler.offload_costs import (
    STATES,
    OffloadChoice,
    OffloadName,
    OffloadPrice,
    OffloadTerms,
    choose_offload,
    offloaded,
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
        help="place of the optimiser's states, as for hapi-train; auto takes a disk only where no split fits --memory "
        "(default auto)",
    )
    parser.add_argument(
        "--optimizer",
        choices=("sgd", "adam", "adamw"),
        help="optimiser of the trained layers, sgd with momentum (default sgd, or the profile's run's)",
    )


@dataclass(frozen=True, kw_only=True)
class PricedOffload:
    """The place of the states in a plan, with the profiles before and after."""

    choice: OffloadChoice
    price: OffloadPrice | None
    """None for host memory."""
    in_memory: Profile
    elsewhere: Profile

    @property
    def profile(self) -> Profile:
        """Return the profile that the plan is made from."""
        return self.in_memory if self.choice.where == "off" else self.elsewhere

    def candidates(self, found: Plan, job: Job) -> dict[int, Estimate]:
        """Return the estimates with offloading of those splits that fit the memory only so."""
        if self.choice.where != "off" or not self.elsewhere_frees:
            return {}
        unfit = (c.estimate.split for c in found.candidates if not c.fits)
        priced = (estimate(self.elsewhere, job, split) for split in unfit)
        return {e.split: e for e in priced if e.memory.peak <= (job.memory_bytes or 0)}

    @property
    def elsewhere_frees(self) -> bool:
        """Return whether less memory is needed with the states elsewhere."""
        return self.elsewhere is not self.in_memory


def price_offload(
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
    terms = OffloadTerms(wanted=args.offload, states=states)
    choice = choose_offload(profile, job, terms)
    # What no split needs may still be the faster way at an earlier one: it is priced whatever the choice.
    asked = choice if choice.where != "off" else choose_offload(profile, job, replace(terms, wanted="disk"))
    step = profile.step_seconds * min(job.bs, job.samples) + profile.update_seconds
    price = None
    if asked.where == "disk" and asked.costs.parameters:
        price = OffloadPrice(
            costs=asked.costs,
            read_rate=rates[0],
            write_rate=rates[1],
            step_seconds=step,
            batch=job.bs,
            samples=job.samples,
        )
    may_offload = args.offload != "off" and asked.freed > 0
    elsewhere = offloaded(profile, asked, price) if may_offload or choice.where != "off" else profile
    return PricedOffload(choice=choice, price=price, in_memory=profile, elsewhere=elsewhere)


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
    choice, others = priced.choice, priced.candidates(found, job)
    room = "no bound" if job.memory_bytes is None else format_bytes(job.memory_bytes)
    states = f"parameters, gradients and states of {format_bytes(choice.costs.memory_without)}"
    if choice.where == "off" and not others:
        return []
    if choice.where == "off":
        lines = [f"offload: not needed; {len(others)} more splits fit {room} with the states on a disk:"]
        best = min(others.values(), key=lambda e: e.epoch_seconds)
        if best.epoch_seconds < found.chosen.estimate.epoch_seconds:
            lines[0] = lines[0].removesuffix(":") + f", and split {best.split} is faster (--offload disk):"
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
            for split, e in priced.candidates(found, job).items()
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
        }
    return document
