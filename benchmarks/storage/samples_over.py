"""``benchmarks samples --over http|swift``: samples/s through hapi-server and from an object store.

The comparison, in the same run and by turns, is a plain download of large ranges of as many bytes with the
same number of connections. From Swift these are plain ranges of the same objects. Hapi-server offers no such
thing; the largest plain bodies that it can send are requests for samples of 1 MiB, and the goal is measured
by these. A server of files, which hands pages of the system's cache to the network without looking at them
(sendfile), stands beside.

Client and serving side have their own cores; everything is warm (Swift drops large objects from memory by
itself, for all readers alike).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.storage.samples import SamplesSettings, batch_of, size_name, verdict
from benchmarks.storage.samples_data import LARGE, NAME, pack_data
from benchmarks.storage.samples_fetch import SEED
from benchmarks.storage.samples_read import order_score
from benchmarks.storage.samples_served import LoopbackSwift, Served, served_over_http, served_over_swift
from benchmarks.testbed.conditions import conditions, rotated
from benchmarks.testbed.loose import LooseBed
from benchmarks.testbed.tiers import environment, last_line
from hapi.data.dataset import find_dataset
from hapi.data.epoch_order import FULL, Shuffle
from hapi.data.reading.read_cost import LOCAL_COST, REMOTE_COST
from hapi.errors import HapiError
from hapi.store.open import open_store

PLAIN, BODIES = "plain ranges", "server large"
BASES = {"http": BODIES, "swift": PLAIN}
"""Quantity that the goal is a share of."""
READERS = {
    "http": (PLAIN, BODIES, "server chunks", "server full", "server trainer"),
    "swift": (PLAIN, "mount chunks", "mount full", "server chunks", "server full", "server trainer"),
}
_TITLES = {
    PLAIN: "plain ranges, not looked at",
    BODIES: "hapi-server, 1 MiB samples",
    "mount chunks": "mount, chunk windows",
    "mount full": "mount, full permutation",
    "server chunks": "hapi-server, chunk windows",
    "server full": "hapi-server, full permutation",
    "server trainer": "hapi-server, a trainer's batches",
}
CONNECTIONS = {"http": 2, "swift": 8}
"""Connections of every reader: they saturate the two cores; a store gets as many requests at once."""
COSTS = {"http": LOCAL_COST, "swift": REMOTE_COST}
"""Store that the serving side reads from; chunk caches, in ``mount`` and in hapi-server, have their default
sizes.
"""
GOAL = 0.8
_TIMEOUT = 900.0


@dataclass(frozen=True, kw_only=True)
class OverSettings(SamplesSettings):
    """Settings as for a disk; ``seconds`` are of each reader in each round, ``batch`` is that of ``mount``."""

    over: str
    """``http`` or ``swift``."""


@dataclass(frozen=True, kw_only=True)
class OverRow:
    """One reader at one size: medians over the rounds."""

    size: int
    reader: str
    rate: float
    """Samples per second; of the plain download, its bytes over the samples' mean length."""
    lowest: float
    highest: float
    quality: float | None
    """Quality of the order's shuffle; None for the plain download, which has none, and for too few samples.
    """
    megabytes: float
    """Million bytes of samples per second."""
    cpu_us: float
    """CPU microseconds of the client's process for a sample."""
    server_cpu_us: float
    """The same of all processes that serve."""


@dataclass(frozen=True, kw_only=True)
class OverResult:
    """All figures of one run, and its conditions."""

    settings: OverSettings
    rows: tuple[OverRow, ...]
    conditions: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The figures as a document."""
        return {
            "benchmark": "samples-over",
            "settings": asdict(self.settings) | {"folder": None},
            "connections": CONNECTIONS[self.settings.over],
            "cache_bytes": COSTS[self.settings.over].cache_bytes,
            "share_of": BASES[self.settings.over],
            "rows": [asdict(row) | {"share": self.share(row)} for row in self.rows],
            "goals": self.goals(),
            "conditions": self.conditions,
        }

    def share(self, row: OverRow) -> float:
        """The reader's rate over what the goal is a share of."""
        return row.rate / self.row(row.size, BASES[self.settings.over]).rate

    def row(self, size: int, reader: str) -> OverRow:
        """The figure of one reader at one size."""
        return next(row for row in self.rows if (row.size, row.reader) == (size, reader))

    def table(self) -> list[str]:
        """The figures as lines for a person."""
        head = (
            f"{'size':>8}  {'reader over ' + self.settings.over:<30}{'samples/s':>12}{'MB/s':>8}{'share':>7}"
        )
        lines = [f"{head}{'quality':>9}{'client us':>11}{'server us':>11}"]
        for r in self.rows:
            score = "" if r.quality is None else f"{r.quality:.2f}"
            lines.append(
                f"{size_name(r.size):>8}  {_TITLES[r.reader]:<30}{r.rate:>12,.0f}{r.megabytes:>8,.0f}"
                f"{self.share(r):>7.0%}{score:>9}{r.cpu_us:>11.2f}{r.server_cpu_us:>11.2f}"
            )
        return [*lines, *self.goals()]

    def goals(self) -> list[str]:
        """Return a line about the goal for each size and shuffle."""
        lines = []
        for size in self.settings.sizes:
            for shuffle in ("chunks", "full"):
                rows = [row for row in self.rows if row.size == size and row.reader.endswith(f" {shuffle}")]
                best = max(rows, key=lambda row: row.rate)
                base = _TITLES[BASES[self.settings.over]]
                text = f"{size_name(size)}, {_TITLES[best.reader]} over {base}: {self.share(best):.0%}"
                lines.append(verdict(text, self.share(best) >= GOAL, f"{GOAL:.0%}"))
        return lines


