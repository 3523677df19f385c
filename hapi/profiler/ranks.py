"""A profile as one of several ranks of a training sees it. Pure."""

from __future__ import annotations

from dataclasses import replace

from hapi.profiler.profile import MIN_SHARE, Profile, TierProfile


def as_shared(profile: Profile, ranks: int, local_ranks: int) -> Profile:
    """Return ``profile`` as each of so many ranks sees it, which work at the same time and alike.

    The link and the servers are divided among all ranks, the processors of the trainer's machine among those on it.
    Layers on a CPU with fewer threads take longer in proportion; ranks on GPUs have one each.

    Args:
        profile: measured by one of :attr:`Profile.ranks`.
        ranks: number of all ranks, at least 1.
        local_ranks: number of those on this machine.
    """
    more = ranks / profile.ranks
    server, link = profile.server, profile.link
    tier, slower = _part_of(profile.client_tier, local_ranks / profile.local_ranks)
    return replace(
        profile,
        ranks=ranks,
        local_ranks=local_ranks,
        link=replace(link, bits_per_second=link.bits_per_second / more),
        server=replace(
            server,
            share=min(1.0, max(MIN_SHARE, server.share / more)),
            concurrency=max(1, round(server.concurrency / more)),
        ),
        client_tier=tier,
        layers=tuple(
            replace(layer, client_seconds=layer.client_seconds * slower) for layer in profile.layers
        ),
        step_seconds=profile.step_seconds * slower,
        update_seconds=profile.update_seconds * slower,
    )


def _part_of(tier: TierProfile, more: float) -> tuple[TierProfile, float]:
    """A machine's tier divided among so many times as many ranks, and the factor of its forward passes' seconds."""
    processors = max(1, round(tier.processors / more))
    if tier.device != "cpu":
        return replace(tier, processors=processors), 1.0
    threads = max(1, min(processors, round(tier.threads / more)))
    return replace(tier, processors=processors, threads=threads), tier.threads / threads
