"""Loops that a user interrupts and begins again, and jobs whose children live on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import clipped, images_model, offloaded, plain, train, weights_equal
from torch import nn

from hapi.errors import UsageError
from hapi.offload.optimizer import OffloadedOptimizer
from hapi.offload.states.disk import DiskStates
from hapi.offload.states.folder import OffloadFolder
from hapi.offload.updates import PieceUpdate


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("where", ["in an update ahead", "in an update at the step", "in the commit"])
def test_an_interrupted_step_is_not_gone_on_with(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook: without a word the next step would wait for ever, or begin with half of an update."""
    loop = clipped if where == "in an update at the step" else plain
    model = images_model()
    moved = offloaded(model, adamw(model), tmp_path)
    train(model, moved, range(5), loop)
    update, commit = PieceUpdate.__call__, OffloadedOptimizer._commit

    def interrupted(self: Any, *of: Any) -> None:
        if where == "in the commit":
            commit(self, *of)
        else:
            update(self, *of)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if where == "in the commit":
            patched.setattr(OffloadedOptimizer, "_commit", interrupted)
        else:
            patched.setattr(PieceUpdate, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop(model, moved, 5)
    with pytest.raises(
        UsageError, match=r"an update was interrupted.*close\(\) this optimizer and give the model"
    ):
        train(model, moved, range(5, 7), loop)
    moved.close()
    again, twin = images_model(), images_model()
    train(twin, adamw(twin), range(8), loop)
    with offloaded(again, adamw(again), tmp_path) as found:
        assert found.steps == 5
        train(again, found, range(found.steps, 8), loop)
        assert weights_equal(again, twin)


def test_children_that_outlive_a_killed_job_do_not_hold_its_folder(tmp_path: Path) -> None:
    """A loader's workers notice seconds later that the trainer is gone."""
    model = images_model()
    moved = offloaded(model, adamw(model), tmp_path)
    train(model, moved, range(2), plain)
    moved._engine.settle()
    states = moved._store
    assert isinstance(states, DiskStates)
    begun, begins = os.pipe()
    ending, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        os.write(begins, b"1")
        os.read(ending, 1)
        os._exit(0)
    os.close(ending)
    try:
        assert os.read(begun, 1)
        os.close(states._folders[0]._lock)  # as the system does when a process is killed
        OffloadFolder(tmp_path, states._folders[0]._job["signature"], 0, 1, resumes=True).close(remove=False)
        opened = [str(one.readlink()) for one in Path(f"/proc/{child}/fd").iterdir()]
        assert not [path for path in opened if str(tmp_path) in path], "their room would be taken"
    finally:
        os.write(ends, b"1")
        os.waitpid(child, 0)
        states._folders[0]._lock = -1
        moved.close()
