"""``benchmarks directory``: bytes a sample, seconds to open, seconds to find samples, and the memory it takes.

A dataset's manifest and index are made in a temporary folder by the code that packs; there are no shards,
since nothing is read from them. They are opened by ``find_dataset`` in fresh processes: once with the file's
pages dropped from the system's memory, then several times with them there.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.testbed.conditions import Spread, conditions
from benchmarks.testbed.processes import drop_pages, process_figure
from hapi.data.index import SampleIndex, digest
from hapi.data.manifest import Manifest, SampleLayout, manifest_key
from hapi.data.sample_directory import ENTRY, SampleDirectory
from hapi.data.shards import Shard, ShardTable
from hapi.errors import UsageError
from hapi.ingest.transaction import shard_name
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec
from hapi.wire.samples import offsets_of

NAME = "synthetic"
GOAL_SAMPLES, GOAL_SECONDS, GOAL_BYTES = 10_000_000, 1.0, 16
"""Ten million samples in under a second, at most 16 bytes each."""
CALCULATED = 50_000_000
"""DLFS's own example: 50 million samples take 0.8 GB (section III-B2)."""
BATCHES = (256, 65536)
_SHARD_BYTES = 64 << 20
_CLASSES = 1000
_SLACK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class DirectorySettings:
    """Directory to make, and number of times to open it."""

    samples: int = GOAL_SAMPLES
    sample_bytes: int = 110_000
    """Mean bytes of a sample (uniform from 1 on); the default is about ImageNet's. It decides the number of
    shards.
    """
    processes: int = 3
    """Each opens the file cold once."""
    folder: str | None = None
    """Parent of the temporary folder; None: the system's place for such."""


@dataclass(frozen=True, kw_only=True)
class DirectoryResult:
    """Seconds, bytes and conditions; see :meth:`table`."""

    settings: DirectorySettings
    shards: int
    index_bytes: int
    manifest_bytes: int
    cold: Spread
    """Seconds of the first opening, the file's pages not in memory before."""
    cold_from_disk: int
    """Bytes that the process fetched from the device meanwhile; the smallest of all processes."""
    warm: Spread
    parts: dict[str, Spread]
    """Seconds of the parts of a warm opening."""
    lookup: dict[int, Spread]
    """Nanoseconds a sample, by batch size."""
    resident: dict[str, int]
    """Bytes that a process grew by: "private", "mapped" (pages of a file, which the system may take back)."""
    conditions: dict[str, Any]

    @property
    def directory_bytes(self) -> int:
        """Bytes of the directory."""
        return self.settings.samples * ENTRY.itemsize

    @property
    def reached(self) -> bool:
        """True when it opened in time, warm and cold."""
        return max(self.cold.high, self.warm.high) < GOAL_SECONDS

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        return {
            "benchmark": "directory",
            "settings": {k: v for k, v in asdict(self.settings).items() if k != "folder"},
            "shards": self.shards,
            "bytes_per_sample": {
                "directory": ENTRY.itemsize,
                "with_labels_and_checksums": self.index_bytes / self.settings.samples,
            },
            "index_bytes": self.index_bytes,
            "manifest_bytes": self.manifest_bytes,
            "open_seconds": {"cold": self.cold.to_json(), "warm": self.warm.to_json()},
            "cold_bytes_from_disk": self.cold_from_disk,
            "warm_open_parts_seconds": {name: s.to_json() for name, s in self.parts.items()},
            "lookup_nanoseconds_per_sample": {str(b): s.to_json() for b, s in self.lookup.items()},
            "resident_bytes": self.resident,
            "calculated": self.calculated(),
            "conditions": self.conditions,
        }

    def calculated(self) -> dict[str, float]:
        """Return the figures for 50 million samples, in proportion to those measured here."""
        factor = CALCULATED / self.settings.samples
        return {
            "samples": CALCULATED,
            "directory_bytes": CALCULATED * ENTRY.itemsize,
            "index_bytes": self.index_bytes * factor,
            "open_seconds_cold": self.cold.median * factor,
            "open_seconds_warm": self.warm.median * factor,
        }

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        n = self.settings.samples
        lines = [
            f"{n} samples in {self.shards} shards",
            f"{'bytes a sample':<34}{ENTRY.itemsize:9d}      with labels, checksums {self.index_bytes / n:.1f}",
            f"{'index, manifest':<34}{self.index_bytes / 1e6:9.1f} MB   {self.manifest_bytes / 1e6:.1f} MB",
            f"{'':<34}{'median':>9}      {'min':>9}{'max':>9}",
        ]
        lines += [
            _line("open, cold", self.cold, "s"),
            _line("open, warm", self.warm, "s"),
            *(_line(f"  of it {name}", s, "s") for name, s in self.parts.items()),
            *(_line(f"find {size} samples, each", s, "ns") for size, s in self.lookup.items()),
        ]
        lines.append(f"{'fetched from the disk when cold':<34}{self.cold_from_disk / 1e6:9.1f} MB")
        lines.append(
            f"{'memory: pages of a file, own':<34}{self.resident['mapped'] / 1e6:9.1f} MB   "
            f"{self.resident['private'] / 1e6:.1f} MB"
        )
        if n == GOAL_SAMPLES:
            verdict = "reached" if self.reached else "missed"
            lines.append(f"goal: open in under {GOAL_SECONDS:.0f} s, cold and warm: {verdict}")
        if n != CALCULATED:
            c = self.calculated()
            lines.append(
                f"by calculation {CALCULATED}: directory {c['directory_bytes'] / 1e9:.2f} GB, index "
                f"{c['index_bytes'] / 1e9:.2f} GB, open {c['open_seconds_warm']:.2f} s warm, "
                f"{c['open_seconds_cold']:.2f} s cold"
            )
        return lines


