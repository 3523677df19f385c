"""Trainings by several ranks of one process group, and the same ones by one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
from support.forked import ForkedProcess
from support.free_ports import free_port

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TRAIN = "import sys; from hapi.cli.entry import train; sys.exit(train())"


def network(num_classes: int = 4) -> nn.Module:
    """Two frozen layers in front of three that are trained, without statistics of a batch."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 24), nn.ReLU(), nn.Linear(24, num_classes),
    )  # fmt: skip


def normed_network(num_classes: int = 4) -> nn.Module:
    """The same with statistics of a batch in the trained part."""
    *before, last = network(num_classes)
    return nn.Sequential(*before, nn.BatchNorm1d(24), last)


class SpareHead(nn.Module):
    """A layer that is run and one that is not, in code that cannot be traced."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc, self.spare = nn.Linear(24, num_classes), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run one of them."""
        return self.fc(x) if len(x) else self.spare(x)


def spare_network(num_classes: int = 4) -> nn.Module:
    """The same with a parameter that never gets a gradient."""
    *before, _ = network(num_classes)
    return nn.Sequential(*before, SpareHead(num_classes))


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


class ForkedRanks:
    """Ranks on this machine as torchrun starts them, without the seconds that their imports take.

    All are ended when one fails; none is started again. Used as a :class:`subprocess.Popen` is.
    """

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        folder: Path,
        own: Callable[[int], Mapping[str, str]] = lambda rank: {},
        **more: str,
    ) -> None:
        """Start them; ``own`` returns variables of one rank, ``more`` are those of all."""
        port = free_port()
        self._files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115  see communicate
        common = {
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **({"TORCHELASTIC_RUN_ID": "tests"} if count == 1 else {}),  # else a rank alone is none
        }
        self._failed = 0.0
        self._ranks = [
            ForkedProcess(
                command, cwd=folder, stdout=self._files[0], stderr=self._files[1],
                env=environment(
                    **{k: str(v) for k, v in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()},
                    **more,
                    **own(rank),
                ),
            )
            for rank in range(count)
        ]  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in their order."""
        return [rank.pid for rank in self._ranks]

    @property
    def codes(self) -> list[int | None]:
        """Exit codes of the ranks, in their order; None while one runs."""
        return [rank.poll() for rank in self._ranks]

    @property
    def returncode(self) -> int:
        """Exit code of the first rank that failed, 0 if all have ended well."""
        return next(filter(None, self.codes), 0)

    def poll(self) -> int | None:
        """End all ranks when one has failed; the exit code, None while ranks run.

        One that was interrupted is no reason: torchrun has then sent its signal to all.
        """
        if not self._failed and any(code not in (None, 0, 130) for code in self.codes):
            self._failed = time.monotonic()
            self.send_signal(signal.SIGTERM)
        return None if any(rank.poll() is None for rank in self._ranks) else self.returncode

    def send_signal(self, number: int) -> None:
        """Send it to all ranks that still run."""
        for rank in self._ranks:
            rank.send_signal(number)

    def output(self) -> str:
        """What all have said on stdout so far."""
        return os.pread(self._files[0].fileno(), 1 << 20, 0).decode()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until all have ended and return what all of them said, on stdout and stderr."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            now = time.monotonic()
            if now > deadline or (self._failed and now > self._failed + 120):
                self.send_signal(signal.SIGKILL)
            time.sleep(0.02)
        said = []
        for file in self._files:
            with file:
                file.seek(0)
                said.append(file.read())
        if time.monotonic() > deadline:
            raise AssertionError(f"the ranks took more than {timeout} s: {said}")
        return said[0], said[1]


def together(jobs: Mapping[str, Mapping[str, Any]], count: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Run ``jobs`` one after the other by ``count`` ranks, and return their reports by name."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ranks = ForkedRanks(count, [__name__, str(folder)], folder)
    out, errors = ranks.communicate(500)
    assert ranks.returncode == 0, out[-3000:] + errors[-3000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "reports.json").read_text())
    return found


def alone(jobs: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Run ``jobs`` in this process, as :func:`together` does in several."""
    return {name: train(settings, ALONE, folder, name) for name, settings in jobs.items()}


def environment(**more: str) -> dict[str, str]:
    """Variables of a rank: this tree's package and its tests' networks, one thread."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def ranks_below(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks of torchrun, in their order."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for child in map(int, children):
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        rank = next((v for v in variables if v.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(rank.removeprefix(b"RANK="))] = child
    return [found[rank] for rank in sorted(found)]


def hapi_train(
    ranks: int, *flags: str, folder: Path, seconds: float = 500
) -> subprocess.CompletedProcess[str]:
    """Run ``hapi-train`` in ``folder`` by so many ranks; by one process that is no rank for 0."""
    command = ["hapi.cli.train", *flags]
    if ranks:
        process = ForkedRanks(ranks, command, folder)
        out, errors = process.communicate(seconds)
        return subprocess.CompletedProcess(command, process.returncode, out, errors)
    alone = ForkedProcess(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, errors = alone.communicate(seconds)
    return subprocess.CompletedProcess(command, alone.wait(), out, errors)


def torchrun(ranks: int, *flags: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command line of ``hapi-train`` under torchrun itself."""
    own = [sys.executable, "-c", TRAIN, *flags]
    return [*TORCHRUN, "--nproc-per-node", str(ranks), *options, "--no-python", *own]


def main(folder: Path) -> None:
    """Run the jobs of ``folder`` as one of the ranks."""
    launch = launched()
    jobs = json.loads((folder / "jobs.json").read_text())
    if launch is None:
        raise SystemExit("start it with torchrun")
    device = torch.device(next(iter(jobs.values())).get("device", "cpu"))
    with ProcessGroup(launch, device) as ranks:
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