def measure_over(settings: OverSettings, tell: Callable[[str], None]) -> OverResult:
    """Measure every reader at every size by turns; :class:`HapiError` when one of them fails.

    :class:`UsageError` when Swift is not installed.
    """
    rows: list[OverRow] = []
    found = conditions()
    bed = LooseBed("its link is not the limit")
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hapi-over-", dir=settings.folder))
        )
        stack.enter_context(bed)
        swift = (
            stack.enter_context(LoopbackSwift(bed, folder / "swift")) if settings.over == "swift" else None
        )
        for size in settings.sizes:
            with _served(bed, folder / str(size), settings, size, swift) as (served, spec):
                tell(f"{size_name(size)}: samples of {spec['mean']:.0f} bytes in the mean")
                rows += _rounds(bed, settings, size, served, spec, tell)
    found["bed"] = bed.describe()
    return OverResult(settings=settings, rows=tuple(rows), conditions=found)


@contextlib.contextmanager
def _served(
    bed: LooseBed, folder: Path, settings: OverSettings, size: int, swift: LoopbackSwift | None
) -> Iterator[tuple[Served, dict[str, Any]]]:
    """The data of one size, served; and what a client's process is told of it."""
    folder.mkdir(parents=True)
    store = str(folder / "store") if swift is None else swift.url
    pack_data(store, size, settings.total)
    if swift is None:
        pack_data(store, 1 << 20, settings.total, LARGE)
    dataset, cost = find_dataset(open_store(store), NAME), COSTS[settings.over]
    spec = {
        "shards": [(dataset.shard_key(k), dataset.shards[k].size) for k in range(len(dataset.shards))],
        "mean": (mean := dataset.total_bytes / dataset.count),
        "count": dataset.count,
        "shuffles": {
            "chunks": (default_shuffle := str(cost.default_shuffle(mean))),
            "trainer": default_shuffle,
            "full": "full",
            "large": "full",
        },
        "seconds": settings.seconds,
        "batch": batch_of(settings.batch, mean),
        "connections": CONNECTIONS[settings.over],
    }
    with contextlib.ExitStack() as stack:
        way = served_over_http(bed, folder) if swift is None else served_over_swift(bed, folder, swift)
        yield stack.enter_context(way), spec
    remove = open_store(store)
    for info in remove.list(f"datasets/{NAME}"):
        remove.delete(info.key)


def _rounds(
    bed: LooseBed,
    settings: OverSettings,
    size: int,
    served: Served,
    spec: dict[str, Any],
    tell: Callable[[str], None],
) -> Iterator[OverRow]:
    readers = READERS[settings.over]
    figures: dict[str, list[dict[str, Any]]] = {reader: [] for reader in readers}
    for round_index in range(settings.rounds):
        for reader in rotated(readers, round_index):
            pids = served.pids if reader.startswith("server") else served.plain_pids
            asked = {"reader": reader, "server": served.server, "plain": served.plain, "pids": pids}
            figures[reader].append(_figure(bed, spec | asked | {"token": served.token}))
    qualities = {
        variant: order_score(Shuffle.parse(text, FULL).sequence(SEED, 0, spec["count"]), spec["batch"])
        for variant, text in spec["shuffles"].items()
    }
    for reader, found in figures.items():
        median = {name: statistics.median(f[name] for f in found) for name in found[0]}
        row = OverRow(
            size=size,
            reader=reader,
            rate=median["rate"],
            lowest=min(f["rate"] for f in found),
            highest=max(f["rate"] for f in found),
            quality=qualities.get(reader.partition(" ")[2]),
            megabytes=median["rate"] * spec["mean"] / 1e6,
            cpu_us=median["cpu_us"],
            server_cpu_us=median["server_cpu_us"],
        )
        tell(f"  {_TITLES[reader]}: {row.rate:,.0f}/s, {row.megabytes:,.0f} MB/s")
        yield row


def _figure(bed: LooseBed, spec: dict[str, Any]) -> dict[str, Any]:
    process = bed.start(
        "client",
        [sys.executable, "-m", "benchmarks.storage.samples_fetch", json.dumps(spec)],
        env=environment(spec["token"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    said, complaint = process.communicate(timeout=_TIMEOUT)
    if process.returncode:
        raise HapiError(f"reader {spec['reader']!r} failed: {last_line(complaint)}")
    found: dict[str, Any] = json.loads(said)
    return found
