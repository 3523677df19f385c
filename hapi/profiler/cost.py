"""Costs of a split: seconds of each stage, bytes and memory. Pure.

There are two models. The paper's (HAPI, section 4.3, Algorithm 1): the client waits for whole answers, so a
training batch takes ``max(client, server + network)``. Ours: frames are streamed, so server, network and
client overlap and a batch takes about the largest of the three, plus the time to fill and to drain the
pipeline: :mod:`hapi.profiler.stages.pipeline`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hapi.profiler.profile import Job, LayerProfile, Profile
from hapi.profiler.stages.pipeline import NOTHING_KEPT, Form, Mix, Pipeline

_LIBRARY_BYTES = 8 << 20
"""Bytes of a CPU's libraries, whatever the model: oneDNN's generated code and small blocks; 1 to 8 MiB in
``benchmarks memory``.
"""
CLIENT_BYTES = 40 << 20
"""Bytes of the client's own objects on a CPU, whatever the job: torchvision, the traced model and its
connections; the growth of a process that prepares a job without weights.
"""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Seconds of the stages of one training batch."""

    server: float
    """Streamed form: the server's seconds a batch once requests follow each other without a gap."""
    network: float
    client: float
    server_waves: float
    """The paper's form: forward passes one after another, the rest in waves of concurrent requests."""
    fill: float
    """Seconds from the first request to the whole first batch on the client, with frames streamed."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the client."""

    parameters: int
    """Weights on this side, gradients and optimiser state of the trained ones."""
    batches: int
    """Training batches on the host: in use and prefetched."""
    compute: int
    """The most of: a micro-batch in the frozen layers, the training batch in the trained ones."""
    peak: int
    """Bytes that count against the budget: on a GPU without ``batches``, which stay on the host."""
    prefetch_depth: int
    """Training batches ahead of the one in use that ``batches`` counts."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Costs of one split."""

    split: int
    sent: Form
    stages: Stages
    memory: Memory
    wire_bytes: int
    """Bytes of one training batch on the wire."""
    epoch_wire_bytes: int
    paper_epoch_seconds: float
    epoch_seconds: float
    """Streamed form, at the link's mean bandwidth."""
    epoch_range: tuple[float, float]
    """Streamed form, with the bandwidth one standard deviation above and below its mean."""


def estimate(
    profile: Profile, job: Job, split: int, sent: Form = "stored", mix: Mix = NOTHING_KEPT
) -> Estimate:
    """Return the costs of a split.

    Args:
        profile: the measurements.
        job: the training.
        split: 0 to ``profile.last_split``.
        sent: form of samples at split 0; does not matter for others.
        mix: shares of the samples that are kept somewhere.
    """
    pipeline = pipeline_at(profile, job, split, sent, mix)
    bits, variation = profile.link.bits_per_second, profile.link.variation
    bs, seconds = min(job.bs, job.samples), pipeline.epoch(bits)
    return Estimate(
        split=split,
        sent=sent,
        stages=Stages(
            server=pipeline.server_streamed(bs),
            network=pipeline.network(bs, bits),
            client=pipeline.client(bs),
            server_waves=pipeline.server_waves(bs),
            fill=pipeline.fill(bs, bits),
        ),
        memory=memory(profile, job, split),
        wire_bytes=round(bs * pipeline.sent_bytes),
        epoch_wire_bytes=round(job.samples * pipeline.sent_bytes),
        paper_epoch_seconds=pipeline.paper_epoch(bits),
        epoch_seconds=seconds,
        epoch_range=(pipeline.epoch(bits * (1 + variation)), pipeline.epoch(bits * (1 - variation)))
        if variation
        else (seconds, seconds),
    )


def pipeline_at(
    profile: Profile, job: Job, split: int, sent: Form = "stored", mix: Mix = NOTHING_KEPT
) -> Pipeline:
    """Return the stages of a split; arguments as for :func:`estimate`."""
    return Pipeline(profile, job, split, sent, mix, depth=prefetch_depth(profile, job, split))


