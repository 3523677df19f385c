"""Runs of the benchmark ``offload``: processes that train one tail in different ways take turns.

All processes of a group are alive at once, so that noise hits all alike; ways that do not fit the memory beside each
other are measured in several batches, each with as many as fit.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload.clients import TrainingClient
from benchmarks.offload.program import TrainTask
from benchmarks.offload.settings import (
    ACTIVE,
    HOST,
    MEMORY,
    OFFLOADED,
    OTHERS,
    REGIMES,
    ROW_BYTES,
    OffloadGroup,
    OffloadSettings,
    blocks_of,
    most_rows,
    parameters_of,
)
from benchmarks.testbed.cells import Results
from benchmarks.testbed.conditions import rotated
from hapi.errors import HapiError, UsageError
from hapi.models.devices import free_bytes

Tell = Callable[[str], None]
_PROCESS_BYTES = 350_000_000
"""Bytes of Python, torch and buffers."""
_WARM_STEPS = 4
"""Steps before the first turn: plans are made, and what a loop does is learned."""
_LARGEST, _FEW_STEPS = "1B", 3
"""A tail whose steps take long has so many before the first turn, and turns of one."""
_OTHERS_BYTES = 1_500_000_000
"""Memory that stays free for what else the machine does."""
_STEP_BYTES = 20
"""That a step with AdamW moves for each parameter."""
_DISK_BYTES = 29
"""On the disk for each parameter: two slots, and gradients."""
_BELOW_STATES = 15
"""Bytes of memory for each parameter in which parameters, gradients and AdamW's states do not fit."""
WITHOUT_GRADIENTS = 10
"""Bytes of memory for each parameter in which a pass fits, and gradients are not kept until the step."""
_PROBED_BYTES = 240 << 20
_LEAST_ROWS = 8
_USUAL_ROWS = 64


def measure(
    groups: Sequence[OffloadGroup],
    settings: OffloadSettings,
    folder: Path | None,
    results: Results,
    tell: Tell,
) -> None:
    """Measure what ``results`` does not hold of ``groups``.

    Args:
        groups: to be measured.
        settings: of the measurement.
        folder: on the disk to be used; None for the temporary folder.
        results: file of records.
        tell: gets a line after each group.
    """
    done = {(r["group"], way) for r in results.records if r["kind"] == "group" for way in r["ways"]}
    todo = [group for group in groups if any((group.key, way) not in done for way in group.ways)]
    tell(f"{len(todo)} groups to measure")
    with tempfile.TemporaryDirectory(prefix="hapi-offload-", dir=folder) as made:
        bench = _Bench(Path(made), settings, results, tell)
        for group in todo:
            began = time.monotonic()
            bench.measure(group)
            seconds = round(time.monotonic() - began, 1)
            results.add({"kind": "group", "group": group.key, "ways": list(group.ways), "seconds": seconds})
            tell(f"{group.key}: {time.monotonic() - began:.0f} s")


