"""Both tiers and the link in simulated time: a request's way through the server, frame by frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.keep.disks import CacheAtWork, Disk, DiskAtWork, Shelf
from benchmarks.keep.events import Clock, Pool, Then
from hapi.profiler.profile import Job, Profile, TierProfile
from hapi.profiler.reuse.choice import Choice
from hapi.profiler.reuse.facts import RAW

FrameArrived = Callable[[int], None]
"""Told the samples of a frame that is on the trainer's side."""


@dataclass(frozen=True, kw_only=True)
class SideCache:
    """Room for kept data on one side."""

    disk: Disk
    budget: int
    memory_bytes: int = 0


class Tier:
    """Processors of one side, and the device of its forward passes."""

    def __init__(self, clock: Clock, profile: TierProfile, cores: Pool | None = None) -> None:
        """Take ``cores`` of another side that is on the same machine, if given."""
        self.profile, self._clock = profile, clock
        self.cores = cores or Pool(clock, profile.processors)
        self.device = Pool(clock, profile.devices)

    def forward(self, seconds: float, then: Then) -> None:
        """Compute on the device, one pass at a time; on a CPU that takes processors."""

        def over() -> None:
            """Free the device."""
            self.device.give()
            then()

        def begun() -> None:
            """Compute."""
            if self.profile.device == "cpu":
                self.cores.compute(seconds, over, self.profile.threads)
            else:
                self._clock.after(seconds, over)

        self.device.take(begun)


class Machines:
    """Parts that last over the epochs of a job: both tiers, the link, and the caches."""

    def __init__(
        self, profile: Profile, job: Job, client_cache: SideCache | None, server_cache: SideCache | None
    ) -> None:
        """Begin with empty caches.

        Args:
            profile: the costs.
            job: the training.
            client_cache: room on the trainer's side; None for none.
            server_cache: room beside the store.
        """
        self.profile, self.job, self.clock = profile, job, Clock()
        shared = None
        if profile.one_machine:
            # Two processors count as one core: they are hyper-threads mostly.
            tiers = (profile.server_tier, profile.client_tier)
            shared = Pool(self.clock, max(1, max(tier.processors for tier in tiers) // 2))
        self.server = Tier(self.clock, profile.server_tier, shared)
        self.client = Tier(self.clock, profile.client_tier, shared)
        self.link = Pool(self.clock)
        self.slots = Pool(self.clock, profile.server.concurrency)
        self.sent_bytes = 0.0
        self.client_cache = self._cache(client_cache, self.client.cores)
        self.server_cache = self._cache(server_cache, self.server.cores)

    def _cache(self, room: SideCache | None, cores: Pool) -> CacheAtWork | None:
        if room is None:
            return None
        disk = DiskAtWork(self.clock, room.disk)
        return CacheAtWork(self.clock, cores, disk, room.budget, room.memory_bytes, self.job.samples)

    @property
    def settled(self) -> bool:
        """True when no cache has anything left to write."""
        return all(cache.idle for cache in (self.client_cache, self.server_cache) if cache is not None)

    @property
    def rows(self) -> int:
        """Rows that are kept anywhere."""
        return sum(cache.rows for cache in (self.client_cache, self.server_cache) if cache is not None)


class Requests:
    """The server's work on requests, by one choice."""

    def __init__(self, machines: Machines, choice: Choice, shelf: Shelf | None) -> None:
        """Serve requests that cross as ``choice`` says; ``shelf`` holds what is kept beside the store."""
        self._machines, self._choice, self._shelf = machines, choice, shelf
        profile, self._split, wire = machines.profile, choice.crossing.split, choice.crossing.wire
        self._content = profile.sent_bytes(self._split)
        self._wire_bytes = self._content / wire.ratio + profile.link.sample_bytes
        self._forward = sum(layer.server_seconds for layer in profile.layers[: self._split])
        self._encode = 0.0 if wire == RAW else self._content / wire.encode

    def send(self, rows: Sequence[int], arrived: FrameArrived, done: Then) -> None:
        """Ask for samples; ``arrived`` is told of each frame, ``done`` comes once the server's work is over."""
        server, link = self._machines.profile.server, self._machines.profile.link
        self._machines.clock.after(
            link.request_seconds + server.waiting_seconds,
            lambda: self._machines.slots.take(lambda: self._begin(rows, arrived, done)),
        )

    def _begin(self, rows: Sequence[int], arrived: FrameArrived, done: Then) -> None:
        load = self._machines.profile.server.model_load_seconds if self._split else 0.0
        self._machines.server.cores.use(load, lambda: self._frame(rows, 0, arrived, done))

    def _frame(self, rows: Sequence[int], start: int, arrived: FrameArrived, done: Then) -> None:
        """The frame that begins with sample ``start``: read, decode, compute, send."""
        profile, machines = self._machines.profile, self._machines
        frame = rows[start : start + profile.server.cos_batch]
        kept = [row for row in frame if self._shelf is not None and self._shelf.held[row]]
        made = [row for row in frame if self._shelf is None or not self._shelf.held[row]]
        tier, split = profile.server_tier, self._split
        before = len(made) * profile.samples.tensor_bytes * tier.to_device_seconds_per_byte if split else 0.0
        before += len(made) * tier.decode_seconds if split else 0.0
        before += len(kept) * self._content / RAW.decode
        after = len(frame) * (self._wire_bytes * tier.codec_seconds_per_byte + tier.overhead_seconds)
        after += len(made) * (self._encode if self._shelf is not None else 0.0)
        after += 0.0 if self._shelf is not None else len(frame) * self._encode
        after += len(made) * self._content * tier.from_device_seconds_per_byte if split else 0.0

        def read() -> None:
            """Read what is kept, and the stored samples of the others."""
            if kept and self._shelf is not None and machines.server_cache is not None:
                machines.server_cache.read(kept, self._shelf, stored)
            else:
                stored()

        def stored() -> None:
            """Read the stored samples."""
            machines.clock.after(len(made) * profile.server.read_seconds, decoded)

        def decoded() -> None:
            """Decode."""
            machines.server.cores.use(before, computed)

        def computed() -> None:
            """Compute the frozen prefix."""
            if made and split:
                machines.server.forward(len(made) * self._forward, sent)
            else:
                sent()

        def sent() -> None:
            """Encode, and write to the network."""
            if self._shelf is not None and machines.server_cache is not None:
                # It is kept as it is sent, so that it is encoded once.
                machines.server_cache.offer(made, self._shelf, replace(self._choice.codec, encode=RAW.encode))
            machines.server.cores.use(after, crossing)

        def crossing() -> None:
            """Let the frame cross, and begin with the next one."""
            nbytes, last = len(frame) * self._wire_bytes, start + len(frame) >= len(rows)
            machines.sent_bytes += nbytes
            machines.link.use(
                nbytes * 8 / profile.link.bits_per_second, lambda: self._crossed(frame, last, arrived, done)
            )
            if not last:
                self._frame(rows, start + len(frame), arrived, done)

        read()

    def _crossed(self, frame: Sequence[int], last: bool, arrived: FrameArrived, done: Then) -> None:
        arrived(len(frame))
        if last:
            self._machines.slots.give()
            done()
