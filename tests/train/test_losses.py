"""Losses, targets, class weights and mixup, each beside plain PyTorch or scikit-learn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from hapi.api.inference import same_classes
from hapi.errors import UsageError
from hapi.text import class_name
from hapi.train.objective.class_weights import balanced, in_order, read_class_weights
from hapi.train.objective.criterion import Criterion, criterion_of
from hapi.train.objective.losses import Loss
from hapi.train.objective.mixing import Targets, mix
from hapi.train.objective.names import loss_of
from hapi.train.settings import ObjectiveSettings

ROWS, CLASSES = 12, 4
generator = torch.Generator().manual_seed(3)
OUTPUTS = torch.randn(ROWS, CLASSES, generator=generator)
LABELS = torch.arange(ROWS) % CLASSES
SEVERAL = (torch.rand(ROWS, CLASSES, generator=generator) > 0.6).float()
NUMBERS = torch.randn(ROWS, CLASSES, generator=generator) * 2
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0])


def criterion(kind: Any = "single", **changes: Any) -> Criterion:
    return criterion_of(
        ObjectiveSettings(**changes),
        kind,
        ("a", "b", "c", "d"),
        counts=[1, 2, 3, 4],
        samples=10,
        seed=0,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("loss", "targets", "plain"),
    [
        (Loss(), LABELS, nn.CrossEntropyLoss()),
        (Loss(smoothing=0.1), LABELS, nn.CrossEntropyLoss(label_smoothing=0.1)),
        (Loss(weights=WEIGHTS), LABELS, nn.CrossEntropyLoss(weight=WEIGHTS)),
        (Loss(weights=WEIGHTS, smoothing=0.2), LABELS, nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2)),
        (Loss(name="bce"), SEVERAL, nn.BCEWithLogitsLoss()),
        (Loss(name="bce", weights=WEIGHTS), SEVERAL, nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
        (Loss(name="mse"), NUMBERS, nn.MSELoss()),
        (Loss(name="l1"), NUMBERS, nn.L1Loss()),
        (Loss(name="huber"), NUMBERS, nn.SmoothL1Loss()),
        (Loss(name="huber", delta=0.5), NUMBERS, nn.HuberLoss(delta=0.5)),
    ],
)  # fmt: skip
def test_losses_are_those_of_pytorch(loss: Loss, targets: torch.Tensor, plain: nn.Module) -> None:
    ours, theirs = OUTPUTS.clone().requires_grad_(), OUTPUTS.clone().requires_grad_()
    found, expected = loss(ours, targets), plain(theirs, targets)
    found.backward()
    expected.backward()
    assert torch.equal(found, expected) and ours.grad is not None and theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_smoothed_targets_of_several_labels() -> None:
    expected = nn.functional.binary_cross_entropy_with_logits(OUTPUTS, SEVERAL * 0.8 + 0.1)
    torch.testing.assert_close(Loss(name="bce", smoothing=0.2)(OUTPUTS, SEVERAL), expected)


@pytest.mark.parametrize(
    ("name", "targets"), [("cross-entropy", LABELS), ("bce", SEVERAL), ("mse", NUMBERS), ("l1", NUMBERS)]
)
def test_losses_of_a_validation_are_plain(name: Any, targets: torch.Tensor) -> None:
    plain = Loss(name=name)
    loss = Loss(name=name, smoothing=0.3 if name in ("cross-entropy", "bce") else 0.0, weights=WEIGHTS)
    torch.testing.assert_close(loss.total(OUTPUTS, targets) / ROWS, plain(OUTPUTS, targets))
    torch.testing.assert_close(loss.each(OUTPUTS, targets).mean(), plain(OUTPUTS, targets))
    assert loss.each(OUTPUTS, targets).shape == (ROWS,)


def test_the_loss_follows_the_labels() -> None:
    assert [loss_of("auto", kind) for kind in ("single", "multi", "regression")] == [
        "cross-entropy",
        "bce",
        "mse",
    ]
    assert loss_of("huber", "regression") == "huber"
    with pytest.raises(
        UsageError, match=r"^--loss mse: the dataset has one class for each sample; give cross-ent"
    ):
        loss_of("mse", "single")
    with pytest.raises(UsageError, match=r"--label-smoothing: needs classes"):
        criterion("regression", label_smoothing=0.1)
    with pytest.raises(UsageError, match=r"--class-weights: needs classes"):
        criterion("regression", class_weights="balanced")


# -- class weights -----------------------------------------------------------------------------------------------


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    labels = np.repeat([0, 1, 2, 3], [1, 2, 3, 4])
    expected = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    np.testing.assert_allclose(balanced([1, 2, 3, 4], 10, "single"), expected)
    np.testing.assert_allclose(criterion(class_weights="balanced").loss.weights, expected, rtol=1e-6)


def test_balanced_weights_of_absent_classes() -> None:
    """As if they did not exist."""
    assert balanced([2, 0, 6], 8, "single") == (2.0, 0.0, 8 / 12)
    assert balanced([2, 0, 8], 8, "multi") == (3.0, 1.0, 1.0)


def test_without_counts_balanced_weights_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--class-weights balanced: the server does not tell"):
        criterion_of(
            ObjectiveSettings(class_weights="balanced"), "single", "ab", counts=None, samples=4, seed=0,
            device=torch.device("cpu"),
        )  # fmt: skip


def test_names_of_classes_are_compared_as_servers_send_them() -> None:
    names = ("caf\udce9", "ünï", "ab\u200cc")
    arrived = tuple(map(class_name, names))
    assert in_order({name: float(n) for n, name in enumerate(names)}, arrived, "FILE") == (0.0, 1.0, 2.0)
    assert same_classes(arrived, names, whole=True) and same_classes(arrived, names[:2], whole=False)
    assert not same_classes(arrived, names[:2], whole=True)
    assert not same_classes(arrived, names[1:], whole=False)


def test_weights_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    path.write_text(json.dumps({"d": 4, "c": 2, "b": 1, "a": 0.5}))
    weights = criterion(class_weights=str(path)).loss.weights
    assert weights is not None and torch.equal(weights, WEIGHTS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", r"expected JSON such as"),
        ("[1, 2]", r"expected JSON such as"),
        ('{"a": "1"}', r"class 'a': expected JSON such as"),
        ('{"a": -1}', r"class 'a': expected"),
        ('{"a": NaN}', r"expected JSON such as"),
        ('{"a": 1, "b": 1, "c": 1}', r"class 'd' has no weight"),
        ('{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}', r"has no class 'e'"),
        ('{"a": 0, "b": 1, "c": 1, "d": 1}', r"class 'a': expected"),  # a batch of a's would have no loss
    ],
)
def test_files_that_are_no_weights(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=rf"^--class-weights .*weights.json: {message}|{message}"):
        criterion(class_weights=str(path))
    with pytest.raises(UsageError, match=r"cannot be read: No such file"):
        read_class_weights(str(tmp_path / "no"))


# -- mixup -------------------------------------------------------------------------------------------------------


def test_features_and_targets_are_mixed_alike() -> None:
    features = torch.randn(ROWS, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    mixed, targets = mix(features, NUMBERS, 0.4, seed=1, epoch=2, batch=3)
    flat = torch.cat([features.flatten(1), NUMBERS], 1)
    both = torch.cat([mixed.flatten(1), targets.own], 1)
    # Each row is a share of its own and of another row: with all pairs tried, one fits.
    for row in range(ROWS):
        fits = [
            torch.allclose(both[row], flat[row] * share + flat[other] * (1 - share), atol=1e-5)
            for other in range(ROWS)
            for share in [_share(1, 2, 3)]
        ]
        assert any(fits)
    assert targets.other is None


def _share(seed: int, epoch: int, batch: int) -> float:
    return mix(torch.zeros(ROWS, 1), LABELS, 0.4, seed, epoch, batch)[1].share


def test_mixup_depends_on_seed_epoch_and_batch_alone() -> None:
    shares = {_share(s, e, b) for s in range(3) for e in range(3) for b in range(3)}
    assert len(shares) == 27
    torch.manual_seed(0)
    once = mix(OUTPUTS, LABELS, 0.4, 1, 2, 3)
    torch.manual_seed(1)
    again = mix(OUTPUTS, LABELS, 0.4, 1, 2, 3)
    assert torch.equal(once[0], again[0]) and once[1].share == again[1].share
    assert torch.equal(once[1].own, LABELS) and once[1].other is not None
    assert sorted(once[1].other.tolist()) == sorted(LABELS.tolist())


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_loss_of_mixed_classes(share: float) -> None:
    """That of soft targets."""
    other = LABELS.flip(0)
    soft = share * nn.functional.one_hot(LABELS, CLASSES) + (1 - share) * nn.functional.one_hot(
        other, CLASSES
    )
    made, targets = criterion(feature_mixup=0.2), Targets(LABELS, other, share)
    torch.testing.assert_close(made.value(OUTPUTS, targets), nn.functional.cross_entropy(OUTPUTS, soft))
    expected = LABELS if share > 0.5 else other
    assert int(made.right(OUTPUTS, targets)) == int((OUTPUTS.argmax(1) == expected).sum())


def test_right_predictions() -> None:
    assert int(criterion().right(OUTPUTS, Targets(LABELS))) == int((OUTPUTS.argmax(1) == LABELS).sum())
    right = criterion("multi").right(OUTPUTS, Targets(SEVERAL))
    assert int(right) == int(((OUTPUTS.sigmoid() > 0.5) == SEVERAL.bool()).sum())
    assert criterion("multi").accuracy(int(right), ROWS) == pytest.approx(int(right) / ROWS / CLASSES)
    assert criterion("regression").accuracy(0, ROWS) is None
    assert math.isclose(criterion().accuracy(3, ROWS) or 0, 0.25)


def test_facts_that_make_another_training() -> None:
    made = {
        json.dumps(criterion(**changes).identity())
        for changes in (
            {}, {"class_weights": "balanced"}, {"kind": "regression"}, {"kind": "regression", "loss": "huber"},
        )
    }  # fmt: skip
    assert len(made) == 4
    assert criterion(metric=("f1",), best="auroc").identity() == criterion().identity()
