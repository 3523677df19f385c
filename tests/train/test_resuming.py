"""What a resumed training may change: one table, and the learning rate and epochs of what follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import losses
from support.local_job import SETTINGS, Interrupting, Silent, open_session, trainer_of
from torch import nn

from hapi.config.fields import settings_fields
from hapi.errors import UsageError
from hapi.train.checkpoints.resuming import BY_MEANING, FOLLOWING, FREE, Change, Changes, changes_of
from hapi.train.settings import TrainSettings
from hapi.train.steps.gradient_step import step_seed
from hapi.wire.transport.http import Handler


def test_the_table_has_settings_once() -> None:
    names = [field.name for field in settings_fields(TrainSettings)]
    for group in (FOLLOWING, FREE, BY_MEANING):
        assert group <= set(names)
    assert not FOLLOWING & FREE and not FOLLOWING & BY_MEANING and not FREE & BY_MEANING
    assert {"seed", "bs", "drop_last", "optimizer", "momentum", "weight_decay"} <= (
        set(names) - FOLLOWING - FREE - BY_MEANING
    )


def train(remembered: Handler, watcher: Silent | None = None, **changes: Any) -> dict[str, Any]:
    with open_session(remembered, **changes) as session:
        return trainer_of(session, watcher, **changes).run()


def plain_losses(remembered: Handler, rates: list[float]) -> list[float]:
    """Mean losses of the epochs of plain PyTorch, with these learning rates of the steps."""
    with open_session(remembered) as session:
        optimizer = torch.optim.SGD(session.trained.parameters(), lr=rates[0], momentum=0.9)
        found, steps = [], iter(rates)
        for epoch in range(3):
            total = 0.0
            for batch, (features, labels) in enumerate(session.epoch(epoch)):
                optimizer.param_groups[0]["lr"] = next(steps)
                torch.manual_seed(step_seed(0, epoch, batch))
                loss = nn.functional.cross_entropy(session.trained(features), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(labels)
            found.append(total / 46)
        return found


@pytest.mark.slow
def test_another_learning_rate_and_more_epochs(
    remembered: Handler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Interrupted in the first epoch of one, and again in the second of three: as plain PyTorch with those rates."""
    path = str(tmp_path / "training.pt")
    with pytest.raises(KeyboardInterrupt):
        train(remembered, Interrupting(3), checkpoint=path, epochs=1)
    with pytest.raises(KeyboardInterrupt):
        train(remembered, Interrupting(4), checkpoint=path, resume=True, epochs=3, lr=0.003)
    report = train(remembered, checkpoint=path, resume=True, epochs=3, lr=0.003)
    assert losses(report) == pytest.approx(
        plain_losses(remembered, [SETTINGS["lr"]] * 3 + [0.003] * 12), rel=1e-6
    )
    assert report["changes"] == [
        {"epoch": 0, "batch": 3, "setting": "epochs", "before": 1, "after": 3},
        {"epoch": 0, "batch": 3, "setting": "lr", "before": 0.01, "after": 0.003},
    ]
    assert [r.getMessage() for r in caplog.records if "--lr" in r.getMessage()] == [
        "from epoch 0, batch 3 on, --lr is 0.003 and no longer 0.01"
    ]


def test_changes_are_kept() -> None:
    changes, again = Changes(), Changes()
    changes.add(changes_of({"lr": 0.1, "epochs": 2}, {"lr": 0.2, "epochs": 2, "new": 1}, 3, 4))
    assert changes.entries == [Change(3, 4, "lr", 0.1, 0.2), Change(3, 4, "new", None, 1)]
    again.load_state_dict(changes.state_dict())
    assert again.entries == changes.entries


def test_a_trainer_overwrites_no_other_run(tmp_path: Path, remembered: Handler) -> None:
    """A script that is started twice does not lose the hours of its first run, as ``hapi-train`` does not."""
    run = tmp_path / "run"
    with open_session(remembered, epochs=1, split=0) as session:
        first = trainer_of(session, output=str(run))
        first.run()
        first.run()  # a trainer goes on with its own
        before = {path.name: path.read_bytes() for path in run.iterdir()}
        with pytest.raises(
            UsageError, match=r"^--output .*/run/checkpoint.pt: exists; give --resume to go on"
        ):
            trainer_of(session, output=str(run))
        assert {path.name: path.read_bytes() for path in run.iterdir()} == before
        trainer_of(session, output=str(run), resume=True).run()
        (run / "checkpoint.pt").unlink()
        with pytest.raises(UsageError, match=r"^--output .*/run/model.safetensors: exists"):
            trainer_of(session, output=str(run))
        trainer_of(session, checkpoint=str(run / "other.pt")).run()
        with pytest.raises(UsageError, match=r"^--checkpoint .*/run/other.pt: exists"):
            trainer_of(session, checkpoint=str(run / "other.pt"))
