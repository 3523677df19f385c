"""Seconds of the stages of one split for any batch and bandwidth, and of an epoch made of them. Pure.

An epoch's samples may come from several places: most cross from the server, but some may be kept here, or be kept
beside the store, see :class:`Mix`. Stages that overlap take about as long as the longest. Tiers that share one
machine share its processors too: there a batch takes at least the sum of both tiers' work over its cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self

from hapi.profiler.profile import Job, Profile

OVERLAP_NORM = 8.0
"""Order of the norm that stands for the largest of stages that overlap: two that are equally long take 1.09 times as
long as one. Stages wait for each other now and then, the more the nearer they are to each other."""
FEWEST_ROWS = 16
"""Samples of a forward pass: where fewer are missing in a batch, kept ones are asked for again to fill it up."""

Form = Literal["stored", "uint8", "tensor"]
"""Form of samples at split 0: as they are stored, or made into tensors on the server."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Shares of an epoch's samples that are kept, and what using and keeping a sample costs."""

    cut: int = 0
    """Layer whose output is kept here; 0 for stored samples."""
    hits: float = 0.0
    """Share of the samples that is read here instead of asked for, from 0 to 1."""
    hit_read_seconds: float = 0.0
    """Seconds of this side's disk to read a sample."""
    hit_read_cpu: float = 0.0
    """CPU seconds here to make a sample out of what was read."""
    keeping: float = 0.0
    """Share of the samples that is encoded here in order to be kept."""
    keep_cpu: float = 0.0
    """CPU seconds here of such a sample."""
    server_hits: float = 0.0
    """Share of the samples that cross whose output at the split the server has kept."""
    server_hit_read_seconds: float = 0.0
    """Seconds of the server's disk to read a sample."""
    server_hit_read_cpu: float = 0.0
    server_keeping: float = 0.0
    """Share of the samples that is encoded there in order to be kept."""
    server_keep_cpu: float = 0.0
    wire_ratio: float = 1.0
    """Bytes of a sample's content over its bytes on the wire."""
    wire_encode_cpu: float = 0.0
    """CPU seconds of the server to encode a sample for the wire."""
    wire_decode_cpu: float = 0.0
    """CPU seconds here to decode it."""


NOTHING_KEPT = Mix()


class Loads(NamedTuple):
    """Seconds for which a batch occupies each resource, in the steady state of batches that follow each other."""

    server: float
    """The part of the server that there is, at its best."""
    requests: float
    """The server's requests under way, none of which is faster than its own work."""
    server_disk: float
    network: float
    client: float
    disk: float
    """This side's."""
    in_turn: float
    """The client's requests under way, each of which waits for the one before."""
    machine: float
    """The processors of a machine that both tiers share; 0 on two machines."""

    def cycle(self) -> float:
        """Seconds from one batch to the next: about as long as the busiest stage needs."""
        stages = (max(self.server, self.requests, self.server_disk), self.network, self.client, self.disk)
        return max(together(stages), self.in_turn, self.machine)

    def mixed(self, other: Self, share: float) -> Loads:
        """Return the mean loads of batches of which ``share`` are like ``other``."""
        own_share = 1 - share
        return Loads(*[own_share * own + share * its for own, its in zip(self, other, strict=True)])


