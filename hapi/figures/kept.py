"""Kept features in a run's page: epoch by epoch, and why some were not kept."""

from __future__ import annotations

from dataclasses import dataclass

from hapi.figures.fields import Fields
from hapi.figures.markup import escaped, section, table
from hapi.units import format_bytes, format_duration


@dataclass(frozen=True, kw_only=True)
class KeptPart:
    """Features that an epoch read from the cache, and those that it put there."""

    epoch: int
    hits: int
    misses: int
    kept: int
    skipped: int
    read: int
    """Bytes."""
    written: int
    seconds: float
    """Seconds of reading."""

    @classmethod
    def of(cls, f: Fields) -> KeptPart | None:
        """Parse an element of ``epochs``; None where a report has no such counters."""
        if not f.has("feature_hits"):
            return None
        return cls(
            epoch=f.integer("epoch"),
            hits=f.integer("feature_hits"),
            misses=f.integer("feature_misses"),
            kept=f.integer("features_kept"),
            skipped=f.integer("features_skipped"),
            read=f.integer("feature_bytes_read"),
            written=f.integer("feature_bytes_written"),
            seconds=f.seconds("feature_read_seconds"),
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
    used = [part for part in kept.epochs if part.hits or part.kept or part.skipped]
    why = f"<p>Not kept, or not all: {escaped(kept.why)}.</p>" if kept.why else ""
    if not used:
        return section("Kept features", why) if why else ""
    rows = [
        (
            str(part.epoch),
            str(part.hits),
            str(part.misses),
            str(part.kept),
            str(part.skipped),
            format_bytes(part.read),
            format_bytes(part.written),
            format_duration(part.seconds),
        )
        for part in kept.epochs
    ]
    head = ("Epoch", "From the cache", "Computed", "Kept", "Left out", "Read", "Written", "Reading")
    return section("Kept features", why + table("Samples and bytes of each epoch's features", head, rows))
