"""Seconds and bytes of a sample at each split, from the cost model, as one server and one trainer have them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hapi.profiler.cost import prefetch_depth
from hapi.profiler.profile import Job, LayerProfile, Profile, TierProfile
from hapi.profiler.stages.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """Costs of one split; seconds and bytes are of one sample unless they say otherwise."""

    split: int
    load_seconds: float
    """Seconds of a request for loading the frozen prefix; 0 when models stay resident."""
    read_seconds: float
    """Seconds in which the server waits for the store."""
    decode_seconds: float
    """The server's CPU seconds before the forward pass."""
    forward_seconds: float
    send_seconds: float
    """The server's CPU seconds after the forward pass."""
    wire_bytes: float
    receive_seconds: float
    """The trainer's CPU seconds when a sample comes in."""
    suffix_seconds: float
    """The trainer's seconds in the frozen layers after the split."""
    step_seconds: float
    """The trainer's seconds in what is trained."""
    update_seconds: float
    """Seconds of an optimiser step, whatever the batch."""
    depth: int
    """Training batches ahead of the one in use."""


def split_costs(profile: Profile, job: Job, split: int) -> SplitCosts:
    """Return what the cost model has for ``split``, taken apart into the steps of a request and a batch.

    Args:
        profile: of the fleet's machines, see :func:`on_machines`; its seconds are those of one server.
        job: the training.
        split: 0 to ``profile.last_split``.
    """
    depth = prefetch_depth(profile, job, split)
    pipeline = Pipeline(profile, job, split, "stored", depth=depth)
    send = pipeline.sent_bytes * profile.server_tier.codec_seconds_per_byte
    return SplitCosts(
        split=split,
        load_seconds=pipeline.load,
        read_seconds=pipeline.store_seconds,
        decode_seconds=max(0.0, pipeline.server_overhead - send),
        forward_seconds=pipeline.forward,
        send_seconds=send,
        wire_bytes=pipeline.sent_bytes,
        receive_seconds=pipeline.client_overhead,
        suffix_seconds=pipeline.client_compute - profile.step_seconds,
        step_seconds=profile.step_seconds,
        update_seconds=profile.update_seconds,
        depth=depth,
    )


def on_machines(profile: Profile, *, server_speed: float = 1.0, trainer_speed: float = 1.0) -> Profile:
    """Return a profile as one server and one trainer of other speeds would have it, each on its own machine.

    Args:
        profile: as it was recorded, perhaps of several servers together.
        server_speed: times as fast as the recorded server.
        trainer_speed: times as fast as the recorded trainer.
    """
    count = profile.server.servers
    server, trainer = count / server_speed, 1 / trainer_speed
    return replace(
        profile,
        layers=tuple(_scaled_layer(layer, server, trainer) for layer in profile.layers),
        server=replace(
            profile.server,
            servers=1,
            concurrency=max(1, profile.server.concurrency // count),
            share=1.0,
            waiting_seconds=0.0,
        ),
        server_tier=_scaled_tier(profile.server_tier, server),
        client_tier=_scaled_tier(profile.client_tier, trainer),
        step_seconds=profile.step_seconds * trainer,
        update_seconds=profile.update_seconds * trainer,
        one_machine=False,
    )


def together(profile: Profile, servers: int, bits_per_second: float) -> Profile:
    """Return the profile of ``servers`` equal servers as their client plans with it, over a link of this rate."""
    part = 1 / servers
    return replace(
        profile,
        layers=tuple(_scaled_layer(layer, part, 1.0) for layer in profile.layers),
        server=replace(profile.server, servers=servers, concurrency=profile.server.concurrency * servers),
        server_tier=_scaled_tier(profile.server_tier, part),
        link=replace(profile.link, bits_per_second=bits_per_second, variation=0.0),
    )


def _scaled_layer(layer: LayerProfile, server: float, trainer: float) -> LayerProfile:
    return replace(
        layer, server_seconds=layer.server_seconds * server, client_seconds=layer.client_seconds * trainer
    )


def _scaled_tier(tier: TierProfile, factor: float) -> TierProfile:
    return replace(
        tier,
        decode_seconds=tier.decode_seconds * factor,
        codec_seconds_per_byte=tier.codec_seconds_per_byte * factor,
        overhead_seconds=tier.overhead_seconds * factor,
        to_device_seconds_per_byte=tier.to_device_seconds_per_byte * factor,
        from_device_seconds_per_byte=tier.from_device_seconds_per_byte * factor,
    )
