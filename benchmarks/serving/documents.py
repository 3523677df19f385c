"""``python -m benchmarks.serving.documents``: microseconds to read an extract request, by its number of samples.

Columns: Python's json alone; ``parse_document``, which refuses what is doubtful; the whole request with its checks;
and, where msgspec is installed, its decoders into plain objects and into typed ones, which refuse no field given twice.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from hapi.wire.documents import parse_document
from hapi.wire.messages import ExtractRequest, parse_body

SAMPLES = (1, 128, 4096, 65536)
_DIGEST = "0123456789abcdef" * 2


def request(samples: int) -> dict[str, Any]:
    """An extract request for ``samples`` of ImageNet's ids."""
    return {
        "dataset": {"name": "imagenet", "version": _DIGEST},
        "model": {"source": "zoo", "name": "resnet50", "weights": "DEFAULT", "digest": _DIGEST},
        "split": 8,
        "split_name": "layer2",
        "job": "ab12",
        "ids": np.random.default_rng(0).integers(0, 1_281_167, samples).tolist(),
        "transform": {
            "resize": 256,
            "crop": 224,
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
        },
        "windows": {"seed": 0, "epoch": 3, "group": 64, "window": 8},
    }


def readers() -> dict[str, Callable[[bytes], Any]]:
    """The ways to read a request, by name."""
    found: dict[str, Callable[[bytes], Any]] = {
        "json": json.loads,
        "parse_document": parse_document,
        "whole": lambda body: ExtractRequest.from_json(parse_body(body)),
    }
    if find_spec("msgspec") is None:
        return found
    msgspec = importlib.import_module("msgspec")
    struct = msgspec.defstruct(
        "Request",
        [
            ("dataset", dict[str, str]), ("model", dict[str, str]), ("split", int), ("split_name", str), ("job", str),
            ("ids", list[int]), ("transform", dict[str, int | list[float]]), ("windows", dict[str, int]),
        ],
        forbid_unknown_fields=True,
    )  # fmt: skip
    plain, typed = msgspec.json.Decoder(), msgspec.json.Decoder(struct)
    return {
        **found,
        "msgspec": plain.decode,
        "msgspec, whole": lambda body: ExtractRequest.from_json(plain.decode(body)),
        "msgspec, typed": typed.decode,
    }


def measure(samples: Sequence[int] = SAMPLES, rounds: int = 15) -> dict[int, dict[str, float]]:
    """Microseconds by number of samples and way: the least of ``rounds``, taken by turns."""
    ways = readers()
    figures: dict[int, dict[str, float]] = {}
    for count in samples:
        body, calls = (
            json.dumps(request(count), separators=(",", ":")).encode(),
            max(1, 20_000 // (count + 50)),
        )
        fastest = dict.fromkeys(ways, float("inf"))
        for _ in range(rounds):
            for name, read in ways.items():
                began = time.perf_counter()
                for _ in range(calls):
                    read(body)
                fastest[name] = min(fastest[name], (time.perf_counter() - began) / calls * 1e6)
        figures[count] = fastest
    return figures


def main() -> int:
    """Measure and print; returns the exit code."""
    for count, row in measure().items():
        print(f"{count:6} samples, us: " + ", ".join(f"{name} {value:.1f}" for name, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
