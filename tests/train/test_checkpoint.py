"""The checkpoint's file: what it holds, damage, other forms, full disks, deaths while it is written."""

from __future__ import annotations

import copy
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import ForkedProcess, environment
from support.forked_python import PYTHON
from torch import nn

from hapi.errors import ConflictError, HapiError, UsageError
from hapi.train.checkpoints import checkpoint
from hapi.train.checkpoints.checkpoint import Progress
from hapi.train.report import Measured, Totals


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def saved(path: Path, keep: int = 1, **progress: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(300, 300)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    checkpoint.save(
        str(path),
        parts={"trained": module, "optimizer": optimizer},
        progress=Progress(**progress),
        identity={"a": 1},
        epochs=[{"x": 2}],
        plan=None,
        totals=Totals(seconds=1.5, retries=2),
        keep=keep,
    )
    return module, optimizer


def loaded(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """(progress, epochs) of the newest checkpoint there; None without any."""
    found = checkpoint.load_newest(
        str(path),
        parts={"trained": module, "optimizer": optimizer},
        identity=lambda kept: {"a": 1},
        restore_plan=lambda plan, progress: None,
    )
    return None if found is None else (found.progress, found.epochs)


def test_data_that_was_packed_anew_is_said_to_be_that(tmp_path: Path) -> None:
    module, optimizer = saved(tmp_path / "c.pt")
    with pytest.raises(
        ConflictError, match="belongs to version None of its dataset, and here it is beef: other data"
    ):
        checkpoint.load(
            str(tmp_path / "c.pt"),
            parts={"trained": module, "optimizer": optimizer},
            identity=lambda kept: {"a": 1, "dataset": "beef"},
            restore_plan=lambda plan, progress: None,
        )


MEASURED = Measured(counters={"seconds": 0.5}, splits={3: 2}, stages={"read": 0.25}, cos_batch=4)


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    module, _ = saved(path, epoch=3, batch=2, measured=MEASURED)
    fresh = copy.deepcopy(module)
    nn.init.zeros_(fresh.weight)
    again = torch.optim.Adam(fresh.parameters())
    progress, epochs = loaded(path, fresh, again)
    assert progress == Progress(epoch=3, batch=2, measured=MEASURED)
    assert epochs == [{"x": 2}]
    assert torch.equal(fresh.weight, module.weight)
    assert again.state_dict()["state"][0]["step"] == 1
    assert loaded(tmp_path / "other.pt", fresh, again) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: b"", lambda d: b"garbage", lambda d: d[: len(d) // 2], lambda d: b"PK\x03\x04" + d[4:200],
        lambda d: d[:-30],
    ],
    ids=["empty", "garbage", "half", "head", "tail"],
)  # fmt: skip
def test_damaged_files(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "c.pt"
    module, optimizer = saved(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match="is not a checkpoint") as caught:
        loaded(path, module, optimizer)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1}, {"format": None}, {"identity": 3}, {"identity": None}, {"epochs": 5}, {"epochs": [1]},
        {"progress": {}},
        {"progress": {"epoch": -1}}, {"progress": {"batch": "x"}}, {"progress": {"unknown": 1}}, {"progress": None},
        {"progress": {"measured": {"counters": {"seconds": "x"}}}},
        {"progress": {"measured": {"splits": {"0": 1}}}}, {"progress": {"measured": 3}}, {"progress": {"batch": 1.5}},
        {"totals": {}, "format": 4}, {"totals": {"seconds": "x"}}, {"totals": {"retries": -1}}, {"totals": None},
        {"trained": {}}, {"trained": {"weight": torch.ones(2)}}, {"trained": None}, {"optimizer": {}},
        {"optimizer": None},
        {"optimizer": {"state": {}, "param_groups": []}},
    ],
    ids=str,
)  # fmt: skip
def test_files_of_another_form(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "c.pt"
    module, optimizer = saved(path)
    document = torch.load(path, weights_only=True)
    torch.save({**document, **change}, path)
    if change == {"progress": {}}:  # all defaults: the beginning
        assert loaded(path, module, optimizer)[0] == Progress()
        return
    with pytest.raises(UsageError, match="--resume: "):
        loaded(path, module, optimizer)


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    module, optimizer = saved(path)
    torch.save({"format": checkpoint.FORMAT, "x": Path("code")}, path)
    with pytest.raises(UsageError, match=r"is not a checkpoint of hapi-train \(Weights only load failed\)$"):
        loaded(path, module, optimizer)


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    module, optimizer = saved(path, epoch=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(HapiError, match=r"--checkpoint .*c.pt: cannot be written: File too large"):
            saved(path, epoch=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert names_in(tmp_path) == ["c.pt"]
    assert loaded(path, module, optimizer)[0].epoch == 1


@pytest.mark.slow
def test_killed_while_saving(tmp_path: Path) -> None:
    """SIGKILL at any moment leaves a whole checkpoint, the previous or the new one."""
    path = tmp_path / "c.pt"
    module, optimizer = saved(path, epoch=0)
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_checkpoint import saved; from pathlib import Path\n"
        "print('go', flush=True)\n"
        "for epoch in range(1, 10**9): saved(Path(sys.argv[1]), epoch=epoch)"
    )
    command = [PYTHON, "-c", program, str(path), *(p for p in sys.path if p)]
    last = 0
    for delay in (0.05, 0.06, 0.072):
        before = path.stat().st_ino
        process = ForkedProcess(command, stdout=subprocess.PIPE, env=environment())
        with process.stdout as said:  # type: ignore[union-attr]
            said.readline()
            deadline = time.monotonic() + 240
            while path.stat().st_ino == before and time.monotonic() < deadline:
                time.sleep(0.005)  # until one was saved, however slow the machine is
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(delay)
            process.kill()
            process.wait()
        found = loaded(path, module, optimizer)[0].epoch
        assert found >= 0
        last = max(last, found)
    assert last > 0


def test_unwritable_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    wanted = str(tmp_path / "file" / "c.pt")
    with (
        pytest.raises(UsageError, match=r"--checkpoint .*cannot be written there"),
        checkpoint.claimed(wanted, f"--checkpoint {wanted}"),
    ):
        pass
