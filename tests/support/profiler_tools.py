"""Crafted profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hapi.profiler.profile import (
    LayerProfile,
    LinkProfile,
    Profile,
    SampleProfile,
    ServerProfile,
    TierProfile,
)


def free_tier(device: str = "cuda", **changes: Any) -> TierProfile:
    """A tier on which nothing but forward passes costs anything, unless ``changes`` says so."""
    costs: dict[str, Any] = {
        "decode_seconds": 0.0,
        "codec_seconds_per_byte": 0.0,
        "to_device_seconds_per_byte": 0.0,
        "from_device_seconds_per_byte": 0.0,
    }
    return TierProfile(device=device, **(costs | changes))


def free_server(**changes: Any) -> ServerProfile:
    """A server that reads for nothing, one request at a time."""
    settings: dict[str, Any] = {
        "read_seconds": 0.0,
        "model_load_seconds": 0.0,
        "concurrency": 1,
        "waiting_seconds": 0.0,
        "cos_batch": 16,
    }
    return ServerProfile(**(settings | changes))


def crafted(
    outputs: Sequence[int],
    there: Sequence[float],
    here: Sequence[float] | None = None,
    /,
    **changes: Any,
) -> Profile:
    """A profile of ``len(outputs)`` layers, all but the last frozen, on a network of 8 Gbit/s (1 GB/s)."""
    times = there if here is None else here
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            output_bytes=size,
            flops=1.0,
            parameter_bytes=100,
            working_bytes=2 * size,
            saved_bytes=size,
            server_seconds=on_server,
            client_seconds=on_client,
        )
        for i, (size, on_server, on_client) in enumerate(zip(outputs, there, times, strict=True), start=1)
    )
    fields: dict[str, Any] = {
        "model": "crafted",
        "freeze": len(layers) - 1,
        "last_split": len(layers) - 1,
        "layers": layers,
        "samples": SampleProfile(stored_bytes=1000, encoded=True, uint8_bytes=1500, tensor_bytes=6000),
        "server": free_server(),
        "server_tier": free_tier(),
        "client_tier": free_tier(),
        "link": LinkProfile(bits_per_second=8e9, variation=0.0, request_seconds=0.0),
        "step_seconds": 0.0,
        "update_seconds": 0.0,
        "optimizer_bytes_per_parameter_byte": 1.0,
    }
    return Profile(**(fields | changes))


def turning(server: float = 0.010, client: float = 0.004, step: float = 0.005) -> Profile:
    """Two layers that the trainer computes sooner at first; with few samples to compute the server does. Between them
    too much crosses.

    Args:
        server: seconds of both for a sample.
        client: the trainer's.
        step: seconds of the training step for a sample.
    """
    base = crafted(
        [100_000_000, 1000, 1000],
        [server / 2, server / 2, 0.0],
        [client / 2, client / 2, 0.0],
        server=free_server(concurrency=4),
        link=LinkProfile(bits_per_second=1e10, variation=0.0, request_seconds=0.0),
        step_seconds=step,
    )
    return replace(base, last_split=2, freeze=2)


MIB = 1 << 20


def heavy(device: str = "cpu") -> Profile:
    """Five layers of which the last three are trained with AdamW: parameters of 512, 256 and 64 MiB."""
    profile = crafted([1000] * 5, [0.1] * 5, client_tier=free_tier(device), freeze=2, last_split=2)
    weights = (MIB, MIB, 512 * MIB, 256 * MIB, 64 * MIB)
    layers = zip(profile.layers, weights, strict=True)
    return replace(
        profile,
        layers=tuple(replace(layer, parameter_bytes=nbytes) for layer, nbytes in layers),
        optimizer_bytes_per_parameter_byte=2.0,
        step_seconds=0.25,
    )
