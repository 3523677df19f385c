"""The objective in whole trainings: losses of plain PyTorch, the same after a resume and at every split."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from support.harness import losses
from support.local_job import Interrupting, Silent, open_session, settings_of, trainer_of
from torch import nn

from hapi.config.settings import load
from hapi.errors import ConflictError, NotFoundError, UsageError
from hapi.train.objective.checks import check_objective
from hapi.train.objective.criterion import make_criterion
from hapi.train.objective.validation import DETAILS
from hapi.train.outputs.best import BestEpoch, rank
from hapi.train.settings import TrainSettings
from hapi.train.steps.gradient_step import step_seed
from hapi.wire.held_out import PART
from hapi.wire.transport.http import Handler

WITH = {"label_smoothing": 0.1, "feature_mixup": 0.4}


def train(remembered: Handler, watcher: Silent | None = None, **changes: Any) -> dict[str, Any]:
    with open_session(remembered, **changes) as session:
        return trainer_of(session, watcher, **changes).run()


@pytest.fixture(scope="module")
def mixed(remembered: Handler) -> dict[str, Any]:
    return train(remembered, validation=0.2, metric="f1,auroc", **WITH)


@pytest.mark.slow
def test_a_training_with_mixup_and_smoothing_is_the_plain_one(
    remembered: Handler, mixed: dict[str, Any]
) -> None:
    """Written by hand: pairs and share from numpy, soft targets, torch's loss."""
    with open_session(remembered, validation=0.2) as session:
        module, optimizer = (
            session.trained,
            torch.optim.SGD(session.trained.parameters(), lr=0.01, momentum=0.9),
        )
        for epoch in range(2):
            total, count = 0.0, 0
            for batch, (features, labels) in enumerate(session.epoch(epoch)):
                rng = np.random.default_rng([0x6D69787570, 0, epoch, batch])
                share, other = rng.beta(0.4, 0.4), torch.from_numpy(rng.permutation(len(labels)))
                hot = nn.functional.one_hot(labels, 4)
                torch.manual_seed(step_seed(0, epoch, batch))
                loss = nn.functional.cross_entropy(
                    module(features * share + features[other] * (1 - share)),
                    hot * share + hot[other] * (1 - share),
                    label_smoothing=0.1,
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total, count = total + loss.item() * len(labels), count + len(labels)
            assert mixed["epochs"][epoch]["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("at", [1, 6])
def test_a_resumed_one_is_the_same(
    remembered: Handler, mixed: dict[str, Any], tmp_path: Any, at: int
) -> None:
    path, metrics = (
        str(tmp_path / "c.pt"),
        {"validation": 0.2, "metric": "f1,auroc", "checkpoint": str(tmp_path / "c.pt")},
    )
    with pytest.raises(KeyboardInterrupt):
        train(remembered, Interrupting(at), **metrics, **WITH)
    with pytest.raises(ConflictError, match=r"its feature_mixup is 0.4, this one's None"):
        train(remembered, resume=True, **metrics, label_smoothing=0.1)
    report = train(remembered, resume=True, **metrics, **WITH)
    assert losses(report) == losses(mixed)
    for entry, expected in zip(report["epochs"], mixed["epochs"], strict=True):
        measured = {
            k: v for k, v in entry.items() if k.startswith("validation_") and k != "validation_seconds"
        }
        assert measured == {k: expected[k] for k in measured}
    # Nothing left to do: the details come from the checkpoint.
    again = train(remembered, resume=True, **metrics, **WITH)
    assert again["epochs"][-1][DETAILS] == mixed["epochs"][-1][DETAILS]
    assert path


@pytest.mark.slow
def test_the_same_at_another_split(remembered: Handler, mixed: dict[str, Any]) -> None:
    assert losses(train(remembered, validation=0.2, split=8, **WITH)) == pytest.approx(
        losses(mixed), rel=1e-5
    )


def test_metrics_and_details_in_the_report(mixed: dict[str, Any]) -> None:
    first, last = mixed["epochs"]
    for entry in (first, last):
        names = [name for name in entry if name.startswith("validation_")]
        assert names[:4] == ["validation_loss", "validation_accuracy", "validation_f1", "validation_auroc"]
        assert all(0 <= entry[name] <= 1 for name in names[1:4])
    assert DETAILS not in first
    details = last[DETAILS]
    assert sum(map(sum, details["confusion"])) == 9
    assert [len(details["classes"]), len(details["worst"])] == [4, 9]
    assert {sample["label"] for sample in details["worst"]} <= {c["name"] for c in details["classes"]}


def test_the_worst_samples_are_the_datasets_own(remembered: Handler, mixed: dict[str, Any]) -> None:
    with open_session(remembered, validation=0.2) as session:
        held_out = session.job_context.validation_ids.tolist()
    worst = mixed["epochs"][-1][DETAILS]["worst"]
    assert sorted(sample["id"] for sample in worst) == held_out
    assert all(sample["label"] == str(sample["id"] % 4) for sample in worst)


def test_a_loss_beyond_guessing_is_told(remembered: Handler, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hapi.client"):
        train(remembered, lr=30.0, epochs=1)
    (line,) = [r.getMessage() for r in caplog.records if "has grown" in r.getMessage()]
    assert "more than 3 x ln(4) = 4.159" in line and "lower --lr" in line


# -- the best epoch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "best"), [("auto", 1), ("accuracy", 1), ("loss", 0), ("f1", 2), ("mae", 0), ("auroc", 1)]
)
def test_the_best_epoch_by_any_metric(metric: Any, best: int) -> None:
    measured = [
        {"accuracy": 0.5, "loss": 0.1, "f1": 0.2, "mae": 0.1, "auroc": float("nan")},
        {"accuracy": 0.9, "loss": 0.2, "f1": 0.3, "mae": 0.2, "auroc": 0.5},
        {"accuracy": 0.8, "loss": 0.3, "f1": 0.4, "mae": 0.3, "auroc": 0.4},
    ]
    kept, module = BestEpoch(metric), nn.Linear(1, 1)
    entries = [
        {"epoch": n, "loss": 0.0, DETAILS: {}, **{f"validation_{k}": v for k, v in entry.items()}}
        for n, entry in enumerate(measured)
    ]
    for entry in entries:
        kept.offer(entry, module)
    assert kept.entry is not None and kept.entry["epoch"] == best and DETAILS not in kept.entry
    assert max(entries, key=lambda entry: rank(entry, metric))["epoch"] == best


def test_ranks_without_accuracy_or_validation() -> None:
    assert rank({"loss": 1.0, "validation_loss": 0.5, "validation_mae": 3.0}) == (-0.5, -0.5)
    assert rank({"loss": 1.0}, "auto") == (-1.0, -1.0)


# -- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixup": 0.2}, r"^--mixup: images cannot be mixed, .* give --feature-mixup 0.2"),
        ({"cutmix": 1.0}, r"^--cutmix: images cannot be mixed"),
        ({"metric": "f1"}, r"^--metric f1: is measured on validation samples; give --validation"),
        ({"best": "auroc"}, r"^--best auroc: is measured on validation samples"),
        ({"class_weights": "/no/file.json"}, r"^--class-weights /no/file.json: cannot be read: No such file"),
    ],
)
def test_settings_that_no_training_can_have(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_objective(settings_of(**changes), validated=False)
    check_objective(settings_of(metric="f1", best="auroc"), validated=True)
    check_objective(settings_of(best="loss"), validated=False)


def test_names_that_there_are_not() -> None:
    for name, value in (("metric", "f2"), ("best", "worst"), ("loss", "focal")):
        with pytest.raises(UsageError, match=rf"--{name}.*'?{value}"):
            load(TrainSettings, None, {name: value})


def test_a_loss_of_other_labels_is_refused(remembered: Handler) -> None:
    with pytest.raises(UsageError, match=r"^--loss mse: the dataset has one class"):
        train(remembered, loss="mse")


@pytest.mark.parametrize(("share", "held"), [(0.2, 9), (0.5, 23), (0.7, 32)])
def test_balanced_weights_count_training_samples_alone(remembered: Handler, share: float, held: int) -> None:
    job = {"class_weights": "balanced", "validation": share}
    with open_session(remembered, **job) as session:
        labels = session.job_context.training_ids % 4
        found = make_criterion(settings_of(**job), session).loss.weights
    assert len(labels) == 46 - held and found is not None
    expected = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_server_that_does_not_count_held_out_samples_is_told(remembered: Handler) -> None:
    def earlier(method: str, path: str, body: bytes) -> Any:
        if f"/{PART}/" in path:
            return 404, {}, iter([json.dumps(NotFoundError("no such path").to_problem()).encode()])
        return remembered(method, path, body)

    with open_session(earlier, validation=0.2) as session:
        with pytest.raises(UsageError, match=r"^--class-weights balanced: the server does not tell how many"):
            make_criterion(settings_of(class_weights="balanced"), session)
        assert make_criterion(settings_of(), session).loss.weights is None


def test_balanced_weights_of_a_dataset_that_was_replaced(remembered: Handler) -> None:
    def replaced(method: str, path: str, body: bytes) -> Any:
        if f"/{PART}/" in path:
            answer = {"version": "a" * 32, "label_counts": [2, 2, 2, 3]}
            return 200, {}, iter([json.dumps(answer).encode()])
        return remembered(method, path, body)

    with (
        open_session(replaced, validation=0.2) as session,
        pytest.raises(ConflictError, match="was replaced"),
    ):
        make_criterion(settings_of(class_weights="balanced"), session)


def test_balanced_weights_come_from_the_servers_counts(remembered: Handler) -> None:
    """46 samples of 4 classes: 12, 12, 11 and 11."""
    weights = torch.tensor([46 / 4 / count for count in (12, 12, 11, 11)])
    with open_session(remembered, class_weights="balanced", epochs=1) as session:
        assert session.job_context.description.label_counts == (12, 12, 11, 11)
        found = trainer_of(session, class_weights="balanced", epochs=1).run()["epochs"][0]["loss"]
    with open_session(remembered) as session:
        module, total = session.trained, 0.0
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        for batch, (features, labels) in enumerate(session.epoch(0)):
            torch.manual_seed(step_seed(0, 0, batch))
            loss = nn.functional.cross_entropy(module(features), labels, weight=weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
    assert found == pytest.approx(total / 46, rel=1e-6)
