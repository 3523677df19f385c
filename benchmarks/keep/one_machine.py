"""``benchmarks keep``, the part about both tiers on one machine: estimates of epochs beside the epochs.

Each run is a ``hapi-train`` with an embedded server and without a cache, whose profile is in its report. No figure of
the model was fitted to these runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.keep.epochs import Epoch
from benchmarks.keep.grid import of_kind
from benchmarks.keep.machines import Machines
from benchmarks.testbed.cells import Results
from benchmarks.testbed.photos import write_crops
from benchmarks.testbed.signals import ended_in_order
from benchmarks.testbed.tiers import environment, last_line
from hapi.errors import TransportError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.profiler.cost import estimate
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choice import Choice, Crossing
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec

GOAL = 0.20
"""Part within which an estimate counts as right."""
EPOCHS = 4
RUN_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class MachineRun:
    """One training on one machine."""

    model: str
    bs: int
    samples: int
    side: int = 64
    split: str = "auto"

    @property
    def key(self) -> str:
        """Unlike that of any other run."""
        return f"{self.model}/{self.bs}/{self.samples}/{self.side}/{self.split}"


RUNS = (
    MachineRun(model="resnet18", bs=32, samples=768),
    MachineRun(model="alexnet", bs=64, samples=1024),
    MachineRun(model="resnet50", bs=32, samples=384),
    MachineRun(model="vgg11", bs=16, samples=256),
    MachineRun(model="densenet121", bs=48, samples=384),
    MachineRun(model="transformer", bs=16, samples=128),
    MachineRun(model="resnet18", bs=16, samples=192, side=160),
    MachineRun(model="mobilenet_v3_large", bs=64, samples=640, side=96),
)


def measure_machines(results: Results, tell: Callable[[str], None]) -> None:
    """Measure the runs that ``results`` does not hold."""
    done = {record["key"] for record in of_kind(results.records, "one machine")}
    todo = [run for run in RUNS if run.key not in done]
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="hapi-keep-") as name:
        for run in todo:
            folder = Path(name) / run.key.replace("/", "-")
            folder.mkdir()
            found = _measured(run, folder)
            results.add(found)
            tell(machine_line(found))


def _measured(run: MachineRun, folder: Path) -> dict[str, Any]:
    write_crops(folder / "crops", run.samples, run.side)
    options = PackOptions(transform=TransformSpec.for_image_size(run.side))
    pack(open_source(str(folder / "crops")), open_store(str(folder / "store")), "photos", options)
    report, log = folder / "report.json", folder / "train.log"
    command = [
        sys.executable, "-m", "hapi.cli.train", f"--store={folder / 'store'}", "--dataset=photos",
        f"--model={run.model}", "--weights=random", f"--split={run.split}", f"--bs={run.bs}", f"--epochs={EPOCHS}",
        "--device=cpu", "--cache=off", "--no-progress", "--no-output", f"--report={report}",
    ]  # fmt: skip
    with log.open("wb") as output:
        done = subprocess.run(
            command, env=environment(""), stdout=output, stderr=output, check=False, timeout=RUN_SECONDS
        )
    if done.returncode:
        raise TransportError(f"{run.key}: hapi-train failed: {last_line(log.read_text())}")
    return {"kind": "one machine", "key": run.key, **asdict(run), **_facts(json.loads(report.read_text()))}


def _facts(report: Mapping[str, Any]) -> dict[str, Any]:
    """Profile, splits and seconds of a run's report."""
    later = report["epochs"][1:]
    return {
        "profile": report["plan"]["profile"],
        "job": report["plan"]["job"],
        "epochs": [
            {name: epoch[name] for name in ("seconds", "split", "splits", "client_seconds", "server_seconds")}
            for epoch in later
        ],
    }


def errors_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return how far estimates are off, as shares of the measured seconds: in one machine, as if on two, replayed.

    Epochs of which batches ran at several splits are left out; of no other is the estimate one of theirs.
    """
    profile = Profile.from_json(record["profile"])
    job = replace(Job(**record["job"]), samples=record["samples"])
    whole = [epoch for epoch in record["epochs"] if len(epoch["splits"]) == 1]
    if not whole:
        return {}
    split = statistics.mode(epoch["splits"][0][0] for epoch in whole)
    seconds = statistics.median(e["seconds"] for e in whole if e["splits"][0][0] == split)
    found = {
        "one machine": estimate(replace(profile, one_machine=True), job, split).epoch_seconds,
        "as if on two": estimate(replace(profile, one_machine=False), job, split).epoch_seconds,
        "replayed": Epoch(
            Machines(replace(profile, one_machine=True), job, None, None),
            Choice(mode="recompute", cut=0, crossing=Crossing(split=split)),
            0,
        ).run(),
    }
    return {
        "seconds": seconds,
        "split": split,
        **{name: value / seconds - 1 for name, value in found.items()},
    }


def machine_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line for a person."""
    found = errors_of(record)
    if not found:
        return f"  {record['key']:<34}no epoch at one split"
    return (
        f"  {record['key']:<34}split {found['split']:>2.0f}, {found['seconds']:>6.2f} s an epoch; estimate off by "
        f"{found['one machine']:+.0%} (as if on two {found['as if on two']:+.0%}, replayed {found['replayed']:+.0%})"
    )


def machine_table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the runs as lines for a person; none without one."""
    runs = of_kind(records, "one machine")
    if not runs:
        return []
    off = [abs(found["one machine"]) for found in map(errors_of, runs) if found]
    lines = ["both tiers on one machine", *map(machine_line, runs)]
    if off:
        within = sum(value <= GOAL for value in off)
        lines.append(f"  median {statistics.median(off):.1%} off; within {GOAL:.0%}: {within} of {len(off)}")
    return lines
