"""Costs of a split: seconds of each stage, bytes and memory. Pure.

There are two models. The paper's (HAPI, section 4.3, Algorithm 1): the client waits for whole answers, so a
training batch takes ``max(client, server + network)``. Ours: frames are streamed, so server, network and
client overlap and a batch takes about the largest of the three, plus the time to fill and to drain the
pipeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hapi.profiler.profile import Job, LayerProfile, Profile

_LIBRARY_BYTES = 8 << 20
"""Bytes of a CPU's libraries, whatever the model: oneDNN's generated code and small blocks; 1 to 8 MiB in
``benchmarks memory``.
"""
CLIENT_BYTES = 40 << 20
"""Bytes of the client's own objects on a CPU, whatever the job: torchvision, the traced model and its
connections; the growth of a process that prepares a job without weights.
"""

OVERLAP_NORM = 8.0
"""Order of the norm that stands for the largest of stages that overlap: two that are equally long take 1.09 times as
long as one. Stages wait for each other now and then, the more the nearer they are to each other."""

Form = Literal["stored", "uint8", "tensor"]
"""Form of samples at split 0: as they are stored, or made into tensors on the server."""


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


def estimate(profile: Profile, job: Job, split: int, sent: Form = "stored") -> Estimate:
    """Return the costs of a split.

    Args:
        profile: the measurements.
        job: the training.
        split: 0 to ``profile.last_split``.
        sent: form of samples at split 0; does not matter for others.
    """
    coster = _Coster(profile, job, split, sent)
    bits, variation = profile.link.bits_per_second, profile.link.variation
    bs = min(job.bs, job.samples)
    sample_bytes = coster.sent_bytes
    return Estimate(
        split=split,
        sent=sent,
        stages=coster.stages(bs, bits),
        memory=memory(profile, job, split),
        wire_bytes=round(bs * sample_bytes),
        epoch_wire_bytes=round(job.samples * sample_bytes),
        paper_epoch_seconds=coster.paper_epoch(bits),
        epoch_seconds=coster.streamed_epoch(bits),
        epoch_range=(
            coster.streamed_epoch(bits * (1 + variation)),
            coster.streamed_epoch(bits * (1 - variation)),
        ),
    )


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
    parameters = sum(layer.parameter_bytes for layer in held) + int(
        weights * (2 + profile.optimizer_bytes_per_parameter_byte)
    )
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


class _Coster:
    """The seconds of one split, for any batch and bandwidth."""

    def __init__(self, profile: Profile, job: Job, split: int, sent: Form) -> None:
        self.profile, self.job, self.split = profile, job, split
        samples, server, client = profile.samples, profile.server_tier, profile.client_tier
        forms = {"stored": samples.stored_bytes, "uint8": samples.uint8_bytes, "tensor": samples.tensor_bytes}
        content = profile.sent_bytes(split) if split else forms[sent]
        at_hand = job.cached if split == 0 and sent == "stored" else 0.0
        self.crossing = 1 - at_hand
        """The part of the samples that the server is asked for."""
        # A request is left out only if all of its samples are at hand.
        self.asked = 1 - at_hand**job.request_size
        """The part of the requests that are made: those with any such sample."""
        self.sent_bytes = self.crossing * (content + profile.link.sample_bytes)
        # Stored tensors are made into batches in the same stage; that costs little, and is measured as it is.
        decode_here = split == 0 and sent == "stored"
        tensor = samples.tensor_bytes
        # What runs on the device in turns, and what runs beside it; seconds a sample.
        self.forward = sum(layer.server_seconds for layer in profile.layers[:split])
        self.load = self.asked * profile.server.model_load_seconds if split else 0.0
        """Seconds of a request for loading the front."""
        self.server_overhead = (
            (0.0 if decode_here else server.decode_seconds)
            + self.sent_bytes * server.codec_seconds_per_byte
            + self.crossing * server.overhead_seconds
        )
        if split:
            self.server_overhead += tensor * server.to_device_seconds_per_byte
            self.server_overhead += content * server.from_device_seconds_per_byte
        self.client_compute = (
            (content if split else tensor) * client.to_device_seconds_per_byte
            + sum(layer.client_seconds for layer in profile.layers[split : profile.last_split])
            + profile.step_seconds
        )
        self.client_overhead = (
            self.sent_bytes * client.codec_seconds_per_byte
            + (client.decode_seconds if decode_here else 0.0)
            + client.overhead_seconds
        )
        self.depth = prefetch_depth(profile, job, split)

    def client(self, bs: int) -> float:
        compute = bs * self.client_compute + self.profile.update_seconds
        return self.profile.client_tier.together(compute, bs * self.client_overhead)

    def network(self, bs: int, bits: float) -> float:
        return bs * self.sent_bytes * 8 / bits

    def server_waves(self, bs: int) -> float:
        """HAPI, section 4.3: forward passes in sequence, all else parallel within a wave of requests."""
        full, remainder = divmod(bs, self.job.request_size)
        requests, at_once = full + (remainder > 0), self.profile.server.concurrency
        waves = -(-requests // at_once)
        # A wave lasts as long as its largest request; the last may hold nothing but the remainder.
        last = remainder if full % at_once == 0 and remainder else min(self.job.request_size, bs)
        others = (waves - 1) * min(self.job.request_size, bs) + last
        other = (
            self.server_overhead * self.profile.server.servers
            + self.crossing * self.profile.server.read_seconds
        )
        work = bs * self.forward + others * other + waves * self._per_request()
        return work / self.profile.server.share

    def server_streamed(self, bs: int) -> float:
        """Seconds a batch in the steady state: the busier of the device and of the requests under way.

        With N requests at a time none can be faster than its own work over N (the bounds of operational
        analysis); on a CPU everything that computes shares the processors, on a GPU only the forward passes queue.
        """
        server, loads = self.profile.server, self._requests(bs) * self.load
        busy = self.profile.server_tier.together(bs * self.forward, bs * self.server_overhead + loads)
        return max(busy / server.share, self._alone(bs) / min(server.concurrency, self._under_way(bs)))

    def cycle(self, bs: int, bits: float) -> float:
        """Seconds from one batch to the next in the steady state, of which batches of the job's size follow each other.

        About as long as the busiest stage needs; but no request follows before another one's answer has come.
        """
        network, requests = self.network(bs, bits), self._requests(bs)
        in_turn = self._overlapped(self._alone(bs), network, self._frames(bs) / requests)
        in_turn += requests * self._overhead()
        stages = (self.server_streamed(bs), network, self.client(self.job.bs))
        return max(_together(stages), in_turn / self._under_way(bs))

    def _alone(self, bs: int) -> float:
        """Seconds of the requests for a batch on the server, one after another."""
        server = self.profile.server
        own = (self.forward + self.server_overhead) * server.servers  # a request's, on the one that has it
        return bs * (own + self.crossing * server.read_seconds) + self._requests(bs) * self.load

    def _requests(self, bs: int) -> int:
        return -(-bs // self.job.request_size)

    def _under_way(self, bs: int) -> int:
        """Requests of batches of ``bs`` that the client has under way at a time."""
        return min(self.job.in_flight, max(1, self._requests(bs) * (1 + self.depth)))

    def fill(self, bs: int, bits: float) -> float:
        """Seconds from the first request to the whole batch."""
        server, network = self.server_streamed(bs), self.network(bs, bits)
        return self._overhead() + self.load + self._overlapped(server, network, self._frames(bs))

    @staticmethod
    def _overlapped(server: float, network: float, frames: float) -> float:
        """Server and network together: they overlap, but for the first frame."""
        # A pipeline of two stages: the slower one runs without a break, the faster one shows for one frame only.
        return max(server, network) + min(server, network) / frames

    def _frames(self, bs: int) -> int:
        full, remainder = divmod(bs, self.job.request_size)
        cos = self.profile.server.cos_batch
        return full * -(-self.job.request_size // cos) + -(-remainder // cos)

    def stages(self, bs: int, bits: float) -> Stages:
        return Stages(
            server=self.server_streamed(bs),
            network=self.network(bs, bits),
            client=self.client(bs),
            server_waves=self.server_waves(bs),
            fill=self.fill(bs, bits),
        )

    def paper_epoch(self, bits: float) -> float:
        """Algorithm 1, line 18: iterations times the larger of the client and of server plus network."""
        full, remainder = divmod(self.job.samples, self.job.bs)
        return full * self._paper_batch(self.job.bs, bits) + (
            self._paper_batch(remainder, bits) if remainder else 0.0
        )

    def _paper_batch(self, bs: int, bits: float) -> float:
        """The client's phases (Table 1) follow each other there."""
        client = bs * (self.client_compute + self.client_overhead) + self.profile.update_seconds
        return max(client, self.server_waves(bs) + self.network(bs, bits))

    def streamed_epoch(self, bits: float) -> float:
        """Fill, then a batch each cycle, then the client's last batch."""
        full, remainder = divmod(self.job.samples, self.job.bs)
        if not full:
            return self.fill(remainder, bits) + self.client(remainder)
        total = self.fill(self.job.bs, bits) + (full - 1) * self.cycle(self.job.bs, bits)
        if not remainder:
            return total + self.client(self.job.bs)
        return total + self.cycle(remainder, bits) + self.client(remainder)

    def _overhead(self) -> float:
        return self.asked * (self.profile.link.request_seconds + self.profile.server.waiting_seconds)

    def _per_request(self) -> float:
        return self._overhead() + self.load


def _together(stages: Sequence[float]) -> float:
    """Seconds of a step of a pipeline whose stages take these."""
    longest = max(stages)
    return (
        longest * sum((s / longest) ** OVERLAP_NORM for s in stages) ** (1 / OVERLAP_NORM)
        if longest > 0
        else 0.0
    )


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
