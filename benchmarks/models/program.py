"""One client of the benchmark ``models``: a process that writes a model or loads a part of it when it is told.

It gets its task as a JSON argument and says ``ready`` when all that does not belong to the measurement is done.
Then it does one step for each line that it reads, and answers with a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models.counters import Counted
from benchmarks.models.settings import HAPI, ON_DEMAND, STAGES, STORE
from benchmarks.models.shapes import WHOLE, shape_of
from benchmarks.models.sites import FileKeeper, Keeper, Site
from hapi.errors import HapiError


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a client does."""

    shape: str
    way: str
    part: str
    site: dict[str, str]
    name: str
    """Name of the model at its site."""
    seed: int
    """Seed of its content."""
    sums: str
    """File with the checksums of its tensors: written by who stores, read by who loads."""
    cores: tuple[int, ...] | None = None
    """Cores that it may use; None to keep those that it was started on."""


class _Client:
    """One process's model."""

    def __init__(self, task: Task) -> None:
        from benchmarks.models.content import checksums, filled, touched

        self._task, self._shape = task, shape_of(task.shape)
        self._keeper = keeper_of(task.way, Site(**task.site))
        if task.part == STORE:
            self._tensors = filled(self._shape.layers, task.seed)
            Path(task.sums).write_text(json.dumps(checksums(self._tensors)), encoding="utf-8")
        else:
            part = WHOLE if task.part == STAGES else task.part
            self._tensors = touched(self._shape.part(part))

    def step(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a step."""
        if self._task.part == STORE:
            return self.store()
        return self.stages() if self._task.part == STAGES else self.load(asked["check"])

    def store(self) -> dict[str, Any]:
        """Write the model; the answer has the seconds."""
        began = time.perf_counter()
        self._keeper.store(self._shape, self._task.name, self._tensors)
        return {"seconds": time.perf_counter() - began}

    def load(self, check: bool) -> dict[str, Any]:
        """Load the part; the answer has the seconds and the bytes that moved.

        Args:
            check: compare every loaded tensor with its checksum, after the clock has stopped.
        """
        if check:
            for tensor in self._tensors.values():
                tensor.zero_()
        before = Counted.now()
        began = time.perf_counter()
        found = self._keeper.load(self._task.name, self._tensors)
        seconds = time.perf_counter() - began
        counted = Counted.now().since(before)
        if check:
            self._check(found)
        return {"seconds": seconds, "needed": self._needed, "moved": counted}

    def stages(self) -> dict[str, Any]:
        """Do the low-level operations of a load one by one; the answer has the seconds of each."""
        found = self._keeper.stages(self._task.name, self._tensors)
        return {"seconds": sum(found.values()), "needed": self._needed, "moved": {}, "stages": found}

    @property
    def _needed(self) -> int:
        """Bytes of the tensors that are loaded."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _check(self, found: Any) -> None:
        from benchmarks.models.content import checksums

        expected = json.loads(Path(self._task.sums).read_text(encoding="utf-8"))
        for name, checksum in checksums({name: found[name] for name in self._tensors}).items():
            if checksum != expected[name]:
                raise HapiError(f"{self._task.way} loaded tensor {name} with other bytes than were stored")


def keeper_of(way: str, site: Site) -> Keeper:
    """Return the way's keeper at a site."""
    if way in (HAPI, ON_DEMAND):
        from benchmarks.models.ours import HapiKeeper

        return HapiKeeper(site, pool=way == HAPI)
    from benchmarks.models.formats import format_of

    return FileKeeper(site, format_of(way))


def main() -> int:
    """Serve one parent; a failure is its last line on standard error."""
    document = json.loads(sys.argv[1])
    task = Task(**document)
    if task.cores is not None:
        os.sched_setaffinity(0, task.cores)
    client = _Client(task)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(client.step(asked)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
