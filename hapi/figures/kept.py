"""Kept features in a run's page: epoch by epoch, and why some were not kept."""

from __future__ import annotations

from dataclasses import dataclass

from hapi.figures.fields import Fields
from hapi.figures.markup import escaped, section, table
from hapi.figures.reuse import mode_name
from hapi.units import format_bytes, format_duration, format_money


@dataclass(frozen=True, kw_only=True)
class KeptPart:
    """Features that an epoch read from the cache, and those that it put there."""

    epoch: int
    mode: str
    """Mode of keeping, as the report has it; empty where it does not say."""
    hits: int
    misses: int
    by_server: int
    """Samples among the misses whose features a server had kept."""
    kept: int
    skipped: int
    read: int
    """Bytes."""
    written: int
    seconds: float
    """Seconds of reading."""
    received: int
    """Bytes that crossed the network."""
    money: float | None
    """Money for the epoch; None without prices."""

    @classmethod
    def of(cls, f: Fields) -> KeptPart | None:
        """Parse an element of ``epochs``; None where a report has no such counters."""
        if not f.has("feature_hits"):
            return None
        return cls(
            epoch=f.integer("epoch"),
            mode=f.text("keeping") if f.has("keeping") else "",
            hits=f.integer("feature_hits"),
            misses=f.integer("feature_misses"),
            by_server=f.whole("server_kept_samples") or 0,
            kept=f.integer("features_kept"),
            skipped=f.integer("features_skipped"),
            read=f.integer("feature_bytes_read"),
            written=f.integer("feature_bytes_written"),
            seconds=f.seconds("feature_read_seconds"),
            received=f.integer("bytes_received"),
            money=f.optional("money"),
        )


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The report's part about kept features."""

    epochs: tuple[KeptPart, ...]
    why: str
    """Why features were not kept, or not all of them; empty when they were."""

    @classmethod
    def of(cls, f: Fields) -> Kept:
        """Parse the report's part; :class:`ConfigError` names the first field that is wrong."""
        cache = f.inner("cache") if f.has("cache") else None
        found = (KeptPart.of(e) for e in f.objects("epochs"))
        return cls(
            epochs=tuple(part for part in found if part is not None),
            why=cache.text("why") if cache is not None and cache.has("why") else "",
        )


def kept_features(kept: Kept) -> str:
    """Return the part of the page; empty where nothing was kept and nothing is to be said of it."""
    used = [part for part in kept.epochs if part.hits or part.by_server or part.kept or part.skipped]
    why = f"<p>Not kept, or not all: {escaped(kept.why)}.</p>" if kept.why else ""
    if not used:
        return section("Kept features", why) if why else ""
    rows = [_row(part) for part in kept.epochs]
    head: tuple[str, ...] = (
        "Epoch",
        "Kept as",
        "From the cache",
        "Missed",
        "The server had",
        "Computed",
        "Kept",
        "Left out",
        "Read",
        "Written",
        "Reading",
        "Received",
        "Money",
    )
    if all(part.money is None for part in kept.epochs):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return section(
        "Kept features", why + table("Samples and bytes of each epoch's features", head, rows, left={1})
    )


def _row(part: KeptPart) -> tuple[str, ...]:
    return (
        str(part.epoch),
        mode_name(part.mode) or "–",
        str(part.hits),
        str(part.misses),
        str(part.by_server),
        str(max(0, part.misses - part.by_server)),
        str(part.kept),
        str(part.skipped),
        format_bytes(part.read),
        format_bytes(part.written),
        format_duration(part.seconds),
        format_bytes(part.received),
        "–" if part.money is None else format_money(part.money),
    )
