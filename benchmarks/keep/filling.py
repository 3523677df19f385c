"""``benchmarks keep``, the part about filling: a run's forecast of its fill beside the fill, on throttled disks.

Each run is a session with an embedded server and features large enough for the disk to matter, which takes them as fast
as they come (:mod:`benchmarks.keep.fill_program`). The forecast is the one that the report of a run has.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.keep.disks import Disk
from benchmarks.keep.grid import of_kind
from benchmarks.keep.slow_folder import slow_folder
from benchmarks.testbed.cells import Results
from benchmarks.testbed.photos import write_crops
from benchmarks.testbed.signals import ended_in_order
from benchmarks.testbed.tiers import environment, last_line
from hapi.errors import TransportError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec

GOAL = 0.10
"""Goal: the forecast is within this part of the fill."""
FROM_PART = 0.25
"""Part that is kept when the forecast that counts is made."""
MODEL, FREEZE, SIDE = "shufflenet_v2_x0_5", 1, 224
SAMPLE_BYTES = 24 * 112 * 112 * 4
"""Bytes at that cut, after a layer that is quickly computed."""
BATCH = 16
EPOCHS = 100
"""Most of a fill."""
RUN_SECONDS = 900.0
_LOOK_SECONDS = 0.05
_DISK_BYTES = 3 << 30


@dataclass(frozen=True, kw_only=True)
class FillRun:
    """One fill."""

    name: str
    disk: Disk
    room: float = 2.0
    """Budget over the bytes of all features."""

    def budget(self, samples: int) -> int:
        """Return the bytes of the cache for that many samples."""
        return int(self.room * samples * SAMPLE_BYTES)


RUNS = (
    *(
        FillRun(name=f"{rate} MB/s", disk=Disk(read=rate * 1e6, write=rate * 1e6))
        for rate in (15, 50, 150, 500)
    ),
    FillRun(
        name="150, then 20 MB/s",
        disk=Disk(read=150e6, write=150e6, slow_write=20e6, fast_bytes=100_000_000),
    ),
    FillRun(name="50 MB/s, room for half", disk=Disk(read=50e6, write=50e6), room=0.5),
)


def measure_fills(results: Results, repeats: int, samples: int, tell: Callable[[str], None]) -> None:
    """Measure ``repeats`` fills with ``samples`` of each kind that ``results`` does not hold.

    Raises:
        UsageError: there are no throttled folders here.
    """
    fills = of_kind(results.records, "fill")
    done = [record["name"] for record in fills if record["samples"] == samples]
    todo = [run for number in range(repeats) for run in RUNS if done.count(run.name) <= number]
    if not todo:
        return
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="hapi-keep-") as name:
        folder = Path(name)
        store = _pack(folder, samples)
        for run in todo:
            with slow_folder(folder, _DISK_BYTES) as slow, slow.like(run.disk):
                found = _fill(run, samples, store, slow.path / "cache")
            shutil.rmtree(folder / "disk")
            results.add(found)
            tell(fill_line(found))


def _pack(folder: Path, samples: int) -> Path:
    write_crops(folder / "crops", samples, SIDE)
    options = PackOptions(transform=TransformSpec.for_image_size(SIDE), preprocess="uint8")
    pack(open_source(str(folder / "crops")), open_store(str(folder / "store")), "photos", options)
    return folder / "store"


def _fill(run: FillRun, samples: int, store: Path, cache: Path) -> dict[str, Any]:
    settings = {
        "store": str(store), "dataset": "photos", "model": MODEL, "weights": "random", "freeze": str(FREEZE),
        "split": "freeze", "bs": BATCH, "epochs": EPOCHS, "device": "cpu", "threads": 1, "cache": "on",
        "cache_dir": str(cache), "cache_size": run.budget(samples), "cache_memory": 0,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.keep.fill_program", json.dumps(settings)]
    watched = _Most(cache)
    with watched:
        done = subprocess.run(
            command, env=environment(""), capture_output=True, text=True, check=False, timeout=RUN_SECONDS
        )
    if done.returncode:
        raise TransportError(f"fill {run.name}: the session failed: {last_line(done.stderr)}")
    return {
        "kind": "fill",
        "name": run.name,
        "disk": asdict(run.disk),
        "samples": samples,
        "budget": run.budget(samples),
        "most_bytes": watched.bytes,
        **json.loads(done.stdout),
    }


class _Most:
    """Watches how many bytes a folder's files have on disk; use it in a with block."""

    def __init__(self, folder: Path) -> None:
        self.bytes = 0
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keep-budget", daemon=True)

    def __enter__(self) -> _Most:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._count()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self._count()

    def _count(self) -> None:
        found = 0
        for path in self._folder.rglob("*"):
            try:
                found += path.stat().st_size if path.is_file() else 0
            except OSError:  # it has another name by now
                continue
        self.bytes = max(self.bytes, found)


def counted_forecast(record: Mapping[str, Any]) -> float | None:
    """Return the seconds of the first forecast that was made when :data:`FROM_PART` was kept.

    Of a disk with a fast part it is the first one that knows the slow part: half was kept by then.
    """
    part = FROM_PART if record["disk"]["slow_write"] is None else 2 * FROM_PART
    return next((one["seconds"] for one in record["fill"]["forecasts"] if one["part"] >= part), None)


def fill_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line for a person."""
    forecast, seconds = counted_forecast(record), record["fill"]["seconds"]
    if forecast is None or seconds is None:
        return f"  {record['name']:<24} not full after {len(record['epochs'])} epochs"
    off = forecast / seconds - 1
    verdict = "within" if abs(off) <= GOAL else "missed"
    return (
        f"  {record['name']:<24}forecast {forecast:>7.1f} s, filled in {seconds:>7.1f} s ({off:+.1%}, {verdict}); "
        f"{record['most_bytes'] / 1e6:.0f} of {record['budget'] / 1e6:.0f} MB on disk at most"
    )


def fill_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the fills as lines for a person; none without one."""
    fills = of_kind(records, "fill")
    if not fills:
        return []
    within = [record for record in fills if _off(record) <= GOAL]
    over = sum(record["most_bytes"] > record["budget"] for record in fills)
    lines = [f"fills on throttled disks; goal: the forecast within {GOAL:.0%}"]
    lines += [fill_line(record) for record in fills]
    return [*lines, f"  within {GOAL:.0%}: {len(within)} of {len(fills)}; over the byte budget: {over}"]


def _off(record: Mapping[str, Any]) -> float:
    forecast, seconds = counted_forecast(record), record["fill"]["seconds"]
    return float("inf") if forecast is None or seconds is None else abs(forecast / seconds - 1)
