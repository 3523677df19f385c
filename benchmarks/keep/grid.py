"""Cells of the replay: recorded profiles under links, disks, rooms and codecs. One grid is held, one is to work on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.keep.disks import Disk
from benchmarks.keep.machines import SideCache
from benchmarks.keep.whole_job import World
from benchmarks.split.replay import mean_profile
from benchmarks.testbed.cells import PAPER_MODELS, cells_of, read
from hapi.errors import UsageError
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.facts import CodecCost, CutCodecs

MEASUREMENTS = Path(__file__).resolve().parents[2] / "docs" / "measurements"
SWEEP, CODECS = "sweep-2core-2026-11-23.jsonl", "codecs-2core-2026-11-24.json"
RECORDED_BANDWIDTH = 40e6
"""Link of the cells whose profiles are taken."""
SAMPLES = 8192
COS_BATCH = 64
"""Samples of a forward pass: one frame for each request."""
MEMORY_BYTES = 64 << 20
DISKS: Mapping[str, Disk] = {
    "15 MB/s": Disk(read=15e6, write=15e6),
    "50 MB/s": Disk(read=100e6, write=50e6),
    "150 MB/s": Disk(read=300e6, write=150e6),
    "500 MB/s": Disk(read=1e9, write=500e6),
    "500, then 40 MB/s": Disk(read=500e6, write=500e6, slow_write=40e6, fast_bytes=100_000_000),
}


@dataclass(frozen=True, kw_only=True)
class KeepCell:
    """One job under one set of conditions."""

    model: str
    bs: int
    bandwidth: float
    """Bits per second."""
    epochs: int
    disk: str
    """Name in :data:`DISKS`."""
    room: float
    """Budget over the raw bytes of all features at the last split."""
    memory: bool
    """Whether :data:`MEMORY_BYTES` of rows are held in memory too."""
    codecs: bool
    """Whether features may be encoded."""
    speed: int
    """Times that both sides compute faster than was recorded."""
    beside_store: bool
    """Whether the server keeps features, too, on a disk of its own."""

    @property
    def key(self) -> str:
        """Unlike that of any other cell."""
        return "/".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class KeepGrid:
    """Values of each condition; the cells are drawn from all their combinations."""

    models: tuple[str, ...] = PAPER_MODELS
    batches: tuple[int, ...] = (32, 64)
    bandwidths: tuple[float, ...] = (15e6, 60e6, 250e6, 1e9, 10e9)
    epochs: tuple[int, ...] = (1, 2, 5, 10, 30, 100)
    disks: tuple[str, ...] = tuple(DISKS)
    rooms: tuple[float, ...] = (0.3, 0.7, 4.0)
    memory: tuple[bool, ...] = (False, True)
    codecs: tuple[bool, ...] = (False, True)
    speeds: tuple[int, ...] = (1, 10)
    beside_store: tuple[bool, ...] = (False, True)
    seed: int = 28

    def cells(self, count: int) -> list[KeepCell]:
        """Return ``count`` cells, drawn without repeats; a larger count begins with the same ones."""
        every = list(
            product(
                self.models, self.batches, self.bandwidths, self.epochs, self.disks, self.rooms,
                self.memory, self.codecs, self.speeds, self.beside_store,
            )
        )  # fmt: skip
        random.Random(self.seed).shuffle(every)
        names = (
            "model", "bs", "bandwidth", "epochs", "disk", "room", "memory", "codecs", "speed", "beside_store",
        )  # fmt: skip
        return [KeepCell(**dict[str, Any](zip(names, one, strict=True))) for one in every[:count]]


HELD = KeepGrid()
"""Nothing is ever changed in order to be better here."""
TRIAL = KeepGrid(
    batches=(16, 48), bandwidths=(10e6, 30e6, 120e6, 500e6, 3e9), epochs=(1, 3, 8, 20, 60), rooms=(0.2, 0.5, 2.0),
    speeds=(1, 5), seed=1,
)  # fmt: skip
"""Grid to find faults on: other profiles, links, numbers of epochs and rooms."""


@cache
def recorded() -> dict[tuple[str, int], Profile]:
    """Return the mean profile of each model and batch of the kept sweep."""
    records = list(read(MEASUREMENTS / SWEEP))
    cells, found = cells_of(records), dict[tuple[str, int], list[Profile]]()
    for record in records:
        if record["kind"] == "plan" and cells[record["cell"]].bandwidth == RECORDED_BANDWIDTH:
            cell = cells[record["cell"]]
            found.setdefault((cell.model, cell.bs), []).append(Profile.from_json(record["profile"]))
    return {key: mean_profile(profiles) for key, profiles in found.items()}


@cache
def measured_codecs() -> dict[str, tuple[CutCodecs, ...]]:
    """Return the measured codecs of each model in the kept table, by cut."""
    rows = json.loads((MEASUREMENTS / CODECS).read_text(encoding="utf-8"))["rows"]
    found: dict[str, list[CutCodecs]] = {}
    for row in rows:
        if row["dtype"] == "float32":
            codecs = tuple(map(_codec, row["figures"]))
            found.setdefault(row["model"], []).append(CutCodecs(cut=row["cut"], codecs=codecs))
    return {model: tuple(cuts) for model, cuts in found.items()}


def _codec(figures: Mapping[str, Any]) -> CodecCost:
    return CodecCost(
        name=figures["name"],
        ratio=max(1.0, figures["ratio"]),
        encode=float(figures["encode_rate"]),
        decode=float(figures["decode_rate"]),
    )


def codecs_of(model: str, cuts: int, speed: float) -> tuple[CutCodecs, ...]:
    """Return codecs for each of a model's cuts; those that save nothing are left out.

    A model without a table of its own takes those of ResNet18 at the same part of its depth.
    """
    table = measured_codecs().get(model) or measured_codecs()["resnet18"]
    found = []
    for cut in range(1, cuts + 1):
        at = table[round((cut - 1) / max(1, cuts - 1) * (len(table) - 1))]
        codecs = tuple(
            replace(codec, encode=codec.encode * speed, decode=codec.decode * speed)
            for codec in at.codecs
            if codec.ratio > 1
        )
        found.append(CutCodecs(cut=cut, codecs=codecs))
    return tuple(found)


def world_of(cell: KeepCell) -> World:
    """Return the truth of a cell."""
    known = recorded()
    if (cell.model, cell.bs) not in known:
        raise UsageError(f"no profile of {cell.model} with batch {cell.bs} was recorded in {SWEEP}")
    profile = faster(known[cell.model, cell.bs], cell.speed)
    link = replace(profile.link, bits_per_second=cell.bandwidth, variation=0.0)
    profile = replace(profile, link=link, server=replace(profile.server, cos_batch=COS_BATCH))
    job = Job(bs=cell.bs, samples=SAMPLES, epochs=cell.epochs)
    budget = int(cell.room * SAMPLES * profile.sent_bytes(profile.last_split))
    disk = DISKS[cell.disk]
    client = SideCache(disk=disk, budget=budget, memory_bytes=MEMORY_BYTES if cell.memory else 0)
    server = SideCache(disk=DISKS["500 MB/s"], budget=4 * budget) if cell.beside_store else None
    return World(profile=profile, job=job, client=client, server=server)


def faster(profile: Profile, speed: float) -> Profile:
    """Return the profile of machines that compute ``speed`` times as fast."""

    def tier(one: Any) -> Any:
        """Return the tier with shorter seconds."""
        names = ("decode_seconds", "codec_seconds_per_byte", "overhead_seconds")
        return replace(one, **{name: getattr(one, name) / speed for name in names})

    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                server_seconds=layer.server_seconds / speed,
                client_seconds=layer.client_seconds / speed,
            )
            for layer in profile.layers
        ),
        server_tier=tier(profile.server_tier),
        client_tier=tier(profile.client_tier),
        step_seconds=profile.step_seconds / speed,
        update_seconds=profile.update_seconds / speed,
    )


def of_kind(records: Iterable[Mapping[str, Any]], kind: str) -> Sequence[Mapping[str, Any]]:
    """Return the records of one kind."""
    return [record for record in records if record["kind"] == kind]
