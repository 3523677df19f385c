"""Trainings by several ranks of one process group, and the same ones by one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi.client.joint.ranks import ALONE, Ranks
from hapi.client.session import Session
from hapi.train.distributed.group import ProcessGroup
from hapi.train.distributed.launch import launched
from hapi.train.settings import TrainSettings
from hapi.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TRAIN = "import sys; from hapi.cli.entry import train; sys.exit(train())"


def network(num_classes: int = 4) -> nn.Module:
    """Two frozen layers in front of three that are trained, without statistics of a batch."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 24), nn.ReLU(), nn.Linear(24, num_classes),
    )  # fmt: skip


def train(settings: Mapping[str, Any], ranks: Ranks, folder: Path, name: str) -> dict[str, Any]:
    """Train by ``settings`` and return the report; the first rank leaves the weights in ``folder``."""
    chosen = TrainSettings(**settings)
    with Session.open(
        chosen,
        optimizer_bytes=chosen.optimizer_bytes,
        offload=chosen.offload_terms,
        ranks=ranks,
    ) as session:
        trainer = Trainer(session)
        report = trainer.run()
        if ranks.is_first:
            torch.save(session.trained.state_dict(), folder / f"{name}.pt")
    return report


def together(jobs: Mapping[str, Mapping[str, Any]], count: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Run ``jobs`` one after the other by ``count`` ranks, and return their reports by name."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [*TORCHRUN, "--nproc-per-node", str(count), __file__, str(folder)]
    done = subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "reports.json").read_text())
    return found


def alone(jobs: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Run ``jobs`` in this process, as :func:`together` does in several."""
    return {name: train(settings, ALONE, folder, name) for name, settings in jobs.items()}


def environment(**more: str) -> dict[str, str]:
    """Variables of a rank: this tree's package and its tests' networks, one thread."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def hapi_train(ranks: int, *flags: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command line of ``hapi-train`` by so many ranks; by this process alone for 0."""
    own = [sys.executable, "-c", TRAIN, *flags]
    if not ranks:
        return own
    return [
        *TORCHRUN, "--nproc-per-node", str(ranks), *options, "--no-python", *own,
    ]  # fmt: skip


def main(folder: Path) -> None:
    """Run the jobs of ``folder`` as one of the ranks."""
    launch = launched()
    jobs = json.loads((folder / "jobs.json").read_text())
    if launch is None:
        raise SystemExit("start it with torchrun")
    with ProcessGroup(launch, torch.device("cpu")) as ranks:
        reports = {name: train(tupled(settings), ranks, folder, name) for name, settings in jobs.items()}
        sums = ranks.gathered(
            {name: [e["loss"] for e in report["epochs"]] for name, report in reports.items()}
        )
        if any(found != sums[0] for found in sums):
            raise SystemExit("the ranks have different losses")
    if launch.rank == 0:
        (folder / "reports.json").write_text(json.dumps(reports))


def tupled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings from JSON with tuples again."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
