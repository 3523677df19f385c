"""The grid of an evaluation, and its results: a file of JSON lines that an interrupted run goes on with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hapi.errors import ConfigError, UsageError

PAPER_MODELS = ("alexnet", "resnet18", "resnet50", "densenet121", "vgg11", "vgg19", "transformer")
Form = Literal["images", "uint8", "float32"]
"""Form of stored samples: encoded images, or tensors made beforehand (the papers': float32)."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setting in which every split is measured."""

    model: str
    bs: int
    bandwidth: float
    """Bits per second."""
    image_size: int = 64

    @property
    def key(self) -> str:
        """Unlike that of any other cell."""
        return f"{self.model}/{self.bs}/{self.bandwidth:.0f}/{self.image_size}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The cells of one evaluation, and how each is measured."""

    models: tuple[str, ...] = PAPER_MODELS
    batches: tuple[int, ...] = (16, 32, 48, 64)
    bandwidths: tuple[float, ...] = (10e6, 40e6, 160e6)
    image_size: int = 64
    request_size: int = 16
    epoch_batches: int = 6
    least_samples: int = 192
    """An epoch has at least so many, however small the batch."""
    profile_batches: int = 12
    """The profiled epoch has at least so many: half of them at either of its two splits. Real epochs have more."""
    least_profile_samples: int = 768
    """The same in samples: a shared machine is now fast, now slow, for seconds."""
    profile_parts: int = 2
    """Times that each cell is profiled; the choices are made from the mean."""
    repeats: int = 3
    """Times that splits near the best are measured."""
    enough: float = 20.0
    """Seconds of whole epochs after which a split is not measured again, however its epochs vary."""
    server_device: str = "cpu"
    client_device: str = "cpu"
    memory: int | None = None
    """Bytes that the client may use; None for what is free."""

    def cells(self) -> list[Cell]:
        """All cells; the first ones are spread over models and batches, so that a part tells much.

        The bandwidths of one model and batch follow each other, as both tiers keep what they loaded for it.
        """
        return [
            Cell(
                model=model,
                bs=self.batches[(round_index + number) % len(self.batches)],
                bandwidth=bandwidth,
                image_size=self.image_size,
            )
            for round_index in range(len(self.batches))
            for number, model in enumerate(self.models)
            for bandwidth in self.bandwidths
        ]

    def profile_samples(self, bs: int) -> int:
        """Samples of the profiled epoch."""
        return max(self.samples(bs), self.profile_batches * bs, self.least_profile_samples)

    def samples(self, bs: int) -> int:
        """Samples of an epoch: whole batches."""
        batches = max(self.epoch_batches, -(-self.least_samples // bs))
        return batches * bs


QUICK = Grid(models=("resnet18", "alexnet"), batches=(16, 48), bandwidths=(10e6, 100e6))
PAPER = Grid(
    batches=(128, 256, 512, 1024, 1536, 2048, 3072),
    bandwidths=(12e9, 1e9, 100e6),
    image_size=224,
    request_size=128,
    least_samples=3072,
    server_device="auto",
    client_device="auto",
)
"""The papers' sizes, for machines with a GPU on each side."""


class Results:
    """The records of a run, appended one line each, so that a kill loses at most the one under way."""

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        """Go on with the file at ``path`` if there is one; ``conditions`` head what is measured from now on.

        :class:`UsageError` when what is there was measured in another way, and cannot stand beside it.
        """
        self.path = path
        self.records: list[dict[str, Any]] = list(read(path)) if path.exists() else []
        _check_alike(path, self.records, conditions)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _end_with_newline(path)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
        self.add({"kind": "conditions", **conditions})

    def add(self, record: dict[str, Any]) -> None:
        """Write one record through to the disk."""
        self.records.append(record)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be written: {error.strerror or error}") from None

    def of(self, cell: Cell, kind: str | None = None) -> list[dict[str, Any]]:
        """The cell's records, of one kind or all."""
        return [r for r in self.records if r.get("cell") == cell.key and kind in (None, r["kind"])]

    def done(self, cell: Cell) -> bool:
        """Return whether the cell needs nothing more."""
        return bool(self.of(cell, "done"))

    def seconds_left(self, grid: Grid) -> float | None:
        """Return the expected seconds of the cells that are not done, from those that are; None before there
        is one.

        A cell takes about as long as its model needs for a sample, times the samples of its epoch.
        """
        rates: dict[str, list[float]] = {}
        for cell in cells_of(self.records).values():
            taken = self.of(cell, "done")[-1]["seconds"]
            rates.setdefault(cell.model, []).append(taken / grid.samples(cell.bs))
        if not rates:
            return None
        means = {model: sum(found) / len(found) for model, found in rates.items()}
        other = sum(means.values()) / len(means)
        todo = [cell for cell in grid.cells() if not self.done(cell)]
        return sum(means.get(cell.model, other) * grid.samples(cell.bs) for cell in todo)


_MAY_DIFFER = frozenset(("models", "batches", "bandwidths", "modes", "counts", "profile_parts", "enough"))
"""Settings that choose what is measured and how often, not how."""


def _check_alike(path: Path, records: Iterable[dict[str, Any]], conditions: dict[str, Any]) -> None:
    settings = _settings(conditions)
    for record in records:
        before = _settings(record) if record["kind"] == "conditions" else {}
        for name in sorted(settings.keys() - _MAY_DIFFER if before else ()):
            had = before.get(name, "unknown")  # a setting that is newer than the file
            if had != settings[name]:
                raise UsageError(
                    f"{path}: was measured with {name} {had}, this run has {settings[name]}; give another "
                    "--results"
                )


def _settings(conditions: dict[str, Any]) -> dict[str, Any]:
    """Settings that must not change within a file."""
    return {**conditions.get("grid", {}), **{k: v for k, v in conditions.items() if k == "limited"}}


def _end_with_newline(path: Path) -> None:
    """End a line that a kill cut off, so that it does not run into the next one."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a results file; what a kill left of a line is skipped. :class:`ConfigError` for another file."""
    try:
        if path.is_char_device():
            raise UsageError(f"{path}: is not a plain file; give another name")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    whole = 0
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            whole += 1
            yield record
    if lines and not whole:
        raise ConfigError(f"{path}: not a results file of python -m benchmarks; give another name")


def last_begun(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of one cell's ``records`` since it was last begun anew, with its first plan; none without
    a plan.
    """
    begun = [i for i, r in enumerate(records) if r["kind"] == "plan" and r.get("part", 1) == 1]
    return list(records[begun[-1] :]) if begun else []


def cells_of(records: Iterable[dict[str, Any]]) -> dict[str, Cell]:
    """The cells that were measured whole, by key."""
    return {r["cell"]: Cell(**r["settings"]) for r in records if r["kind"] == "done"}


def done_record(cell: Cell, seconds: float) -> dict[str, Any]:
    """The record that ends a cell."""
    return {"kind": "done", "cell": cell.key, "settings": asdict(cell), "seconds": round(seconds, 2)}