class _Bench:
    """Groups, one after the other."""

    def __init__(self, folder: Path, settings: OffloadSettings, results: Results, tell: Tell) -> None:
        self._folder, self._settings, self._results, self._tell = folder, settings, results, tell

    def measure(self, group: OffloadGroup) -> None:
        rows = self._rows(group)
        batches = self._batches(group, rows)
        for ways in batches:
            try:
                self._measure(group, ways, rows)
            except (HapiError, OSError) as error:
                self._leave_out(group, ways, str(error))

    def _leave_out(self, group: OffloadGroup, ways: Sequence[str], why: str) -> None:
        for way in ways:
            self._results.add({"kind": "left out", "group": group.key, "way": way, "why": why})
        self._tell(f"{group.key}: {', '.join(ways)} left out: {why}")

    def _batches(self, group: OffloadGroup, rows: int) -> list[list[str]]:
        """Ways that are alive together; those that do not fit at all are recorded."""
        free = max(0, (free_bytes(torch.device(self._settings.device)) or 0) - _OTHERS_BYTES)
        room = shutil.disk_usage(self._folder).free
        found: list[list[str]] = []
        left_bytes, left_disk = 0.0, 0.0
        for way in group.ways:
            needed = self._memory_needed(group, way, rows)
            stored = _DISK_BYTES * parameters_of(group.tail) + 2 * _PROBED_BYTES if way in OFFLOADED else 0
            if needed > free or stored > room:
                what = f"{needed / 1e9:.1f} GB of memory and {stored / 1e9:.1f} GB of disk"
                why = f"needs about {what}; {free / 1e9:.1f} and {room / 1e9:.1f} may be taken"
                self._leave_out(group, [way], why)
                continue
            if not found or needed > left_bytes or stored > left_disk:
                found.append([])
                left_bytes, left_disk = free, room
            found[-1].append(way)
            left_bytes, left_disk = left_bytes - needed, left_disk - stored
        return found

    @staticmethod
    def _memory_needed(group: OffloadGroup, way: str, rows: int) -> float:
        each = 5.0 if way in (*OFFLOADED, HOST, *OTHERS) else 16.0
        activations = rows * ROW_BYTES * blocks_of(group.tail)
        return each * parameters_of(group.tail) + 1.1 * activations + _PROCESS_BYTES

    def _task(
        self, group: OffloadGroup, way: str, rows: int, folder: Path, memory: int | None = None
    ) -> TrainTask:
        drives = [folder / f"{way}-{number}" for number in range(group.drives if way != HOST else 0)]
        for drive in drives:
            drive.mkdir(parents=True, exist_ok=True)
        return TrainTask(
            way=way,
            blocks=blocks_of(group.tail),
            rows=rows,
            memory=_memory_given(group, rows) if memory is None else memory,
            folders=tuple(map(str, drives)),
            rate=group.rate,
            clipped=group.clipped,
            device=self._settings.device,
            has_floor=group.room is None,
        )

    def _measure(self, group: OffloadGroup, ways: Sequence[str], rows: int) -> None:
        """Let ``ways`` take turns."""
        settings = self._settings
        memory = None if group.room is None else self._memory_with_a_choice(group, group.room, rows)
        is_large = group.tail == _LARGEST
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="group-", dir=self._folder)))
            clients: dict[str, TrainingClient] = {}
            for way in ways:
                task = self._task(group, way, rows, folder, memory)
                clients[way] = TrainingClient(task, folder / f"{way}.log", settings.limit, settings.threads)
                stack.callback(clients[way].stop)
            for way, client in tuple(clients.items()):
                try:
                    client.call(do="warm", steps=_FEW_STEPS if is_large else _WARM_STEPS)
                except HapiError as error:
                    self._leave_out(group, [way], str(error))
                    del clients[way]
            began = time.monotonic()
            for round_index in range(settings.rounds if clients else 0):
                if round_index >= 2 and time.monotonic() - began > settings.seconds:
                    break
                answers = {}
                for way in rotated(tuple(clients), round_index):
                    rate = self._rate(clients[way], group) if way in OFFLOADED else None
                    answer = clients[way].call(do="turn", steps=1 if is_large else settings.steps)
                    answers[way] = {**answer, "rate": rate}
                job = {"rows": rows, "parameters": parameters_of(group.tail), "drives": group.drives}
                record = {"kind": "turn", "group": group.key, "turn": round_index, "ways": list(clients)}
                self._results.add({**record, **job, "answers": answers})

    def _memory_with_a_choice(self, group: OffloadGroup, share: float, rows: int) -> int:
        """Return the memory at a share of the way from what a pass of this batch needs at least to where all fits."""
        for record in self._results.records:
            if record["kind"] == "needs" and record["group"] == group.key and record["rows"] == rows:
                return memory_between(record, share)
        memory = int(WITHOUT_GRADIENTS * parameters_of(group.tail))
        with tempfile.TemporaryDirectory(prefix="group-", dir=self._folder) as made:
            task = self._task(group, ACTIVE, rows, Path(made), memory)
            client = TrainingClient(task, Path(made) / "log", self._settings.limit, self._settings.threads)
            try:
                client.call(do="warm", steps=2)
                found = client.call(do="needs")
            finally:
                client.stop()
        needs = {name: found[name] for name in ("constant", "least", "most")}
        self._results.add({"kind": "needs", "group": group.key, "rows": rows, **needs})
        return memory_between(needs, share)

    def _rate(self, client: TrainingClient, group: OffloadGroup) -> float:
        nbytes = _PROBED_BYTES // (4 if group.rate or self._settings.quick else 1)
        return float(client.call(do="rate", bytes=nbytes)["rate"])

    def _rows(self, group: OffloadGroup) -> int:
        """Rows of a batch that puts the group into its regime, on this machine."""
        if self._settings.rows is not None:
            return self._settings.rows
        if self._settings.quick:
            return 16
        if group.regime not in REGIMES:
            return _USUAL_ROWS
        found = self._calibration()
        scale = parameters_of(group.tail) / found["parameters"]
        wanted = REGIMES[group.regime] * _STEP_BYTES * parameters_of(group.tail) / found["rate"] / scale
        rows = int((wanted - found["fixed"]) / max(found["each_row"], 1e-9))
        return min(max(rows, _LEAST_ROWS), most_rows(group.tail))

    def _calibration(self) -> dict[str, Any]:
        """Seconds of a step of AdamW in memory, over rows, and the disk's rate; measured once for a file of results.

        Processor seconds over the threads: what else the machine does makes steps long whose batch is small, too.
        """
        for record in self._results.records:
            if record["kind"] == "calibration":
                return record
        tail = "100M"
        group = OffloadGroup(part="calibration", tail=tail, regime="", ways=(MEMORY, ACTIVE))
        seconds, rate = {}, 0.0
        for rows in (32, 256):
            with tempfile.TemporaryDirectory(prefix="group-", dir=self._folder) as made:
                task = self._task(group, MEMORY, rows, Path(made))
                client = TrainingClient(
                    task, Path(made) / "log", self._settings.limit, self._settings.threads
                )
                try:
                    client.call(do="warm", steps=1)
                    worked = min(client.call(do="turn", steps=1)["processor"] for _ in range(3))
                    seconds[rows] = worked / self._settings.threads
                    rate = max(rate, self._rate(client, group))
                finally:
                    client.stop()
        each = (seconds[256] - seconds[32]) / (256 - 32)
        record = {
            "kind": "calibration",
            "parameters": parameters_of(tail),
            "each_row": each,
            "fixed": seconds[32] - 32 * each,
            "rate": rate,
            "threads": self._settings.threads,
        }
        self._results.add(record)
        return record


def memory_between(needs: Mapping[str, float], share: float) -> int:
    """Return the bytes at ``share`` of the way from ``least`` to ``most``, beside the constant ones."""
    return int(needs["constant"] + needs["least"] + share * max(0.0, needs["most"] - needs["least"]))


def _memory_given(group: OffloadGroup, rows: int) -> int:
    parameters, activations = parameters_of(group.tail), rows * ROW_BYTES * blocks_of(group.tail)
    # Never so much that AdamW's states have room.
    return int(min(group.memory_share * (16 * parameters + activations), _BELOW_STATES * parameters))


def check_folder(folder: Path | None) -> None:
    """Raise UsageError unless ``folder`` is one that is there."""
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--folder {folder}: is not a folder; make it on the disk to be used")
