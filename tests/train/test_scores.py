"""Metrics of a validation beside scikit-learn, confusion matrix, worst samples, the warning for a loss that grows."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from hapi.errors import UsageError
from hapi.train.objective import scores
from hapi.train.objective.findings import MOST_CLASSES, WORST_SAMPLES, Findings
from hapi.train.objective.growth import LossGrowth
from hapi.train.objective.losses import Loss
from hapi.train.objective.names import METRICS, MetricName, metrics_of
from hapi.train.objective.scores import Scores
from hapi.train.objective.validation import Validation

ROWS, CLASSES = 200, 7
generator = torch.Generator().manual_seed(5)
LABELS = torch.randint(0, CLASSES - 1, (ROWS,), generator=generator)  # the last class has no samples
OUTPUTS = torch.randn(ROWS, CLASSES, generator=generator) + 1.5 * torch.nn.functional.one_hot(LABELS, CLASSES)
SEVERAL = (torch.rand(ROWS, CLASSES, generator=generator) > 0.7).float()
SEVERAL[:, -1] = 0
LOGITS = torch.randn(ROWS, CLASSES, generator=generator) + SEVERAL
NUMBERS = torch.randn(ROWS, 2, generator=generator)
GUESSES = NUMBERS + 0.3 * torch.randn(ROWS, 2, generator=generator)


def measured(
    names: Any, kind: Any, outputs: torch.Tensor, targets: torch.Tensor, bs: int = 32
) -> dict[str, float]:
    found = Scores(names, kind, outputs.shape[1], len(outputs))
    for start in range(0, len(outputs), bs):
        found.update(outputs[start : start + bs], targets[start : start + bs])
    return found.result()


def of_kind(kind: Any) -> tuple[MetricName, ...]:
    return tuple(name for name, metric in METRICS.items() if kind in metric.kinds)


def test_one_class_for_each_sample() -> None:
    found = measured(of_kind("single"), "single", OUTPUTS, LABELS)
    truth, shares, chosen = LABELS.numpy(), OUTPUTS.softmax(1).numpy(), OUTPUTS.argmax(1).numpy()
    there = range(CLASSES - 1)
    average: dict[str, Any] = {"average": "macro", "zero_division": 0}
    expected = {
        "accuracy": sk.accuracy_score(truth, chosen),
        "top5": sk.top_k_accuracy_score(truth, shares, k=5, labels=range(CLASSES)),
        "f1": sk.f1_score(truth, chosen, **average),
        "precision": sk.precision_score(truth, chosen, **average),
        "recall": sk.recall_score(truth, chosen, **average),
        "auroc": np.mean([sk.roc_auc_score(truth == c, shares[:, c]) for c in there]),
        "average_precision": np.mean([sk.average_precision_score(truth == c, shares[:, c]) for c in there]),
    }
    assert found == pytest.approx(expected, abs=1e-5)
    assert list(found) == list(expected)


def test_two_classes() -> None:
    found = measured(("auroc",), "single", OUTPUTS[:, :2], LABELS % 2)
    shares = OUTPUTS[:, :2].softmax(1)[:, 1].numpy()
    assert found["auroc"] == pytest.approx(sk.roc_auc_score((LABELS % 2).numpy(), shares), abs=1e-5)


def test_several_classes_for_each_sample() -> None:
    found = measured(of_kind("multi"), "multi", LOGITS, SEVERAL)
    truth, shares = SEVERAL.numpy(), LOGITS.sigmoid().numpy()
    average: dict[str, Any] = {"average": "macro", "zero_division": 0}
    expected = {
        "accuracy": ((shares > 0.5) == truth).mean(),
        "f1": sk.f1_score(truth, shares > 0.5, **average),
        "precision": sk.precision_score(truth, shares > 0.5, **average),
        "recall": sk.recall_score(truth, shares > 0.5, **average),
        "auroc": sk.roc_auc_score(truth[:, :-1], shares[:, :-1]),
        "average_precision": sk.average_precision_score(truth[:, :-1], shares[:, :-1]),
    }
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("columns", [1, 2])
def test_numbers(columns: int) -> None:
    truth, guesses = NUMBERS[:, :columns].double(), GUESSES[:, :columns].double()
    found = measured(of_kind("regression"), "regression", guesses, truth)
    expected = {
        "mae": sk.mean_absolute_error(truth, guesses),
        "rmse": math.sqrt(sk.mean_squared_error(truth, guesses)),
        "r2": sk.r2_score(truth, guesses),
    }
    assert found == pytest.approx(expected, abs=1e-9)


def test_curves_of_many_samples_have_fixed_points() -> None:
    exact = measured(("auroc", "average_precision"), "single", OUTPUTS, LABELS)
    with mock.patch.object(scores, "EXACT_VALUES", 100):
        assert measured(("auroc", "average_precision"), "single", OUTPUTS, LABELS) == pytest.approx(
            exact, abs=5e-3
        )


def test_a_curve_without_samples_of_both_kinds() -> None:
    assert math.isnan(measured(("auroc",), "single", OUTPUTS[:8], torch.zeros(8, dtype=torch.int64))["auroc"])


def test_r2_of_one_sample_is_no_number() -> None:
    for number in NUMBERS[:1], NUMBERS[:1, :1]:
        found = measured(("mae", "rmse", "r2"), "regression", number + 1, number)
        assert math.isnan(found["r2"]) and [found["mae"], found["rmse"]] == pytest.approx([1, 1])


def test_a_single_class() -> None:
    """All is right, and there are no curves."""
    found = measured(of_kind("single"), "single", OUTPUTS[:9, :1], torch.zeros(9, dtype=torch.int64))
    for name in ("accuracy", "top5", "f1", "precision", "recall", "average_precision"):
        assert found[name] == 1, name
    assert math.isnan(found["auroc"])


def test_accuracy_needs_no_torchmetrics() -> None:
    absent = dict.fromkeys(("torchmetrics", "torchmetrics.classification"))
    with mock.patch.dict(sys.modules, absent):
        assert set(measured(("accuracy", "top5"), "single", OUTPUTS, LABELS)) == {"accuracy", "top5"}
        with pytest.raises(UsageError, match=r"^--metric f1 needs torchmetrics .*: pip install"):
            measured(("f1",), "single", OUTPUTS, LABELS)


def test_metrics_by_kind() -> None:
    assert metrics_of((), "auto", "single", 5) == ("accuracy",)
    assert metrics_of((), "auto", "single", 6) == ("accuracy", "top5")
    assert metrics_of((), "auto", "multi", 3) == ("accuracy", "f1", "auroc")
    assert metrics_of((), "auto", "regression", 1) == ("mae", "rmse")
    assert metrics_of(("f1",), "auroc", "single", 3) == ("accuracy", "f1", "auroc")
    assert metrics_of(("r2",), "loss", "regression", 3) == ("r2",)
    with pytest.raises(
        UsageError, match=r"^--metric mae: the dataset has one class for each sample; give one of acc"
    ):
        metrics_of(("mae",), "auto", "single", 3)
    with pytest.raises(
        UsageError, match=r"^--best f1: the dataset has numbers as labels; give one of mae, rmse, r2"
    ):
        metrics_of((), "f1", "regression", 3)


# -- findings ----------------------------------------------------------------------------------------------------


def found_in(kind: Any, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss, bs: int) -> Findings:
    findings = Findings(kind, [f"c{n}" for n in range(outputs.shape[1])])
    for start in range(0, len(outputs), bs):
        rows = slice(start, start + bs)
        losses = loss.each(outputs[rows], targets[rows])
        findings.update(range(1000 + start, 1000 + start + bs), outputs[rows], targets[rows], losses)
    return findings


def test_the_confusion_matrix() -> None:
    expected = sk.confusion_matrix(LABELS, OUTPUTS.argmax(1), labels=range(CLASSES)).tolist()
    assert found_in("single", OUTPUTS, LABELS, Loss(), 30).confusion == expected
    assert Findings("multi", ["a", "b"]).confusion is None
    assert Findings("single", ["a"] * (MOST_CLASSES + 1)).confusion is None


@pytest.mark.parametrize("bs", [7, 64, 500])
def test_the_worst_samples(bs: int) -> None:
    losses = Loss().each(OUTPUTS, LABELS)
    order = losses.argsort(descending=True)[:WORST_SAMPLES]
    worst = found_in("single", OUTPUTS, LABELS, Loss(), bs).worst
    assert [sample["id"] for sample in worst] == (order + 1000).tolist()
    row = int(order[0])
    chosen = int(OUTPUTS[row].argmax())
    assert worst[0] == {
        "id": 1000 + row,
        "label": f"c{LABELS[row]}",
        "predicted": f"c{chosen}",
        "probability": pytest.approx(float(OUTPUTS[row].softmax(0)[chosen])),
        "loss": pytest.approx(float(losses[row])),
    }


def test_the_worst_samples_of_other_labels() -> None:
    worst = found_in("multi", torch.tensor([[3.0, -2.0], [-1.0, -1.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
                     Loss(name="bce"), 2).worst  # fmt: skip
    assert [(s["label"], s["predicted"], s["probability"]) for s in worst] == [
        ("c1", "c0", None), ("none", "none", None)
    ]  # fmt: skip
    (number,) = found_in(
        "regression", torch.tensor([[1.5]]), torch.tensor([[2.0]]), Loss(name="mse"), 1
    ).worst
    assert (number["label"], number["predicted"], number["loss"]) == ("2", "1.5", 0.25)


def test_a_loss_that_is_no_number_is_the_worst() -> None:
    outputs = OUTPUTS[:3].clone()
    outputs[1] = math.nan
    worst = found_in("single", outputs, LABELS[:3], Loss(), 3).worst
    assert worst[0]["id"] == 1001 and len(worst) == 3


# -- a whole validation ------------------------------------------------------------------------------------------


def test_a_validation_in_the_report() -> None:
    found = Validation(
        "single", [f"c{n}" for n in range(CLASSES)], Loss(smoothing=0.5), ("accuracy", "f1"), ROWS
    )
    for start in range(0, ROWS, 64):
        rows = slice(start, start + 64)
        found.update(list(range(ROWS))[rows], OUTPUTS[rows], LABELS[rows])
    assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(OUTPUTS, LABELS)))
    assert found.scores.result()["accuracy"] == float((OUTPUTS.argmax(1) == LABELS).double().mean())
    details = found.details()
    assert [c["samples"] for c in details["classes"]] == torch.bincount(LABELS, minlength=CLASSES).tolist()
    recalls = sk.recall_score(LABELS, OUTPUTS.argmax(1), average=None)
    assert [c["accuracy"] for c in details["classes"][:-1]] == pytest.approx(recalls[: CLASSES - 1].tolist())
    assert details["classes"][-1]["accuracy"] is None
    assert len(details["worst"]) == WORST_SAMPLES and len(details["confusion"]) == CLASSES


# -- growth ------------------------------------------------------------------------------------------------------


def test_a_loss_that_grows_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    growth = LossGrowth("single", 10)
    with caplog.at_level(logging.WARNING, "hapi.client"):
        for batch, loss in enumerate([2.3, 6.9, 6.91, 9.0]):
            growth.check(loss, 0, batch)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the loss has grown to 6.91 at epoch 0, batch 2, more than 3 x ln(10) = 6.908")


def test_a_loss_that_only_begins_high_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    for kind, losses in (("single", [50.0, 40.0]), ("regression", [1.0, 1e9]), ("multi", [0.7, 2.0])):
        growth = LossGrowth(kind, 10)  # type: ignore[arg-type]
        for batch, loss in enumerate(losses):
            growth.check(loss, 0, batch)
    assert not caplog.records
