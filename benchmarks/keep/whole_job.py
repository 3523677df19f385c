"""Whole jobs in simulated time, by one choice or by one that is made anew in each epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.keep.epochs import Epoch, alone
from benchmarks.keep.machines import Machines, SideCache
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choice import Choice
from hapi.profiler.reuse.facts import RAW


@dataclass(frozen=True, kw_only=True)
class World:
    """One job and the machines that it runs on."""

    profile: Profile
    job: Job
    client: SideCache | None
    server: SideCache | None


@dataclass(frozen=True, kw_only=True)
class JobFound:
    """Facts of a job that was replayed."""

    seconds: float
    """Infinite where it was left, as it would have taken longer than the limit."""
    first_epoch_seconds: float
    last_epoch_seconds: float
    sent_bytes: float
    kept_share: float
    """Share of the samples that is kept by the last choice."""
    most_bytes: tuple[float, float]
    """Most bytes on the disk here and beside the store, at any time."""
    filled_at: float
    """Time at which the last sample came into a cache here."""


def replay(
    world: World,
    choose: Callable[[Machines, int], Choice],
    *,
    limit: float = math.inf,
    bound: Callable[[Choice], float] = lambda choice: 0.0,
) -> JobFound:
    """Replay a job.

    Args:
        world: the job and its machines.
        choose: asked before each epoch, with the machines and the epoch's number.
        limit: seconds after which nobody wants to know.
        bound: seconds that an epoch takes at least.

    Returns:
        Its facts. Epochs after one in which nothing changed are not replayed: they take as long.
    """
    machines = Machines(world.profile, world.job, world.client, world.server)
    spent, sent, first, last, choice = 0.0, 0.0, 0.0, 0.0, None
    epoch = 0
    while epoch < world.job.epochs:
        rows, before, settled = machines.rows, machines.sent_bytes, machines.settled
        chosen = choose(machines, epoch)
        same, choice = chosen == choice, chosen
        last = Epoch(machines, choice, epoch).run()
        first = first or last
        steady = same and settled and machines.settled and rows == machines.rows
        count = world.job.epochs - epoch if steady else 1
        spent += count * last
        sent += count * (machines.sent_bytes - before)
        epoch += count
        if spent + (world.job.epochs - epoch) * bound(choice) > limit:
            spent = math.inf
            break
    caches = (machines.client_cache, machines.server_cache)
    return JobFound(
        seconds=spent,
        first_epoch_seconds=first,
        last_epoch_seconds=last,
        sent_bytes=sent,
        kept_share=0.0 if choice is None else kept_share(machines, choice),
        most_bytes=tuple(0.0 if cache is None else cache.most_bytes for cache in caches),  # type: ignore[arg-type]
        filled_at=0.0 if machines.client_cache is None else machines.client_cache.last_kept,
    )


def kept_share(machines: Machines, choice: Choice) -> float:
    """Return the share of the samples that is kept by ``choice`` now."""
    cache = machines.server_cache if choice.mode == "keep there" else machines.client_cache
    return 0.0 if cache is None else cache.share(choice.cut)


def epoch_bound(world: World, choice: Choice, share: float) -> float:
    """Return the seconds that an epoch takes at least when ``share`` of its samples is kept.

    It is the longest of what the link, the server's processors and the trainer's have to do; reading is left out.
    """
    at = choice.crossing
    work = busy(world, alone(choice, at.split), share)
    if at.alternation is not None:
        part = at.alternation.share
        its = busy(world, alone(choice, at.alternation.other), share)
        work = [(1 - part) * one + part * two for one, two in zip(work, its, strict=True)]
    return world.job.samples * max(work)


def busy(world: World, choice: Choice, share: float) -> list[float]:
    """Return the seconds of a sample at one split for each resource, in one order for all splits.

    Args:
        world: the job and its machines.
        choice: without an alternation.
        share: part of the samples that is kept.
    """
    profile, split, codec = world.profile, choice.crossing.split, choice.crossing.wire
    server, client = profile.server_tier, profile.client_tier
    crossing = 1.0 if choice.mode == "keep there" else 1 - share
    made = 1 - share
    wire = profile.sent_bytes(split) / codec.ratio + profile.link.sample_bytes
    serving = made * (server.decode_seconds if split else 0.0) + crossing * (
        wire * server.codec_seconds_per_byte + server.overhead_seconds
    )
    forward = made * sum(layer.server_seconds for layer in profile.layers[:split])
    arriving = crossing * (wire * client.codec_seconds_per_byte + client.overhead_seconds)
    if split == 0:
        arriving += client.decode_seconds * (1.0 if choice.mode == "keep samples" else crossing)
    each = [layer.client_seconds for layer in profile.layers[: profile.last_split]]
    cut = choice.cut if choice.mode == "keep here" else split
    step = profile.step_seconds + sum(each[cut:]) + crossing * sum(each[split:cut])
    parts = [crossing * wire * 8 / profile.link.bits_per_second]
    for tier, compute, overhead in ((server, forward, serving), (client, step, arriving)):
        if tier.device == "cpu":
            parts.append((compute * tier.threads + overhead) / tier.processors)
        parts += [compute / tier.devices, overhead / tier.processors]
    encoded = 0.0 if codec == RAW else made * profile.sent_bytes(split) / codec.encode
    parts.append((serving + encoded) / server.processors)
    return parts
