"""Seconds, bytes and money of a whole job that keeps something, or nothing. Pure.

An epoch's samples are read where they are kept, and computed where they are not. What was computed is kept behind
the training as far as there is room and as the disk keeps up; more is left to later epochs. So an epoch has a share
of hits that grows until the cache is full, and the job is the sum of its epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hapi.profiler.cost import prefetch_depth
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choice import Choice
from hapi.profiler.reuse.facts import RAW, CodecCost, Prices, ReuseFacts, Storage
from hapi.profiler.stages.alternation import Alternating
from hapi.profiler.stages.pipeline import Mix, Pipeline

RECORD_BYTES = 32
"""Bytes on disk of a sample beside its content: checksum, id and label."""
LINE_BYTES = 64 << 20
"""Bytes that may wait for the trainer's disk when an epoch ends: the page cache takes them then, the disk later."""
_AHEAD_SECONDS = 30.0
"""Longest time for which the disk is at work on what an epoch's end has given to the page cache."""
_SAME = 1e-3
"""Part of an epoch's seconds that makes no difference to what its disk writes."""
_EXACT_EPOCHS = 64
"""Epochs that are priced one by one while the cache fills; later ones in groups."""


@dataclass(frozen=True, kw_only=True)
class JobCost:
    """Costs of a job that runs by ``choice``."""

    choice: Choice
    seconds: float
    money: float
    first_epoch_seconds: float
    last_epoch_seconds: float
    fill_seconds: float | None
    """Seconds from the job's beginning until no more comes into the cache; None if that is after its end."""
    kept: float
    """Share of the samples that is kept at the end."""
    kept_bytes: int
    """Bytes of those on disk."""
    received_bytes: int
    """Bytes that cross in the whole job."""
    server_seconds: float
    """Seconds of the whole server that the job takes."""
    later_epoch: int | None = None
    """Epoch, from 0, that is the first to begin with a cache into which nothing more comes; None where none is."""


