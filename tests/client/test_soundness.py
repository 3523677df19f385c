"""What servers tell and send is held against what can be, and against what this machine can hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hapi.client import soundness
from hapi.client.dataset_choice import choose_dataset
from hapi.client.soundness import check_finite, check_head, check_inputs
from hapi.client.transport.server_pool import ServerPool
from hapi.errors import BadRequestError, HapiError, UsageError, WireError, from_problem
from hapi.models.zoo.build import ModelSpec
from hapi.wire.frames import Buffer
from hapi.wire.messages import MAX_CLASSES, DatasetDescription
from hapi.wire.report import RequestReport
from hapi.wire.transport.http import LoopbackTransport

DESCRIPTION: dict[str, Any] = {
    "reference": {"name": "cats", "version": "0" * 32}, "count": 1000, "classes": ["a", "b"], "total_bytes": 12345,
    "layout": {"kind": "encoded", "sample_shape": None, "sample_dtype": None}, "group": 16, "window": 8,
    "transform": {"resize": 256, "crop": 224, "mean": [0, 0, 0], "std": [1, 1, 1]},
}  # fmt: skip


def described(**changes: Any) -> DatasetDescription:
    """As a client reads it from a server that tells this."""
    body = json.dumps({**DESCRIPTION, **changes}).encode()

    def handler(method: str, path: str, asked: bytes) -> tuple[int, dict[str, str], Iterator[Buffer]]:
        return 200, {}, iter([body])

    return choose_dataset(ServerPool([LoopbackTransport(handler)]), "cats")


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"count": 1 << 48}, UsageError, "has 281474976710656 samples by its server's description"),
        ({"count": -1}, BadRequestError, "count"),
        ({"count": 1 << 65}, BadRequestError, "count"),
        (
            {"count": 1 << 70},
            BadRequestError,
            r"the answer is not JSON \(an integer of 22 digits\)",
        ),
        ({"count": 1.5}, BadRequestError, "count"),
        ({"classes": ["x"] * (MAX_CLASSES + 1)}, BadRequestError, "more than 1048576 classes"),
        ({"classes": ["x" * 5000]}, BadRequestError, "more than 4096 characters"),
        ({"group": 1 << 60}, BadRequestError, "group"),
        ({"window": 0}, BadRequestError, "window"),
        ({"total_bytes": 1 << 63}, BadRequestError, "total_bytes"),
    ],
)
def test_descriptions_that_cannot_be(changes: dict[str, Any], kind: type[HapiError], match: str) -> None:
    with pytest.raises(kind, match=match) as caught:
        described(**changes)
    assert str(caught.value).isprintable()


def test_names_of_classes_cannot_steer_a_terminal() -> None:
    assert described(classes=["cat", "\x1b[2Jdog", "\u202etac", "\ud800"]).classes == (
        "cat", r"\x1b[2Jdog", r"\u202etac", r"\ud800",
    )  # fmt: skip


def test_inputs_that_no_machine_holds() -> None:
    shape = [1 << 24, 1 << 24]
    huge = described(
        layout={"kind": "tensor", "sample_shape": shape, "sample_dtype": "float32"}, transform=None
    )
    with pytest.raises(UsageError, match=r"samples of shape \(16777216, 16777216\).*one takes 1\.00 PiB"):
        check_inputs(huge, None)
    assert check_inputs(described(), described().transform) == (3, 224, 224)


def test_classes_whose_head_no_machine_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(
        architecture="resnet18", num_classes=3_000_000, weights="random:0", input_shape=(3, 32, 32)
    )
    monkeypatch.setattr(soundness, "free_bytes", lambda device: 8 << 30)
    with pytest.raises(UsageError, match=r"has 3000000 classes.*head of resnet18"):
        check_head(spec, 3_000_000, True)
    check_head(spec, 100_000, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_are_found(dtype: torch.dtype, value: float) -> None:
    values = torch.ones(9, 3, 4).to(dtype)
    check_finite(values, range(9), "x")
    values[1:8, 2, 1] = value
    with pytest.raises(
        WireError, match=r"x are .* of sample 21, 22, 23, 24, 25 and 2 more: .*--check-features off"
    ):
        check_finite(values, np.arange(20, 29), "x")


def test_values_whose_sum_is_too_large_are_numbers() -> None:
    check_finite(torch.full((4, 5), 3e38), range(4), "x")
    check_finite(torch.full((4, 500), 60000.0, dtype=torch.float16), range(4), "x")
    check_finite(torch.full((4, 5), 1 << 60), range(4), "x")
    check_finite(torch.empty(0, 5), [], "x")


@pytest.mark.parametrize("seconds", [-1, 10**400, float("nan"), float("inf"), True, "5", [5], 1e10])
def test_seconds_that_cannot_be_are_not_believed(seconds: Any) -> None:
    problem = {
        "type": "urn:hapi:problem:busy",
        "detail": "full",
        "retry_after": seconds,
        "expected_wait": seconds,
    }
    error = from_problem(problem, 429)
    assert (error.retry_after, error.expected_wait) == (None, None)


def test_reports_show_what_is_printable() -> None:
    report = RequestReport.from_json(
        {
            "server": "\x1b]0;x\x07" * 50, "seconds": {"forward": 1e308, "\x1b": 1}, "cpu": {}, "busy": [5, -1],
            "work": [0, 1e300], "others": [0, 0], "process": [0, 0], "clock": [0, 0], "pages": -5, "first": 1e99,
            "cos_batch": 10**30, "layers": [-1.0, 1e99], "wait": -3,
            "tier": {"device": "\u202ecpu", "processors": -4, "threads": 10**9, "running": 0, "devices": 0, "reuse": 1},
        }
    )  # fmt: skip
    assert report.server.isprintable() and len(report.server) <= 64
    assert report.tier.device == r"\u202ecpu"
    assert report.seconds == {"forward": 1e9} and report.layers == (0.0, 1e9) and report.pages == 0
    assert (report.tier.processors, report.tier.running, report.first) == (1, 1, 1e9)
