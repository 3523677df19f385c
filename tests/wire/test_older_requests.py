"""Fields of requests of the wire version before: newer servers take them, newer clients send no others unasked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hapi.wire.frames import OLDEST_VERSION
from hapi.wire.messages import ExtractRequest, SamplesRequest, TensorsRequest
from hapi.wire.warm_up import WarmUpRequest

DIGEST, DATASET = "0123456789abcdef" * 2, {"name": "digits", "version": "0123456789abcdef"}
WINDOWS = {"seed": 3, "epoch": 1, "group": 512, "window": 64}
TRANSFORM = {"resize": 73, "crop": 64, "mean": [0.4, 0.4, 0.4], "std": [0.2, 0.2, 0.2]}
RANDOM = {"augment": {"flip": 0.5}, "seed": 7, "epoch": 3}
PREFIX = {
    "model": {"source": "zoo", "name": "resnet18", "weights": "random:0", "digest": DIGEST, "blocks": [],
              "input_shape": [3, 64, 64]},
    "split": 3, "split_name": "relu",
}  # fmt: skip
RANGE = {"sequence": {"seed": 0, "epoch": 3, "shuffle": "full"}, "start": 0, "stop": 8}
KINDS: Sequence[tuple[Any, Mapping[str, Any], Mapping[str, Any]]] = [
    (ExtractRequest, {"dataset": DATASET, **PREFIX, "ids": [5, 0, 7], "transform": TRANSFORM},
     {"time_layers": True, "job": "6f1e", "windows": WINDOWS, "precision": "bf16", "codec": "zeros",
      "transform": {**TRANSFORM, **RANDOM}}),
    (SamplesRequest, {"dataset": DATASET, "ids": [5, 0, 7]}, {"job": "6f1e", "windows": WINDOWS}),
    (SamplesRequest, {"dataset": DATASET, **RANGE}, {"job": "6f1e"}),
    (TensorsRequest, {"name": "pushed", "digest": DIGEST, "names": ["fc.weight"]}, {}),
    (WarmUpRequest, PREFIX, {"precision": "bf16"}),
]  # fmt: skip
"""Kinds of requests of wire version 3, with the fields that each needs, and those that it may have."""


def test_the_fields_are_those_of_the_version_before() -> None:
    """Where the oldest version moves on, the fields above are to be those of the one that is oldest then."""
    assert OLDEST_VERSION == 3


@pytest.mark.parametrize(("kind", "needed", "optional"), KINDS)
def test_a_server_takes_them_and_a_client_writes_no_others(
    kind: Any, needed: Mapping[str, Any], optional: Mapping[str, Any]
) -> None:
    for document in (dict(needed), {**needed, **optional}):
        written = kind.from_json(json.loads(json.dumps(document))).to_json()
        assert written == document
