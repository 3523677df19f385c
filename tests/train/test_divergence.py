"""A training that diverged stops at once; what was kept before stays as it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_job import Silent, open_session, trainer_of
from torch import nn

from hapi.errors import DivergedError, by_slug, from_problem
from hapi.train.steps.divergence import Finite
from hapi.train.trainer import Trainer
from hapi.wire.transport.http import Handler


class Poisoning(Silent):
    """Makes a weight, or a value of the optimiser, infinite after a step."""

    def __init__(self, at: int, where: str) -> None:
        super().__init__()
        self.at, self.where = at, where
        self.trainer: Trainer | None = None

    def on_step(self, steps: int) -> None:
        if steps == self.at and self.trainer is not None:
            parameter = self.trainer.optimizer.param_groups[0]["params"][0]
            target = parameter.data if self.where == "weight" else self.trainer.optimizer.state[parameter]
            (target if self.where == "weight" else target["momentum_buffer"]).view(-1)[0] = math.inf


def diverging(remembered: Handler, watcher: Silent, **changes: Any) -> tuple[Trainer, DivergedError]:
    with open_session(remembered, **changes) as session:
        trainer = trainer_of(session, watcher, **changes)
        if isinstance(watcher, Poisoning):
            watcher.trainer = trainer
        with pytest.raises(DivergedError) as caught:
            trainer.run()
        trainer.report()
    return trainer, caught.value


def test_a_loss_that_is_not_finite_stops_the_training(remembered: Handler, tmp_path: Path) -> None:
    watcher = Silent()
    path = tmp_path / "training.pt"
    changes = {"lr": 1e6, "weight_decay": 1e3, "checkpoint_every": 1}
    trainer, error = diverging(remembered, watcher, epochs=50, checkpoint=str(path), **changes)
    line = str(error)
    assert f"at epoch {error.epoch}, batch {error.batch}, learning rate 1e+06; lower --lr" in line
    assert "\n" not in line
    assert trainer.ended["how"] == "diverged" and trainer.ended["detail"] == line
    assert watcher.steps < 20, "it stopped soon"
    if path.exists():
        state = torch.load(path, weights_only=True)
        assert all(v.isfinite().all() for v in state["trained"].values())


@pytest.mark.parametrize("where", ["weight", "momentum"])
@pytest.mark.parametrize("every", [1, None])
def test_a_state_that_is_not_finite_is_not_kept(
    remembered: Handler, tmp_path: Path, where: str, every: int | None
) -> None:
    """Poisoned after step 2 of the second epoch: the file is that of the step or the epoch before."""
    path = tmp_path / "training.pt"
    changes = {"checkpoint": str(path), "checkpoint_every": every, "validation": 0.2}
    trainer, error = diverging(remembered, Poisoning(6, where), **changes)
    assert (error.epoch, error.batch) in ((1, 2), (1, 3))
    document = torch.load(path, weights_only=True)
    assert (document["progress"]["epoch"], document["progress"]["batch"]) == ((1, 1) if every else (1, 0))
    assert trainer.has_checkpoint and len(trainer.report()["epochs"]) == 1


def test_the_last_step_of_a_training_is_looked_at_too(remembered: Handler) -> None:
    """Also where nothing is kept: nobody takes such weights for a success."""
    _, error = diverging(remembered, Poisoning(5, "weight"), epochs=1)
    assert "is not finite at epoch 0, batch 5" in str(error)


def test_ctrl_c_does_not_keep_what_diverged(remembered: Handler, tmp_path: Path) -> None:
    class Stopped(Poisoning):
        def on_step(self, steps: int) -> None:
            super().on_step(steps)
            if steps == self.at:
                raise KeyboardInterrupt

    path = tmp_path / "training.pt"
    watcher = Stopped(7, "weight")
    with open_session(remembered) as session:
        watcher.trainer = trainer = trainer_of(session, watcher, checkpoint=str(path))
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
    assert torch.load(path, weights_only=True)["progress"]["batch"] == 0
    assert trainer.ended["how"] == "diverged"


def test_masks_of_infinities_are_no_divergence() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.full((2, 2), -math.inf))
    finite = Finite(module, torch.optim.SGD(module.parameters(), lr=0.1))
    finite.check_state(0, 0)
    finite.note(0, 0, torch.tensor(1.0))
    module.weight.data[0, 0] = math.nan
    with pytest.raises(DivergedError, match=r"weight is not finite at epoch 0, batch 1"):
        finite.check_state(0, 1)


def test_a_server_cannot_say_that_training_diverged() -> None:
    """The exit code and what is kept depend on it."""
    found = from_problem({"type": "urn:hapi:problem:diverged", "detail": "give up"}, 503)
    assert not isinstance(found, DivergedError) and "diverged" not in by_slug()
