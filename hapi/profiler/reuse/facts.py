"""Facts that decide whether keeping pays: disks, codecs, prices, and what is kept already. Pure, plain JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast, get_args

from hapi.codecs.choose import CodecFigures
from hapi.errors import UsageError
from hapi.profiler.reading import read_strictly

Objective = Literal["time", "money"]
"""Aim of a plan: the shortest job, or the cheapest."""
OBJECTIVES: tuple[str, ...] = get_args(Objective)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Disk and memory of one side that may hold kept samples or features."""

    bytes: int
    """Most bytes on the disk, those that are kept already among them."""
    read: float
    """Bytes per second that the disk reads."""
    write: float
    """Bytes per second that the disk writes, sustained unless ``slow_write`` is given."""
    slow_write: float | None = None
    """Bytes per second that the disk writes once its fast part is full."""
    fast_bytes: int = 0
    """Bytes that the fast part still takes; counts with ``slow_write`` only."""
    memory_bytes: int = 0
    """Most bytes that are held in memory too, and are read from there."""
    memory_read: float = 4e9
    """Bytes per second that are read from memory."""

    def __post_init__(self) -> None:
        rates = [self.read, self.write, self.memory_read]
        rates += [] if self.slow_write is None else [self.slow_write]
        if not min(rates) > 0:
            raise UsageError("the rates of a cache's disk must be above 0 bytes per second")
        if min(self.bytes, self.fast_bytes, self.memory_bytes) < 0:
            raise UsageError("the bytes of a cache cannot be negative")

    def written(self, seconds: float, before: float) -> float:
        """Return the bytes that the disk writes in ``seconds``, after ``before`` bytes of this job."""
        if self.slow_write is None:
            return seconds * self.write
        fast = max(0.0, self.fast_bytes - before)
        if seconds * self.write <= fast:
            return seconds * self.write
        return fast + (seconds - fast / self.write) * self.slow_write

    def seconds_to_write(self, nbytes: float, before: float) -> float:
        """Return the seconds that the disk writes ``nbytes`` for, after ``before`` bytes of this job."""
        if self.slow_write is None:
            return nbytes / self.write
        fast = min(nbytes, max(0.0, self.fast_bytes - before))
        return fast / self.write + (nbytes - fast) / self.slow_write

    def part_in_memory(self, held: float) -> float:
        """Return the part of ``held`` bytes of features that is in memory, where they are without their codec."""
        return min(1.0, self.memory_bytes / held) if held > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """A codec, as measured on samples of one cut."""

    name: str
    ratio: float
    """Raw bytes over encoded bytes; at least 1, as what would grow stays raw."""
    encode: float
    """Raw bytes per second and core."""
    decode: float
    """Raw bytes per second and core."""

    def __post_init__(self) -> None:
        if not (self.ratio >= 1 and self.encode > 0 and self.decode > 0):
            raise UsageError(f"codec {self.name}: needs a ratio of at least 1 and rates above 0")


MOST_RATE = 1e12
"""Bytes per second for what took no time that a clock shows."""
RAW = CodecCost(name="none", ratio=1.0, encode=3e9, decode=3e9)
"""Raw bytes, which are copied and have a checksum."""


@dataclass(frozen=True, kw_only=True)
class CutCodecs:
    """Codecs that may be used on the output of one layer."""

    cut: int
    codecs: tuple[CodecCost, ...]
    or_raw: bool = True
    """False where one of them is on in any case."""

    @classmethod
    def measured(cls, cut: int, figures: Iterable[CodecFigures], on: str | None = None) -> Self:
        """Return the codecs of ``cut``.

        Args:
            cut: the layer.
            figures: as they were measured on its features.
            on: name of the one that is on in any case; None where a plan may choose.
        """
        costs = tuple(
            CodecCost(
                name=found.name,
                ratio=max(1.0, found.ratio),
                encode=min(MOST_RATE, found.encode_rate),
                decode=min(MOST_RATE, found.decode_rate),
            )
            for found in figures
            if found.name != RAW.name and on in (None, found.name)
        )
        return cls(cut=cut, codecs=costs, or_raw=on is None)


@dataclass(frozen=True, kw_only=True)
class KeptShare:
    """Share of the samples that is kept at a cut; 0 for stored samples."""

    cut: int
    share: float
    split: int | None = None
    """Split that they came by, where they are rounded on the wire; None where any gives the same."""


