"""``benchmarks samples``: samples/s from a disk, by sample size (DLFS, section IV-B, Figure 6).

Every figure is a process of its own, all from the same bytes on the same disk in one run, with a cold and a warm page
cache, and with the quality of the order (:mod:`benchmarks.storage.shuffle_quality`) beside the rate.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.storage.samples_data import make_data
from benchmarks.storage.samples_peers import LIBRARIES, missing
from benchmarks.testbed.conditions import conditions, rotated
from benchmarks.testbed.processes import process_figure
from hapi.data.reading.read_cost import LOCAL_COST
from hapi.errors import UsageError

SIZES = (512, 4 << 10, 16 << 10, 128 << 10, 1 << 20, 0)
"""Bytes of a sample; 0 is the mix."""
RAW, CHECKED = ("raw 1", "raw 8"), ("raw 1 checked", "raw 8 checked")
READERS = ("hapi chunks", "hapi full", "files 1", "files 8", *RAW, *CHECKED, *LIBRARIES)
_TITLES = {"hapi chunks": "Hapi, chunk windows", "hapi full": "Hapi, full permutation"} | {
    "files 1": "a file each, 1 thread", "files 8": "a file each, 8 threads",
    "raw 1": "raw preads, 1 thread", "raw 8": "raw preads, 8 threads",
    "raw 1 checked": "raw, checked, 1 thread", "raw 8 checked": "raw, checked, 8 threads",
    "tars": "WebDataset", "mds": "MosaicML Streaming", "litdata": "LitData",
}  # fmt: skip
LARGE = 128 << 10
GOAL_FILES, GOAL_PEER, GOAL_RAW, GOAL_LOOKUP = 30.0, 50.0, 0.95, 0.01
_COLD_MOST = 0.05
"""Share of pages in memory up to which a page cache counts as cold."""
_EQUAL = 0.05
"""Difference of shuffle qualities up to which they count as equal."""
BATCH_BYTES = 8 << 20
"""A batch has fewer samples than wanted when they are larger than this together, but eight."""


@dataclass(frozen=True, kw_only=True)
class SamplesSettings:
    """Measurements to take."""

    sizes: tuple[int, ...] = SIZES
    total: int = 256 << 20
    """Bytes of each dataset."""
    seconds: float = 2.0
    """Longest time of a figure; with a cold page cache the epoch's end is its end, too."""
    rounds: int = 3
    """Turns of each reader."""
    batch: int = 256
    folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class SamplesRow:
    """One reader at one size: medians over the rounds."""

    size: int
    reader: str
    cold: bool
    rate: float
    """Samples per second."""
    lowest: float
    highest: float
    cpu_us: float
    """CPU microseconds of the process for a sample, all threads."""
    resident: float
    """Largest share of the files' pages in memory when a clock started."""
    quality: float | None = None
    """Quality of the order's shuffle; None where the epoch was not read to its end."""
    lookup_share: float | None = None
    """Time that the sample directory takes over the time of reading."""