class Pipeline:
    """Seconds of one split, for any batch and bandwidth. Here ``bs`` counts all samples of a batch."""

    def __init__(
        self, profile: Profile, job: Job, split: int, sent: Form, mix: Mix = NOTHING_KEPT, *, depth: int
    ) -> None:
        """Price ``split``.

        Args:
            profile: the measurements.
            job: the training.
            split: 0 to ``profile.last_split``.
            sent: form of samples at split 0.
            mix: where samples come from.
            depth: training batches received ahead of the one in use.
        """
        self.profile, self.job, self.split, self.mix, self.depth = profile, job, split, mix, depth
        samples = profile.samples
        forms = {"stored": samples.stored_bytes, "uint8": samples.uint8_bytes, "tensor": samples.tensor_bytes}
        self.content = profile.sent_bytes(split) if split else forms[sent]
        self.decode_here = split == 0 and sent == "stored"
        bs = min(job.bs, job.samples)
        missing = 1 - mix.hits
        self.crossing = rows_asked(bs, missing) / bs if mix.cut else missing
        """The part of the samples that the server is asked for."""
        # A request is left out only if all of its samples are at hand; of features the others are asked for together.
        self.asked = 1 - mix.hits ** (job.request_size if mix.cut == 0 else bs)
        """The part of the requests that are made."""
        self.sent_bytes = self.crossing * (self.content / mix.wire_ratio + profile.link.sample_bytes)
        self.load = self.asked * profile.server.model_load_seconds if split else 0.0
        """Seconds of a request for loading the front."""
        self._price_server()
        self._price_client()

    def _price_server(self) -> None:
        """Price what runs on the server's device in turns, and what runs beside it; seconds a sample."""
        profile, mix, server = self.profile, self.mix, self.profile.server_tier
        # A sample whose features are kept there is neither read as it is stored nor decoded nor computed.
        made = self.crossing * (1 - mix.server_hits)
        self.forward = made * sum(layer.server_seconds for layer in profile.layers[: self.split])
        self.server_overhead = (
            (0.0 if self.decode_here else made * server.decode_seconds)
            + self.sent_bytes * server.codec_seconds_per_byte
            + self.crossing
            * (server.overhead_seconds + mix.wire_encode_cpu + mix.server_hits * mix.server_hit_read_cpu)
            + mix.server_keeping * mix.server_keep_cpu
        )
        if self.split:
            self.server_overhead += made * profile.samples.tensor_bytes * server.to_device_seconds_per_byte
            self.server_overhead += made * self.content * server.from_device_seconds_per_byte
        self.store_seconds = made * profile.server.read_seconds
        self.there_disk = self.crossing * mix.server_hits * mix.server_hit_read_seconds

    def _price_client(self) -> None:
        profile, mix, client = self.profile, self.mix, self.profile.client_tier
        tensor, last = profile.samples.tensor_bytes, profile.last_split
        seconds = [layer.client_seconds for layer in profile.layers[:last]]
        entering = self.content if self.split else tensor
        if mix.cut:
            kept = mix.hits * profile.layers[mix.cut - 1].output_bytes
            moved = self.crossing * entering + kept
            frozen = self.crossing * sum(seconds[self.split : mix.cut]) + sum(seconds[mix.cut :])
        else:  # stored samples go the same way wherever they come from
            moved, frozen = entering, sum(seconds[self.split :])
        self.client_compute = moved * client.to_device_seconds_per_byte + frozen + profile.step_seconds
        self.client_overhead = (
            self.sent_bytes * client.codec_seconds_per_byte
            + (client.decode_seconds * (self.crossing if mix.cut else 1.0) if self.decode_here else 0.0)
            + client.overhead_seconds * (self.crossing if mix.cut else 1.0)
            + self.crossing * mix.wire_decode_cpu
            + mix.hits * mix.hit_read_cpu
            + mix.keeping * mix.keep_cpu
        )
        self.disk = mix.hits * mix.hit_read_seconds

    def client(self, bs: int) -> float:
        """Seconds of a batch on this side."""
        compute = bs * self.client_compute + self.profile.update_seconds
        return self.profile.client_tier.together(compute, bs * self.client_overhead)

    def network(self, bs: int, bits: float) -> float:
        """Seconds of a batch on the network."""
        return bs * self.sent_bytes * 8 / bits

    def server_waves(self, bs: int) -> float:
        """HAPI, section 4.3: forward passes in sequence, all else parallel within a wave of requests."""
        full, remainder = divmod(bs, self.job.request_size)
        requests, at_once = full + (remainder > 0), self.profile.server.concurrency
        waves = -(-requests // at_once)
        # A wave lasts as long as its largest request; the last may hold nothing but the remainder.
        last = remainder if full % at_once == 0 and remainder else min(self.job.request_size, bs)
        others = (waves - 1) * min(self.job.request_size, bs) + last
        other = self.server_overhead * self.profile.server.servers + self.store_seconds + self.there_disk
        work = bs * self.forward + others * other + waves * (self._per_request() - self._waiting())
        # Requests that get a part of the server wait for the others: that is the same seconds.
        return max(work / self.profile.server.share, work + waves * self._waiting())

    def server_busy(self, bs: int) -> float:
        """Seconds of the whole server that a batch takes, at its best."""
        loads = self._requests(bs) * self.load
        return self.profile.server_tier.together(bs * self.forward, bs * self.server_overhead + loads)

    def server_streamed(self, bs: int) -> float:
        """Seconds a batch in the steady state: the busier of the device and of the requests under way.

        With N requests at a time none can be faster than its own work over N (the bounds of operational
        analysis); on a CPU everything that computes shares the processors, on a GPU only the forward passes queue.
        """
        return max(self._server_loads(bs))

    def _server_loads(self, bs: int) -> tuple[float, float, float]:
        server = self.profile.server
        alone = self._alone(bs) / min(server.concurrency, self._under_way(bs))
        return self.server_busy(bs) / server.share, alone, bs * self.there_disk

    def loads(self, bs: int, bits: float) -> Loads:
        """Seconds for which a batch of ``bs`` occupies each resource; batches of the job's size follow each other."""
        network, requests = self.network(bs, bits), self._requests(bs)
        in_turn = self._overlapped(self._alone(bs), network, self._frames(bs) / requests)
        in_turn += requests * self._overhead()
        return Loads(
            *self._server_loads(bs),
            network=network,
            client=self.client(self.job.bs),
            disk=bs * self.disk,
            in_turn=in_turn / self._under_way(bs),
            machine=self.shared(bs),
        )

    def cycle(self, bs: int, bits: float) -> float:
        """Seconds from one batch to the next in the steady state, of which batches of the job's size follow each other.

        About as long as the busiest stage needs; but no request follows before another one's answer has come.
        """
        return self.loads(bs, bits).cycle()

    def shared(self, bs: int) -> float:
        """Seconds that both tiers' work on a batch takes all processors of the machine they share; 0 on two machines.

        One machine's work is the sum over its cores, whoever does it and whenever. Two processors count as one core:
        a virtual machine's are mostly hyper-threads and do not say so, and both tiers compute as fast as a core can.
        """
        if not self.profile.one_machine:
            return 0.0
        server, client = self.profile.server_tier, self.profile.client_tier
        loads = self._requests(bs) * self.load
        work = bs * (self.server_overhead + self.client_overhead) + loads
        if server.device == "cpu":
            work += bs * self.forward * server.threads
        if client.device == "cpu":
            work += (bs * self.client_compute + self.profile.update_seconds) * client.threads
        work *= self.profile.local_ranks  # each does as much, with servers of the same machine
        return work / max(1.0, max(server.processors, client.processors) / 2)

    def _alone(self, bs: int) -> float:
        """Seconds of the requests for a batch on the server, one after another."""
        own = (self.forward + self.server_overhead) * self.profile.server.servers  # on the one that has it
        return bs * (own + self.store_seconds + self.there_disk) + self._requests(bs) * self.load

    def _requests(self, bs: int) -> int:
        rows = bs if self.mix.cut == 0 else math.ceil(bs * self.crossing - 1e-9)
        return max(1, -(-rows // self.job.request_size))

    def _under_way(self, bs: int) -> int:
        """Requests of batches of ``bs`` that the client has under way at a time."""
        return min(self.job.in_flight, max(1, self._requests(bs) * (1 + self.depth)))

    def fill(self, bs: int, bits: float) -> float:
        """Seconds from the first request to the whole batch."""
        server, network = self.server_streamed(bs), self.network(bs, bits)
        crossed = self._overhead() + self.load + self._overlapped(server, network, self._frames(bs))
        return max(crossed, bs * self.disk)

    @staticmethod
    def _overlapped(server: float, network: float, frames: float) -> float:
        """Server and network together: they overlap, but for the first frame."""
        # A pipeline of two stages: the slower one runs without a break, the faster one shows for one frame only.
        return max(server, network) + min(server, network) / frames

    def _frames(self, bs: int) -> int:
        full, remainder = divmod(bs, self.job.request_size)
        cos = self.profile.server.cos_batch
        return full * -(-self.job.request_size // cos) + -(-remainder // cos)

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

    def epoch(self, bits: float) -> float:
        """Seconds of an epoch: fill, then a batch each cycle, then the client's last batch."""
        return epoch_of(self, bits)

    def server_epoch(self) -> float:
        """Seconds of the whole server that an epoch takes."""
        full, remainder = divmod(self.job.samples, self.job.bs)
        return full * self.server_busy(self.job.bs) + (self.server_busy(remainder) if remainder else 0.0)

    def _overhead(self) -> float:
        return self.asked * self.profile.link.request_seconds + self._waiting()

    def _waiting(self) -> float:
        return self.asked * self.profile.server.waiting_seconds

    def _per_request(self) -> float:
        return self._overhead() + self.load


class Batches(Protocol):
    """Batches of one job that follow each other."""

    @property
    def job(self) -> Job:
        """The training."""

    def fill(self, bs: int, bits: float) -> float:
        """Seconds from the first request to the whole batch."""

    def cycle(self, bs: int, bits: float) -> float:
        """Seconds from one batch to the next."""

    def client(self, bs: int) -> float:
        """Seconds of a batch on this side."""


def epoch_of(batches: Batches, bits: float) -> float:
    """Seconds of an epoch: fill, then a batch each cycle, then the client's last batch."""
    bs = batches.job.bs
    full, remainder = divmod(batches.job.samples, bs)
    if not full:
        return batches.fill(remainder, bits) + batches.client(remainder)
    total = batches.fill(bs, bits) + (full - 1) * batches.cycle(bs, bits)
    if not remainder:
        return total + batches.client(bs)
    return total + batches.cycle(remainder, bits) + batches.client(remainder)


def rows_asked(bs: int, missing: float) -> float:
    """Return the mean number of a batch's rows that a server is asked for when each is ``missing`` by that chance.

    The missing ones are filled up to a multiple of :data:`FEWEST_ROWS` with kept ones, as far as the batch goes.
    """
    if missing <= 0:
        return 0.0
    if missing >= 1 or bs <= FEWEST_ROWS:
        return bs * (1 - (1 - missing) ** bs) if missing < 1 else float(bs)
    mean, deviation = bs * missing, math.sqrt(bs * missing * (1 - missing))
    rows = 0.0
    for begin in range(0, bs, FEWEST_ROWS):
        # The chance that more than ``begin`` are missing: exact for none, else by the normal distribution.
        more = (
            0.5 * math.erfc((begin + 0.5 - mean) / (deviation * math.sqrt(2)))
            if begin
            else 1 - (1 - missing) ** bs
        )
        rows += more * min(FEWEST_ROWS, bs - begin)
        if more < 1e-9:
            break
    return max(mean, rows)


def together(stages: Sequence[float]) -> float:
    """Return the seconds of a step of a pipeline whose stages take these."""
    longest = max(stages)
    return (
        longest * sum((s / longest) ** OVERLAP_NORM for s in stages) ** (1 / OVERLAP_NORM)
        if longest > 0
        else 0.0
    )