def prefetch_depth(profile: Profile, job: Job, split: int) -> int:
    """Return the training batches received ahead of the present one: at least 1, as the prefetcher does it.

    It is as many as the prefetch budget holds; on a CPU also no more than the memory budget leaves room for.
    """
    batches, held = -(-job.samples // job.bs), max(1, held_bytes(profile, job, split))
    live = job.prefetch_bytes // held
    if job.memory_bytes is not None and profile.client_tier.device == "cpu":
        parameters, compute = _fixed_memory(profile, job, split)
        live = min(live, (job.memory_bytes - parameters - compute) // held)
    return max(1, min(live - 1, batches - 1))


def held_bytes(profile: Profile, job: Job, split: int) -> int:
    """Return the bytes of one training batch on the client's host; at split 0 both stored and as tensors.

    Args:
        profile: sizes of the samples.
        job: the training batch.
        split: 0 to ``profile.last_split``.
    """
    bs = min(job.bs, job.samples)
    if split:
        return bs * profile.sent_bytes(split)
    return bs * (profile.samples.stored_bytes + profile.samples.tensor_bytes)


def memory(profile: Profile, job: Job, split: int) -> Memory:
    """Return the peak bytes on the client: weights, plus memory that grows with the batch (earlier HAPI text,
    section 4.3).

    Args:
        profile: sizes of the layers.
        job: batch sizes and the optimiser.
        split: 0 to ``profile.last_split``.
    """
    parameters, compute = _fixed_memory(profile, job, split)
    depth = prefetch_depth(profile, job, split)
    batches = (1 + depth) * held_bytes(profile, job, split)
    on_host = profile.client_tier.device == "cpu"
    return Memory(
        parameters=parameters,
        batches=batches,
        compute=compute,
        peak=parameters + compute + (batches if on_host else 0),
        prefetch_depth=depth,
    )


def _fixed_memory(profile: Profile, job: Job, split: int) -> tuple[int, int]:
    """Bytes of weights, and of computing: a micro-batch in the frozen layers, or a training step in the others."""
    bs, last_split = min(job.bs, job.samples), profile.last_split
    trained, frozen = profile.layers[last_split:], profile.layers[split:last_split]
    held = profile.layers[split if job.weights_from is None else min(split, job.weights_from) : last_split]
    weights = sum(layer.parameter_bytes for layer in trained)
    trained_bytes = int(weights * (2 + profile.optimizer_bytes_per_parameter_byte)) - profile.offloaded_bytes
    parameters = sum(layer.parameter_bytes for layer in held) + max(0, trained_bytes)
    on_cpu = profile.client_tier.device == "cpu"
    # On a CPU features that need no frozen layer are trained with where they arrived.
    features = 0 if on_cpu and split == last_split else bs * profile.output_bytes()[last_split]
    micro = max(
        (min(bs, job.micro_batch) * layer.working_bytes + layer.workspace_bytes for layer in frozen),
        default=0,
    )
    return parameters, features + max(micro, _step_bytes(trained, bs, profile.output_bytes()[last_split])) + (
        _LIBRARY_BYTES + CLIENT_BYTES if on_cpu else 0
    )


def _step_bytes(trained: Sequence[LayerProfile], bs: int, feature_bytes: int) -> int:
    """Bytes of a training step beside weights, all gradients and the batch's features.

    In the forward pass each layer leaves behind what its backward pass needs. The backward pass gives that up layer
    by layer and holds the gradients of the layer's result and input, but not yet those of earlier layers' weights.
    """
    peak = kept = earlier_weights = entering = 0
    for number, layer in enumerate(trained):
        # What the first layer works with counts the features, which are counted already.
        working = layer.working_bytes - (0 if number else feature_bytes)
        forward = bs * (kept + max(working, layer.output_bytes, layer.saved_bytes))
        backward = bs * (kept + layer.saved_bytes + layer.output_bytes + entering) - earlier_weights
        peak = max(peak, max(forward, backward) + layer.workspace_bytes)
        kept += layer.saved_bytes
        earlier_weights += layer.parameter_bytes
        entering = layer.output_bytes
    return peak


def largest_batch(profile: Profile, job: Job, split: int) -> int:
    """Return the largest training batch up to the job's that fits the budget at ``split``; 0 when no sample
    does.

    Prefetch is the least possible, so that the memory grows with the batch.
    """
    if job.memory_bytes is None:
        return job.bs
    sizes = range(1, job.bs + 1)
    lean = replace(job, prefetch_bytes=0)
    return bisect_right(
        sizes, job.memory_bytes, key=lambda bs: memory(profile, replace(lean, bs=bs), split).peak
    )