@dataclass(frozen=True, kw_only=True)
class SamplesResult:
    """All figures of one run, and its conditions."""

    settings: SamplesSettings
    rows: tuple[SamplesRow, ...]
    missing: tuple[str, ...]
    """Readers whose library is not installed."""
    conditions: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        return {
            "benchmark": "samples",
            "settings": asdict(self.settings) | {"folder": None},
            "rows": [asdict(row) for row in self.rows],
            "not_installed": list(self.missing),
            "goals": self.goals(),
            "conditions": self.conditions,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        head = (
            f"{'size':>8}  {'reader':<24}{'cold/s':>11}{'CPU us':>9}{'warm/s':>12}{'CPU us':>9}{'quality':>9}"
        )
        lines = [f"{head}{'look-up':>9}"]
        for size in self.settings.sizes:
            for reader in READERS:
                lines.append(f"{size_name(size):>8}  {_TITLES[reader]:<24}{self._figures(size, reader)}")
        return [*lines, *self.goals()]

    def _figures(self, size: int, reader: str) -> str:
        if reader in self.missing:
            return "  not installed"
        cold, warm = self.row(size, reader, True), self.row(size, reader, False)
        rate = f"{cold.rate:,.0f}" if cold.resident <= _COLD_MOST else "not cold"
        score = "" if warm.quality is None else f"{warm.quality:.3f}"
        lookup = "" if warm.lookup_share is None else f"{warm.lookup_share:.2%}"
        return f"{rate:>11}{cold.cpu_us:>9.2f}{warm.rate:>12,.0f}{warm.cpu_us:>9.2f}{score:>9}{lookup:>9}"

    def row(self, size: int, reader: str, cold: bool) -> SamplesRow:
        """The figure of one reader at one size."""
        return next(r for r in self.rows if (r.size, r.reader, r.cold) == (size, reader, cold))

    def goals(self) -> list[str]:
        """Return a line for each goal that the figures can decide."""
        if self.settings.total < 2 * LOCAL_COST.cache_bytes:
            kept = f"Hapi keeps up to {LOCAL_COST.cache_bytes >> 20} MiB of small samples itself"
            note = f"datasets of {self.settings.total >> 20} MiB: {kept}, so its figures are of copying"
            return [f"{note}; take a larger --total"]
        lines = []
        if 512 in self.settings.sizes:
            ratio = self.row(512, "hapi chunks", True).rate / self.row(512, "files 8", True).rate
            text = f"512 B cold over a file each with 8 threads: {ratio:.1f}"
            lines.append(verdict(text, ratio >= GOAL_FILES, "30"))
            lines += self._beside_peers()
        for size in (s for s in self.settings.sizes if s == 0 or s >= LARGE):
            for cold, state in ((True, "cold"), (False, "warm")):
                ours = self.row(size, "hapi full", cold).rate
                ratio, checked = (
                    ours / max(self.row(size, reader, cold).rate for reader in readers)
                    for readers in (RAW, CHECKED)
                )
                text = (
                    f"{size_name(size)} {state}, full permutation over the best raw reads: {ratio:.2f}, "
                    f"over those with a checksum of each sample, as ours: {checked:.2f}"
                )
                lines.append(verdict(text, ratio >= GOAL_RAW, "0.95 over raw reads"))
        for cold, state in ((True, "cold"), (False, "warm")):
            share = max(row.lookup_share or 0.0 for row in self.rows if row.cold == cold)
            text = f"look-up, largest share of {state} reading: {share:.2%}"
            lines.append(verdict(text, share <= GOAL_LOOKUP, "1%"))
        return lines

    def _beside_peers(self) -> list[str]:
        """The goal beside the fastest peer at 512 B that shuffles as well, as far as that is known, and was cold."""
        ours = self.row(512, "hapi chunks", True)
        rows = [self.row(512, form, True) for form in LIBRARIES if form not in self.missing]
        peers = [
            row
            for row in rows
            if row.resident <= _COLD_MOST and (row.quality or 1.0) >= (ours.quality or 0.0) - _EQUAL
        ]
        if not peers:
            return []
        best = max(peers, key=lambda row: row.rate)
        known = [f"{row.quality:.2f}" if row.quality is not None else "not known" for row in (ours, best)]
        ratio = ours.rate / best.rate
        text = (
            f"512 B cold (quality {known[0]}) over {_TITLES[best.reader]} (quality {known[1]}): {ratio:.1f}"
        )
        return [verdict(text, ratio >= GOAL_PEER, "50")]


def verdict(text: str, reached: bool, goal: str) -> str:
    """A line about a goal."""
    return f"{text} (goal {goal}): {'reached' if reached else 'missed'}"


def size_name(size: int) -> str:
    """A sample size for a person."""
    if size == 0:
        return "mix"
    return f"{size} B" if size < 1024 else f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def batch_of(wanted: int, mean: float) -> int:
    """Samples of a batch: as many as wanted, but fewer of large ones."""
    return min(wanted, max(8, int(BATCH_BYTES / mean)))


def measure_samples(settings: SamplesSettings, tell: Callable[[str], None]) -> SamplesResult:
    """Measure every reader at every size; :class:`HapiError` when one of them fails."""
    if not hasattr(os, "posix_fadvise"):
        raise UsageError("python -m benchmarks samples needs Linux: the page cache cannot be emptied here")
    absent = missing()
    forms = [form for form in LIBRARIES if form not in absent]
    rows: list[SamplesRow] = []
    for size in settings.sizes:
        with tempfile.TemporaryDirectory(prefix="hapi-samples-", dir=settings.folder) as folder:
            lengths = make_data(Path(folder), size, settings.total, forms)
            batch = batch_of(settings.batch, lengths.mean())
            spec = {"folder": folder, "seconds": settings.seconds, "batch": batch}
            tell(f"{size_name(size)}: {len(lengths)} samples, batches of {batch}")
            rows += _rounds(settings, size, [r for r in READERS if r not in absent], spec, tell)
    return SamplesResult(settings=settings, rows=tuple(rows), missing=absent, conditions=conditions())


def _rounds(
    settings: SamplesSettings,
    size: int,
    readers: list[str],
    spec: dict[str, Any],
    tell: Callable[[str], None],
) -> Iterator[SamplesRow]:
    figures: dict[tuple[str, bool], list[dict[str, Any]]] = {
        (r, c): [] for r in readers for c in (True, False)
    }
    for round_index in range(settings.rounds):
        for reader in rotated(readers, round_index):
            for cold in (True, False):
                asked = json.dumps(spec | {"reader": reader, "cold": cold})
                found = process_figure("benchmarks.storage.samples_read", asked, what=f"reader {reader!r}")
                figures[reader, cold].append(found)
    for (reader, cold), rounds in figures.items():
        rates = [f["rate"] for f in rounds]
        shares = [f["lookup_share"] for f in rounds if "lookup_share" in f]
        row = SamplesRow(
            size=size,
            reader=reader,
            cold=cold,
            rate=statistics.median(rates),
            lowest=min(rates),
            highest=max(rates),
            cpu_us=statistics.median(f["cpu_us"] for f in rounds),
            resident=max(f["resident"] for f in rounds),
            quality=next((f["quality"] for f in rounds if f["quality"] is not None), None),
            lookup_share=statistics.median(shares) if shares else None,
        )
        tell(
            f"  {_TITLES[reader]}, {'cold' if cold else 'warm'}: {row.rate:,.0f}/s, {row.cpu_us:.2f} us of CPU"
        )
        yield row
