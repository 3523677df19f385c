"""Requests with a random transform over HTTP: they carry seed and epoch, and nobody else does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.http_tools import (
    EXTRACT,
    SPLIT,
    TRANSFORM,
    Known,
    ServedApplication,
    check_problem,
    exchange,
    received,
    resnet,
    served,
)

from hapi.data.transforms.pipeline import input_batch
from hapi.wire.references import Augmentation, TransformSpec

AUGMENT = Augmentation(scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5, saturation=0.4)
RANDOM = replace(TRANSFORM, augment=AUGMENT)
IDS = [3, 39, 0, 17, 3]


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ServedApplication]:
    with served(folder) as application:
        yield application


def expected(known: Known, transform: TransformSpec) -> torch.Tensor:
    inputs = input_batch(known.dataset.read(np.array(IDS)), known.dataset.layout, transform)
    front = resnet().segment(0, SPLIT, frozen=True)
    with torch.inference_mode():
        return front(inputs)


def features(running: ServedApplication, known: Known, transform: TransformSpec) -> torch.Tensor:
    answer = exchange(running.port, "POST", EXTRACT, known.extract(IDS, transform=transform.to_json()))
    assert answer.status == 200
    ids, (got, _) = received(answer.body, 2)
    assert ids == IDS
    return torch.from_numpy(got.view(np.float32))


def test_features_of_an_epoch(running: ServedApplication, known: Known) -> None:
    first, second = RANDOM.at(5, 0), RANDOM.at(5, (1 << 63) - 1)
    for transform in (first, second, TRANSFORM, first):
        wanted = expected(known, transform)
        got = features(running, known, transform).reshape(wanted.shape)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(got[0], got[4])  # the same sample twice
    assert not torch.allclose(expected(known, first), expected(known, second), atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epoch": None}, ("transform.epoch", "expected an integer from 0")),
        ({"seed": -1}, ("transform.seed", "expected an integer from 0")),
        ({"augment": None}, ("transform.augment", "expected an object")),
        ({"augment": {"flip": 7}}, ("transform.augment.flip", "from 0 to 1")),
        ({"augment": {"flip": float("nan")}}, ("is not JSON", "NaN is not a number")),
        ({"augment": {"mixup": 0.2}}, ("transform.augment", "unknown field 'mixup'")),
    ],
    ids=str,
)
def test_wrong_fields(
    running: ServedApplication, known: Known, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    transform = {**RANDOM.at(5, 0).to_json(), **changes}
    check_problem(exchange(running.port, "POST", EXTRACT, known.extract(transform=transform)), 400, *words)


def test_padding_that_leaves_nothing(running: ServedApplication, known: Known) -> None:
    transform = replace(TRANSFORM, augment=Augmentation(padding=32)).at(5, 0).to_json()
    check_problem(
        exchange(running.port, "POST", EXTRACT, known.extract(transform=transform)), 422, "padding of 32"
    )


def test_seed_and_epoch_come_with_it_and_only_with_it(running: ServedApplication, known: Known) -> None:
    for transform, word in (
        (RANDOM.to_json(), "field 'epoch' is missing"),
        ({**TRANSFORM.to_json(), "seed": 5}, "field 'augment' is missing"),
    ):
        check_problem(exchange(running.port, "POST", EXTRACT, known.extract(transform=transform)), 400, word)
    assert set(json.loads(exchange(running.port, "GET", "/v1/datasets/digits").body)["transform"]) == {
        "resize", "crop", "mean", "std"
    }  # fmt: skip
