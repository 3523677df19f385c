"""Under which conditions a figure was measured; a figure without them is worth nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hapi import __version__
from hapi.errors import UsageError
from hapi.paths import write_whole
from hapi.profiler.machine_cache import processor_name

_PACKAGES = ("torch", "torchvision", "aiohttp", "numpy", "xxhash")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, smallest and largest of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of ``values``, of which there must be one at least."""
        return cls(median=statistics.median(values), low=min(values), high=max(values), count=len(values))

    def to_json(self) -> dict[str, float]:
        """The numbers by name."""
        return {"median": self.median, "min": self.low, "max": self.high, "count": self.count}


def rotated(ways: Sequence[str], round_index: int) -> tuple[str, ...]:
    """``ways``, another one first in each turn."""
    first = round_index % len(ways)
    return (*ways[first:], *ways[:first])


def conditions() -> dict[str, Any]:
    """Date, processor, cores, load, kernel and versions, by name."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        # Work of others on the same cores is the usual reason for a figure that cannot be repeated.
        "load_at_start": None if load is None else round(load, 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "hapi": __version__,
        **{name: _version(name) for name in _PACKAGES},
    }


def recorded_conditions(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the conditions of all runs that measured part of ``records``, by name; all values where runs
    differ.

    A file that was continued, perhaps on another machine, has several heads.
    """
    heads: list[Mapping[str, Any]] = []
    head: Mapping[str, Any] | None = None
    for record in records:
        if record["kind"] == "conditions":
            head = record
        elif head is not None:
            heads.append(head)
            head = None
    found: dict[str, list[Any]] = {}
    for name, value in (item for one in heads for item in one.items()):
        if name not in ("kind", "grid") and value not in found.setdefault(name, []):
            found[name].append(value)
    return {
        name: values[0] if len(values) == 1 else "; ".join(map(str, values)) for name, values in found.items()
    }


def condition_lines(found: Mapping[str, Any]) -> list[str]:
    """:func:`conditions` and what was added to them, as lines for a person."""
    if not found:
        return ["conditions were not recorded"]
    width = max(len(name) for name in found)
    return [f"{name.replace('_', ' '):<{width}}  {value}" for name, value in found.items()]


def write_json(path: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Write ``document`` to ``path``, whole or not at all; :class:`UsageError` when that fails."""
    write_whole(str(path), json.dumps(document, indent=2) + "\n")


def write_csv(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``rows`` to ``path``, whole or not at all, with the first one's names as the header."""
    if not rows:
        raise UsageError(f"{path}: there is nothing to write")
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