class JobPricer:
    """Prices one choice: epochs with any share of kept samples, and the job made of them.

    Features of views take turns and share the room: each view is priced as a job of its own, of every K-th epoch.
    Stored samples serve all of them.
    """

    def __init__(self, profile: Profile, job: Job, facts: ReuseFacts, choice: Choice) -> None:
        """Price ``choice``; ``job.epochs`` are the epochs to come."""
        self.profile, self.job, self.choice = profile, job, choice
        self.views = facts.views if choice.mode in ("keep here", "keep there") else 1
        """Forms of each sample that are kept apart."""
        self.samples = job.samples if facts.samples is None else max(1, facts.samples // facts.views)
        """Samples that may come into the cache, of one view."""
        content = profile.sent_bytes(choice.cut)
        self.sample_bytes = content / choice.codec.ratio + RECORD_BYTES
        """Bytes of a kept sample on disk."""
        self._content, self._depth = content, prefetch_depth(profile, job, choice.crossing.split)
        self._trainers = facts.trainers
        on_server = choice.mode == "keep there"
        self.storage: Storage | None = None
        self.kept_before = 0.0
        if choice.mode != "recompute":
            self.storage = self._filled(facts.server if on_server else facts.client)
            own_share = facts.client_share(choice.cut, choice.crossing.split)
            self.kept_before = facts.server_share(choice.cut) if on_server else own_share
        self.unused = (1 - choice.limit) * self.kept_before
        """Share of the samples that is kept, and not read."""
        self.kept_before -= self.unused
        self.room = self._room()
        """Largest share of the samples that is ever read."""

    def _filled(self, storage: Storage | None) -> Storage | None:
        """A view's part of ``storage``, as the thread fills it that encodes what it writes, while the disk is at work
        on what it has."""
        codec = self.choice.codec
        if storage is not None and self.views > 1:
            storage = replace(
                storage,
                bytes=storage.bytes // self.views,
                fast_bytes=storage.fast_bytes // self.views,
                memory_bytes=storage.memory_bytes // self.views,
            )
        if storage is None or codec.name == RAW.name:
            return storage
        encoded = self.sample_bytes * codec.encode / self._content
        slow = storage.slow_write
        return replace(
            storage,
            write=min(storage.write, encoded),
            slow_write=None if slow is None else min(slow, encoded),
        )

    def _room(self) -> float:
        if self.storage is None:
            return self.kept_before
        fits = self.storage.bytes / (self.samples * self.sample_bytes)
        return max(self.kept_before, min(1.0, self.choice.limit, fits - self.unused))

    def _mix(self, share: float, keeping: float, split: int, wire_codec: CodecCost) -> Mix:
        choice, content = self.choice, self._content
        wire = self._wire_mix(split, wire_codec)
        if self.storage is None:
            return wire
        # Memory holds features without their codec; stored samples are on disk alone.
        held = share * self.samples * content
        in_memory = self.storage.part_in_memory(held) if choice.mode != "keep samples" else 0.0
        read = (
            in_memory * content / self.storage.memory_read
            + (1 - in_memory) * self.sample_bytes / self.storage.read
        )
        decode = in_memory * content / RAW.decode + (1 - in_memory) * content / choice.codec.decode
        if choice.mode == "keep there":
            return replace(
                wire,
                server_hits=share,
                server_hit_read_seconds=read,
                server_hit_read_cpu=decode,
                server_keeping=keeping,
                server_keep_cpu=content / choice.codec.encode,
            )
        return replace(
            wire,
            cut=choice.cut,
            hits=share,
            hit_read_seconds=read,
            hit_read_cpu=decode,
            keeping=keeping,
            keep_cpu=content / choice.codec.encode,
        )

    def _wire_mix(self, split: int, wire: CodecCost) -> Mix:
        """The codec on the wire; raw bytes are priced with the frames."""
        content = self.profile.sent_bytes(split)
        if wire.name == RAW.name:
            return Mix()
        return Mix(
            wire_ratio=wire.ratio,
            wire_encode_cpu=content / wire.encode,
            wire_decode_cpu=content / wire.decode,
        )

    def epoch(self, share: float, keeping: float = 0.0) -> Pipeline | Alternating:
        """Return the stages of an epoch.

        Args:
            share: of its samples that are kept when it begins, from 0 to 1.
            keeping: share of its samples that it keeps.
        """
        at = (self.choice.settled if self._full(share) else self.choice).crossing
        one = self.at_split(at.split, at.wire, share, keeping)
        if at.alternation is None:
            return one
        other = self.at_split(at.alternation.other, at.other_wire, share, keeping)
        return Alternating(one, other, at.alternation.share)

    def at_split(self, split: int, wire: CodecCost, share: float, keeping: float = 0.0) -> Pipeline:
        """Return the stages of an epoch that computes what is not kept at ``split``, see :meth:`epoch`."""
        own = split == self.choice.crossing.split
        depth = self._depth if own else prefetch_depth(self.profile, self.job, split)
        mix = self._mix(share, keeping, split, wire)
        return Pipeline(self.profile, self.job, split, "stored", mix, depth=depth)

    def epoch_seconds(self, share: float, keeping: float = 0.0) -> float:
        """Return the seconds of an epoch without what it waits for at its end, see :meth:`epoch`."""
        return self.epoch(share, keeping).epoch(self.profile.link.bits_per_second)

    @property
    def visits(self) -> tuple[tuple[int, int], ...]:
        """Numbers of views that come up, each with the epochs that have them; those of most epochs first."""
        rounds, more = divmod(self.job.epochs, self.views)
        every = ((more, rounds + 1), (self.views - more, rounds))
        return tuple((views, epochs) for views, epochs in every if views and epochs)

    def job_cost(self, prices: Prices) -> JobCost:
        """Return the costs of all epochs."""
        runs = [(views, self._run(epochs)) for views, epochs in self.visits]
        unseen = self.views - sum(views for views, _ in runs)
        seconds = sum(views * run.sums.seconds for views, run in runs)
        server = sum(views * run.sums.server for views, run in runs)
        received = sum(views * run.sums.received for views, run in runs)
        kept = (unseen * self.kept_before + sum(views * run.share for views, run in runs)) / self.views
        return JobCost(
            choice=self.choice,
            seconds=seconds,
            money=prices.of(received, server, seconds),
            first_epoch_seconds=runs[0][1].sums.first,
            last_epoch_seconds=runs[0][1].sums.last,
            fill_seconds=self._filled_at([run for _, run in runs], unseen),
            kept=kept,
            kept_bytes=int(kept * self.views * self.samples * self.sample_bytes),
            received_bytes=round(received),
            server_seconds=server,
            later_epoch=None if (full := runs[0][1].full_from) is None else full * self.views,
        )

    def _filled_at(self, runs: Sequence[_Run], unseen: int) -> float | None:
        """Seconds from the job's beginning until no view comes into the cache any more; None if that is after its end.

        Those that a view takes in its own epochs, of which the others' lie between.
        """
        own = [run.filled_at for run in runs]
        longest = max((at for at in own if at is not None), default=0.0)
        if None in own or (unseen and not self._full(self.kept_before)):
            return None
        first = runs[0].sums.first
        return longest + (self.views - 1) * (first if 0 < longest <= first else longest)

    def _run(self, epochs: int) -> _Run:
        """Epochs of one view."""
        share, left, written, behind = self.kept_before, epochs, 0.0, 0.0
        sums = _Sums()
        filled_at = 0.0 if self._full(share) else None
        full_from: int | None = None
        while left:
            if full_from is None and self._full(share):
                full_from = sums.epochs
            one = self._fill_epoch(share, written, behind)
            count = left if one.fraction == 0 else self._grouped(sums.epochs, left)
            if filled_at is None and self._full(share + one.fraction * count):
                filled_at = sums.seconds + one.filled_after + (count - 1) * one.seconds
            sums.add(one, count, self.job.samples)
            share = min(self.room, share + one.fraction * count) if one.fraction else share
            written += one.fraction * count * self.samples * self.sample_bytes
            behind = one.behind
            left -= count
        return _Run(sums, share, filled_at, full_from)

    @property
    def full(self) -> bool:
        """True when nothing more comes into the cache."""
        return self._full(self.kept_before)

    def _full(self, share: float) -> bool:
        return share >= self.room - 1e-9

    @staticmethod
    def _grouped(done: int, left: int) -> int:
        return 1 if done < _EXACT_EPOCHS else min(left, 1 + done // 8)

    def _fill_epoch(self, share: float, written: float, behind: float) -> _Epoch:
        """An epoch that begins with ``share`` kept: ``written`` bytes of this job, ``behind`` not on the disk yet."""
        plain = self.epoch(share)
        bits = self.profile.link.bits_per_second
        seconds = plain.epoch(bits)
        if self.storage is None or self._full(share):
            return _Epoch(plain, seconds, 0.0, seconds, 0.0)
        on_client = self.choice.mode != "keep there"
        # A server fills for all trainers of the job, a trainer with what it sees itself.
        seen = (1 - share) * (self.job.samples / self.samples if on_client else 1.0)
        wanted = min(self.room - share, seen)
        each = self.samples * self.sample_bytes
        reading = self.job.samples * plain.disk if on_client else 0.0
        line = LINE_BYTES * self.sample_bytes / self._content
        ahead = min(line, self.storage.write * _AHEAD_SECONDS)
        busy, fraction, on_disk = plain, 0.0, 0.0
        # What keeping holds up gives the disk more time, once: the second time is near enough.
        for _ in range(2):
            on_disk = self.storage.written(max(0.0, seconds - reading), written - behind)
            fraction = min(wanted, max(0.0, on_disk - behind + (ahead if on_client else 0.0)) / each)
            keeping = min(1.0, fraction * self.samples / self.job.samples) if on_client else fraction
            busy = self.epoch(share, keeping)
            before, seconds = seconds, busy.epoch(bits)
            if seconds <= before * (1 + _SAME):
                break
        left = max(0.0, behind + fraction * each - on_disk)
        # New samples come evenly over the epoch; the disk may need longer.
        to_write = self.storage.seconds_to_write(behind + fraction * each, written - behind)
        filled = seconds if left else max(seconds * wanted / seen, min(seconds, to_write))
        return _Epoch(busy, seconds, fraction, filled, left)


@dataclass(frozen=True)
class _Epoch:
    pipeline: Pipeline | Alternating
    seconds: float
    fraction: float
    """Share of all samples that comes into the cache."""
    filled_after: float
    """Seconds until the last of them has."""
    behind: float
    """Bytes that the disk has not yet when it ends."""


@dataclass(frozen=True)
class _Run:
    """Epochs of one view."""

    sums: _Sums
    share: float
    """Share of its samples that is kept at their end."""
    filled_at: float | None
    """Seconds of these epochs until no more comes; None if it comes to the end."""
    full_from: int | None
    """First of them that begins when no more comes; None if none does."""


class _Sums:
    """Sums over epochs."""

    def __init__(self) -> None:
        self.epochs, self.first, self.last = 0, 0.0, 0.0
        self.seconds = self.server = self.received = 0.0

    def add(self, epoch: _Epoch, count: int, samples: int) -> None:
        """Add ``count`` epochs like ``epoch``."""
        if not self.epochs:
            self.first = epoch.seconds
        self.epochs, self.last = self.epochs + count, epoch.seconds
        self.seconds += count * epoch.seconds
        self.server += count * epoch.pipeline.server_epoch()
        self.received += count * samples * epoch.pipeline.sent_bytes
