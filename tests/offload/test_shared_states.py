"""Two processes of one training keep half of the states each, and get the same bits as in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.forked import ForkedProcess
from support.forked_python import PYTHON
from torch import nn

from hapi.errors import UsageError
from hapi.offload import shards
from hapi.offload.states.base import Commit

TESTS = Path(__file__).parents[1]
TRAINER = """
import os, signal, sys, torch, torch.distributed as dist
from contextlib import nullcontext
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from support.offload_loops import *
rank, folder, way, steps, dies = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
how = sys.argv[6]
dist.init_process_group("gloo", f"file://{folder}/meet-{way}-{dies}", rank=rank, world_size=2)
model = DistributedDataParallel(tied_model())
optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
if way == "disk":
    optimizer = offloaded(model, optimizer, folder / "states")
torch.manual_seed(21 + rank) if way != "disk" or not optimizer.steps else None
for step in range(optimizer.steps if way == "disk" else 0, steps):
    optimizer.zero_grad()
    for last in (False, True):
        with nullcontext() if last else model.no_sync():
            inputs, labels = batch(model.module, 100 * step + 10 * last + rank)
            nn.functional.cross_entropy(model(inputs), labels).backward()
    if step + 1 == dies and rank == 1 and how == "before a step":
        os._exit(1)
    if step % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step + 1 == dies and rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if step + 1 == dies and rank == 1 and how == "in order":
        sys.exit(0)
state = optimizer.state_dict()
if rank == 0:
    torch.save((model.module.state_dict(), state), folder / f"{way}.pt")
dist.barrier()
if how == "an error at the end" and rank == 0:
    raise RuntimeError("its model was not saved")
if way == "disk":
    optimizer.close()
dist.destroy_process_group()
"""


def run(folder: Path, way: str, steps: int, dies: int = 0, how: str = "killed") -> list[int]:
    """Train with two processes, the second of which may end early; return how they ended."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    arguments = [str(folder), way, str(steps), str(dies), how]
    command = [PYTHON, "-c", TRAINER]
    ranks = []
    for rank in (0, 1):
        with (folder / f"errors-{rank}").open("w") as errors:
            ranks.append(ForkedProcess([*command, str(rank), *arguments], env=environment, stderr=errors))
    if dies and how == "killed":
        ranks[1].wait(240)
        ranks[0].kill()
    return [rank.wait(240) for rank in ranks]


def results(folder: Path, way: str) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    found: tuple[dict[str, torch.Tensor], dict[str, object]] = torch.load(folder / f"{way}.pt")
    return found


@pytest.mark.slow
def test_two_processes_share_the_states_and_survive_a_kill(tmp_path: Path) -> None:
    assert run(tmp_path, "memory", 7) == [0, 0]
    assert run(tmp_path, "disk", 7, dies=4)[1] == -9
    kept = [
        sum(f.stat().st_size for f in (tmp_path / "states" / f"hapi-rank{rank}").rglob("states"))
        for rank in (0, 1)
    ]
    assert 0.2 < kept[0] / sum(kept) < 0.8
    assert run(tmp_path, "disk", 7) == [0, 0]
    (weights, states), (found, offloaded) = results(tmp_path, "memory"), results(tmp_path, "disk")
    assert all(torch.equal(value, found[name]) for name, value in weights.items())
    for number, state in states["state"].items():  # type: ignore[attr-defined]
        assert all(torch.equal(value, offloaded["state"][number][name]) for name, value in state.items())  # type: ignore[index]
    assert not list((tmp_path / "states").rglob("hapi-offload"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["before a step", "in order", "an error at the end"])
def test_a_rank_that_ends_alone_loses_nothing(how: str, tmp_path: Path) -> None:
    """Files of a rank that ended in order are there as long as another one may need them."""
    assert run(tmp_path, "memory", 7) == [0, 0]
    codes = run(tmp_path, "disk", 7, dies=4, how=how)
    assert codes == [1, 1 if how == "before a step" else 0]
    said = [line for line in (tmp_path / "errors-0").read_text(encoding="utf-8").splitlines() if line]
    if how == "before a step":
        errors = [line for line in said if "failures.OffloadError: " in line]
        assert len(errors) == 1 and "rank 0 does not reach another rank" in errors[0]
        assert "has committed step" in errors[0]
    assert all((tmp_path / "states" / f"hapi-rank{rank}" / "hapi-offload").exists() for rank in (0, 1))
    assert run(tmp_path, "disk", 7) == [0, 0]
    (weights, _), (found, _) = results(tmp_path, "memory"), results(tmp_path, "disk")
    assert all(torch.equal(value, found[name]) for name, value in weights.items())
    assert not list((tmp_path / "states").rglob("hapi-offload"))


class Kept:
    """A rank's states of a step."""

    def __init__(self, steps: int) -> None:
        self.committed = Commit(steps, steps, b"", (), b"")
        self.gone_back: list[int] = []

    def go_back(self, steps: int) -> bool:
        self.gone_back.append(steps)
        return True


@pytest.mark.parametrize("steps", [1, 5])
def test_a_rank_whose_states_another_one_lacks_does_not_begin_anew_without_a_word(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has ended in order, and removed its files; the other was killed. A step apart is no end."""
    monkeypatch.setattr(shards, "shares_of", lambda model: (0, 2))
    monkeypatch.setattr(shards, "smallest", lambda model, value: min(value, 0))
    kept = Kept(steps)
    if steps == 1:
        shards.agree_on_step(nn.Linear(1, 1), kept)  # type: ignore[arg-type]
        assert kept.gone_back == [0]
        return
    with pytest.raises(UsageError, match=r"folder holds step 5, and another rank's none: .*remove them all"):
        shards.agree_on_step(nn.Linear(1, 1), kept)  # type: ignore[arg-type]
