"""Observations for a profile, made from counts: each split's cost between two snapshots. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hapi.client.planning.counts import ClientCounts, Snapshot, SplitCounts, TrafficCounts
from hapi.profiler.fit import FAIR_SHARE, Observed, Tier

LARGEST_FACTOR = 8.0
"""Largest factor of a server process's CPU seconds over its requests' that is taken for the price of serving them."""
QUIET = 0.1
"""Utilisation of a server by others below which it counts as ours alone."""


def observed_between(
    before: Snapshot, after: Snapshot, servers: Mapping[int, Tier], client: Tier
) -> dict[int, Observed]:
    """Return the costs of the splits between two snapshots.

    Splits without any sample are left out, and those at which the server computed none itself.
    """
    found = {}
    for split, counts in after.items():
        delta = counts - before.get(split, SplitCounts())
        traffic = delta.traffic
        if delta.client.samples > 0 and traffic.samples + traffic.cached > traffic.shared:
            found[split] = _observed(split, delta, servers.get(split, Tier()), client)
    return found


def _observed(split: int, delta: SplitCounts, server: Tier, client: Tier) -> Observed:
    d, own = delta.traffic, delta.client
    # What the server did not compute is to cost what it would have cost there.
    whole = d.samples / (d.samples - d.shared) if d.samples > d.shared else 1.0
    cpu, wall = ({k: v * whole for k, v in sums.items()} for sums in (d.server_cpu, d.server_wall))
    loads = not server.reuse
    # Requests ahead of the batches that were handed out are in one sum and not in the other.
    samples = d.samples + d.cached
    ahead = samples / own.samples
    helpers = (client.threads - 1) * own.main_cpu if client.device == "cpu" else 0.0
    other = (own.process_cpu - own.main_cpu - helpers) * ahead - d.receive_cpu - d.decode_cpu
    return Observed(
        split=split,
        batches=own.batches,
        samples=samples,
        cached=d.cached,
        bytes_received=d.bytes_received,
        requests=d.requests,
        request_seconds=d.request_seconds or 0.0,
        suffix_seconds=_suffix_seconds(own) * ahead,
        step_seconds=own.step.seconds * ahead,
        client_layers=own.timed.layers,
        client_timed=own.timed.samples,
        receive_seconds=d.receive_cpu,
        decode_seconds=d.decode_cpu,
        client_other_seconds=other,  # below 0 where another split's batches did what was received for this one
        server_cpu={stage: v / server.count for stage, v in cpu.items() if loads or stage != "model"},
        server_wall={stage: _shared(stage, v, cpu, server.count) for stage, v in wall.items()},
        server_factor=_factor(d, server),
        share=_share(d, server),
        slot_share=_slot_share(d, server),
        cos_batch=d.cos_batch,
        server=server,
    )


def _suffix_seconds(own: ClientCounts) -> float:
    """Seconds in the frozen layers of all that was handed out; timing each layer takes longer and counts at need."""
    if own.suffix.samples > 0:
        return own.suffix.seconds / own.suffix.samples * own.samples
    return own.timed.seconds


def _shared(stage: str, seconds: float, cpu: Mapping[str, float], servers: int) -> float:
    """Wall seconds of a stage on several servers: its work is shared, waiting (also for the store) is not."""
    if stage in ("forward", "copy_out"):
        return seconds / servers
    return seconds - (1 - 1 / servers) * cpu.get(stage, 0.0)


def _factor(d: TrafficCounts, server: Tier) -> float:
    """CPU seconds of the server process over its requests' stages; a forward pass's other threads are in neither."""
    if d.work <= 0:
        return 1.0
    helpers = (server.threads - 1) * d.server_cpu.get("forward", 0.0) / max(sum(d.server_cpu.values()), 1e-12)
    return min(LARGEST_FACTOR, max(1.0, d.process_cpu / d.work - helpers))


def _share(d: TrafficCounts, server: Tier) -> float:
    """The part of the server that others leave, from its own account of work."""
    others = _others(d, server)
    return 1.0 if others < QUIET else max(FAIR_SHARE, 1.0 - others)


def _others(d: TrafficCounts, server: Tier) -> float:
    """The part of the servers' processors, or devices, that others used while our requests ran."""
    workers = server.processors if server.device == "cpu" else server.devices
    return d.others / d.clock / workers if d.clock > 0 else 0.0


def _slot_share(d: TrafficCounts, server: Tier) -> float:
    """The part of the servers' slots that our requests got while they waited for one; 1 if they hardly did.

    A request that waits twice as long as it is worked on has a third. Where nobody else is served they waited for each
    other; and where more of them are sent than there are slots, they have at least the slots that they held.
    """
    waited = d.server_wall.get("queue", 0.0)
    if _others(d, server) < QUIET or waited <= QUIET * (waited + d.clock):
        return 1.0
    held = d.clock / (d.span * server.running) if d.span > 0 else 0.0
    return min(1.0, max(d.clock / (d.clock + waited), held))
