"""Training that ends when it no longer gets better."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.local_job import Interrupting, Silent, open_session, trainer_of

from hapi.client.joint.ranks import Ranks
from hapi.train.steps.early_stopping import stop_reason
from hapi.wire.transport.http import Handler


@pytest.mark.parametrize(
    ("scores", "least", "since"),
    [
        ([], 0.0, 0),
        ([0.5, 0.6, 0.7], 0.0, 0),
        ([0.5, 0.5, 0.5], 0.0, 2),
        ([0.5, 0.5, 0.5001], 0.0, 0),
        ([0.5, 0.58, 0.59], 0.1, 2),
        ([-2.0, -1.0, -1.5, -3.0], 0.0, 2),
        ([math.nan, math.nan], 0.0, 2),
        ([-math.inf, -math.inf, 1.0], 0.0, 0),
    ],
)
def test_stops_after_epochs_without_improvement(scores: list[float], least: float, since: int) -> None:
    found = stop_reason(scores, 2, least)
    assert bool(found) == (since >= 2)
    assert not found or f"no improvement in {since} epochs" in found


def run(remembered: Handler, watcher: Silent, **changes: Any) -> dict[str, Any]:
    changes = {"epochs": 9, "early_stopping": 2, "min_improvement": 50.0, "validation": 0.2, **changes}
    with open_session(remembered, **changes) as session:
        return trainer_of(session, watcher, **changes).run()


@pytest.mark.slow
def test_a_training_that_stops_early(remembered: Handler, tmp_path: Path) -> None:
    """An accuracy can never be better by 50: the first epoch stays the best."""
    output = str(tmp_path / "run")
    report = run(remembered, Silent(), output=output)
    assert report["ended"] == {
        "how": "stopped early", "epoch": 3, "batch": 0, "detail": "no improvement in 2 epochs after epoch 0",
    }  # fmt: skip
    assert len(report["epochs"]) == 3 and (tmp_path / "run" / "model.safetensors").exists()
    watcher = Silent()
    again = run(remembered, watcher, output=output, resume=True)
    assert watcher.steps == 0 and again["ended"] == report["ended"]
    more = run(remembered, watcher, output=output, resume=True, early_stopping=4)
    assert watcher.steps == 8 and len(more["epochs"]) == 5


def test_a_resumed_run_counts_the_epochs_before(remembered: Handler, tmp_path: Path) -> None:
    path = str(tmp_path / "training.pt")
    with pytest.raises(KeyboardInterrupt):
        run(remembered, Interrupting(6), checkpoint=path)
    assert len(run(remembered, Silent(), checkpoint=path, resume=True)["epochs"]) == 3


class Second(Ranks):
    """One of two ranks, the first of which decides after each epoch whether both stop."""

    def __init__(self, *decisions: str) -> None:
        self.decisions = list(decisions)

    def gathered(self, value: Any) -> list[Any]:
        return [self.decisions.pop(0) if isinstance(value, str) else value, value]


@pytest.mark.parametrize(("decisions", "epochs"), [(("", "", "", ""), 4), (("", "it has had enough"), 1)])
def test_the_first_rank_decides_for_all(remembered: Handler, decisions: tuple[str, ...], epochs: int) -> None:
    """Metrics may differ in the last bits: one would stop, and the others wait for its part of the next step."""
    changes = {"epochs": 4, "early_stopping": 2, "min_improvement": 50.0, "validation": 0.2}
    with open_session(remembered, **changes) as session:
        session.ranks = Second(*decisions)
        report = trainer_of(session, **changes).run()
    assert len(report["epochs"]) == epochs and report["ended"]["detail"] == decisions[-1]


def test_the_last_epoch_is_no_early_stop(remembered: Handler) -> None:
    assert run(remembered, Silent(), epochs=3)["ended"]["how"] == "finished"


def test_by_the_metric_of_the_best_epoch(remembered: Handler) -> None:
    report = run(remembered, Silent(), epochs=4, min_improvement=0.01, best="loss")
    scores = [-entry["validation_loss"] for entry in report["epochs"]]
    assert stop_reason(scores[:-1], 2, 0.01) == ""
    assert len(scores) == 4 or report["ended"]["detail"] == stop_reason(scores, 2, 0.01)