def _line(name: str, s: Spread, unit: str) -> str:
    digits = 3 if unit == "s" else 1
    return f"{name:<34}{s.median:9.{digits}f} {unit:<3}  {s.low:9.{digits}f}{s.high:9.{digits}f}"


def measure_directory(
    settings: DirectorySettings, tell: Callable[[str], None] = lambda line: None
) -> DirectoryResult:
    """Make the dataset, open it in fresh processes, find samples.

    Raises :class:`UsageError` when the folder has no room for it.
    """
    found = conditions()
    try:
        with tempfile.TemporaryDirectory(prefix="hapi-directory-", dir=settings.folder) as folder:
            _check_room(folder, settings.samples)
            tell(f"making the index of {settings.samples} samples in {folder}")
            manifest = make_index(folder, settings)
            gc.collect()
            index = Path(folder, manifest.index_key)
            answers = []
            for number in range(settings.processes):
                tell(f"opening it in process {number + 1} of {settings.processes}")
                drop_pages(index)
                arguments = (folder, NAME, *map(str, BATCHES))
                answers.append(
                    process_figure(
                        "benchmarks.storage.directory_reader", *arguments, what="opening the index"
                    )
                )
            manifest_bytes = Path(folder, manifest_key(NAME)).stat().st_size
    except OSError as error:
        raise UsageError(f"{settings.folder or tempfile.gettempdir()}: {error.strerror or error}") from error
    return DirectoryResult(
        settings=settings,
        shards=manifest.shards,
        index_bytes=manifest.index_size,
        manifest_bytes=manifest_bytes,
        cold=Spread.of([a["cold"] for a in answers]),
        cold_from_disk=min(a["from_disk"] for a in answers),
        warm=Spread.of([s for a in answers for s in a["warm"]]),
        parts={k: Spread.of([s for a in answers for s in a["parts"][k]]) for k in answers[0]["parts"]},
        lookup={b: Spread.of([s for a in answers for s in a["lookup"][str(b)]]) for b in BATCHES},
        resident={k: max(a["resident"][k] for a in answers) for k in answers[0]["resident"]},
        conditions=found,
    )


def _check_room(folder: str, samples: int) -> None:
    needed = samples * 2 * ENTRY.itemsize + _SLACK_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"{folder}: {samples} samples need {needed / 1e9:.1f} GB there, {free / 1e9:.1f} GB are free; "
            "pass --folder, or fewer --samples"
        )


def make_index(folder: str, settings: DirectorySettings) -> Manifest:
    """Write index and manifest of samples of random lengths (the same in every run) into the store ``folder``."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * settings.sample_bytes, settings.samples, endpoint=False)
    directory = SampleDirectory.empty(settings.samples)
    ends = offsets_of(lengths)
    shards: list[Shard] = []
    first = 0
    while first < settings.samples:
        stop = int(np.searchsorted(ends, ends[first] + _SHARD_BYTES, side="right")) - 1
        stop = min(max(stop, first + 1), settings.samples)
        directory.write(first, len(shards), ends[first:stop] - ends[first], lengths[first:stop])
        size = int(ends[stop] - ends[first])
        shards.append(Shard(key=shard_name(len(shards)), size=size, checksum=0, count=stop - first))
        first = stop
    label = rng.integers(0, _CLASSES, settings.samples)
    checksum = rng.integers(0, 1 << 64, settings.samples, dtype=np.uint64)
    table = ShardTable.of(shards)
    encoded = SampleIndex(directory, label, checksum, table).to_bytes()
    manifest = Manifest(
        name=NAME,
        pack="pack",
        count=settings.samples,
        classes=tuple(f"class-{number}" for number in range(_CLASSES)),
        layout=SampleLayout(kind="encoded"),
        transform=TransformSpec(),
        index_size=len(encoded),
        index_xxh3=digest(encoded),
        shards=len(table),
        total_bytes=table.total_bytes,
        source="python -m benchmarks directory",
        created="",
    )
    store = open_store(folder)
    store.put(manifest.index_key, encoded)
    store.put(manifest_key(NAME), manifest.to_bytes())
    return manifest