@dataclass(frozen=True, kw_only=True)
class ReuseFacts:
    """Room for keeping, and facts about it."""

    client: Storage | None = None
    """Cache of the trainer; None for none."""
    server: Storage | None = None
    """Cache of the server for features; None where its operator has none."""
    client_kept: tuple[KeptShare, ...] = ()
    server_kept: tuple[KeptShare, ...] = ()
    codecs: tuple[CutCodecs, ...] = ()
    """Codecs that were measured at rest, by cut."""
    wire_codecs: tuple[CutCodecs, ...] = ()
    """Codecs that were measured on the wire, by split."""
    samples: int | None = None
    """Samples that all trainers of the job use, in all their views; None for those of one epoch of this one."""
    views: int = 1
    """Forms of each sample, which epochs have in turn: an epoch finds what was kept of its own."""
    trainers: int = 1
    refused: str = ""
    """Reason why features cannot be kept; empty if they can."""
    samples_refused: str = ""
    """Reason why stored samples cannot be kept here; empty if they can."""
    rounded: bool = False
    """True where the wire rounds: what is kept here is of one split, and serves no other."""

    def client_share(self, cut: int, split: int | None = None) -> float:
        """Return the share of the samples that is kept here at ``cut``, and may be used beside those of ``split``."""
        shares = (
            kept.share
            for kept in self.client_kept
            if kept.cut == cut and (split is None or kept.split in (None, split))
        )
        return max(shares, default=0.0)

    def server_share(self, cut: int) -> float:
        """Return the share of the samples that the server has kept at ``cut``."""
        return next((kept.share for kept in self.server_kept if kept.cut == cut), 0.0)

    def codecs_at(self, cut: int) -> tuple[CodecCost, ...]:
        """Return the codecs of what is kept at ``cut``, raw first if it may be."""
        return _codecs_of(self.codecs, cut)

    def wire_at(self, split: int) -> tuple[CodecCost, ...]:
        """Return the codecs of what crosses at ``split``, raw first if it may be; stored samples cross as they are."""
        return _codecs_of(self.wire_codecs, split) if split else (RAW,)

    def to_json(self) -> dict[str, Any]:
        """Return a document that :meth:`from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Any, where: str = "reuse") -> Self:
        """Parse ``document``; :class:`ConfigError` names the first field below ``where`` that is wrong."""
        if isinstance(document, Mapping):  # what is usual need not be said
            document = {"rounded": False, "views": 1, **document}
            for name in ("client_kept", "server_kept"):
                if isinstance(kept := document.get(name), list | tuple):
                    document[name] = [
                        {"split": None, **one} if isinstance(one, Mapping) else one for one in kept
                    ]
        return cast(Self, read_strictly(cls, document, where))


def _codecs_of(known: tuple[CutCodecs, ...], cut: int) -> tuple[CodecCost, ...]:
    found = [one for one in known if one.cut == cut]
    raw = (RAW,) if all(one.or_raw or not one.codecs for one in found) else ()
    return (*raw, *(codec for one in found for codec in one.codecs))


PRICES = {
    "egress": "price of a GB from the server to the trainer",
    "server_price": "price of an hour of the whole server at work",
    "trainer_price": "price of an hour of the trainer",
}
"""Settings that have a price, with a line about each."""
MOST_PRICE = 1e9
"""Largest price that is believed."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in any one currency; all 0 where money does not count."""

    egress: float = 0.0
    """Price of a GB (10^9 bytes) from the server to the trainer."""
    server: float = 0.0
    """Price of an hour of the whole server at work; it serves other jobs in its idle time."""
    trainer: float = 0.0
    """Price of an hour of the trainer's machine, at work or waiting."""

    def check(self, objective: Objective) -> None:
        """Raise :class:`UsageError` for money as the objective without any price."""
        if objective == "money" and self == Prices():
            raise UsageError("--objective money: give a price (--egress, --server-price or --trainer-price)")

    def of(self, received_bytes: float, server_seconds: float, seconds: float) -> float:
        """Return the money for bytes that crossed, the server's work and the job's duration."""
        return (
            received_bytes / 1e9 * self.egress
            + server_seconds / 3600 * self.server
            + seconds / 3600 * self.trainer
        )


SECONDS = Prices(trainer=3600.0)
"""Prices at which money is the seconds that a job takes."""
