"""``GET /v1/datasets/NAME/held_out/SEED/COUNT``: the classes of the samples that a training holds out."""

from __future__ import annotations

import numpy as np
import pytest
from support.http_tools import COUNT, Known, ServedApplication, check_problem, exchange

from hapi.data.epoch_order import HOLDOUT_EPOCH, epoch_sequence
from hapi.errors import BadRequestError
from hapi.wire.held_out import HeldOut, HeldOutCounts

VERSION = "ab" * 8


@pytest.mark.parametrize(("seed", "count"), [(0, 1), (7, 9), ((1 << 63) - 1, COUNT)])
def test_they_are_those_that_the_client_holds_out(
    server: ServedApplication, known: Known, seed: int, count: int
) -> None:
    held = np.sort(epoch_sequence(seed, HOLDOUT_EPOCH, COUNT)[:count])
    expected = np.bincount(known.dataset.labels(held), minlength=len(known.dataset.classes))
    answer = exchange(server.port, "GET", HeldOut(name=known.dataset.name, seed=seed, count=count).path)
    found = HeldOutCounts.from_json(answer.json())
    assert found == HeldOutCounts(version=known.dataset.version, label_counts=tuple(expected.tolist()))
    assert sum(found.label_counts) == count


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        (f"0/{COUNT + 1}", 404, f"has {COUNT} samples"),
        ("0/0", 400, "count: expected an integer from 1"),
        (f"{1 << 63}/3", 400, "seed: expected an integer from 0"),
        ("-1/3", 400, "seed: expected digits"),
        ("0/3.0", 400, "count: expected digits"),
        ("0/%D9%A3", 400, "count: expected digits"),
        (f"0/{'9' * 5000}", 400, "count: expected digits"),
        ("0", 404, ""),
        ("0/3/4", 404, ""),
    ],
)
def test_wrong_paths(server: ServedApplication, known: Known, end: str, status: int, message: str) -> None:
    path = f"/v1/datasets/{known.dataset.name}/held_out/{end}"
    check_problem(exchange(server.port, "GET", path), status, message)


def test_a_dataset_that_there_is_not(server: ServedApplication) -> None:
    check_problem(exchange(server.port, "GET", HeldOut(name="nowhere", seed=0, count=1).path), 404, "nowhere")


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"version": VERSION},
        {"version": 3, "label_counts": []},
        {"version": VERSION, "label_counts": 3},
        {"version": VERSION, "label_counts": [-1]},
    ],
)
def test_answers_of_another_form(answer: object) -> None:
    with pytest.raises(BadRequestError):
        HeldOutCounts.from_json(answer)


def test_a_later_version_may_answer_more() -> None:
    answer = {"version": VERSION, "label_counts": [1, 2]}
    assert HeldOutCounts.from_json({**answer, "more": 1}) == HeldOutCounts.from_json(answer)
