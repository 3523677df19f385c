"""Several ranks train as one process does: losses, metrics and weights, and what they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import server
from support.joint_training import alone, together
from support.local_job import pack_blobs

pytestmark = pytest.mark.slow

COUNT = 118
"""Samples: 94 are trained on. The last batch of 16 has 14, and the last of 23 has 2: none for two of four ranks."""


MODELS = "support.joint_training"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("joint") / "store"
    pack_blobs(folder, count=COUNT)
    with server(folder, "--allow-model", MODELS) as running:
        yield running.url


def jobs(folder: Path, url: str) -> dict[str, dict[str, Any]]:
    base = {
        "server": (url,), "dataset": "blobs", "model": f"{MODELS}:network", "weights": "random", "freeze": 2,
        "split": 2, "bs": 16, "epochs": 3, "lr": 0.01, "optimizer": "adamw", "threads": 1, "cache": "off",
        "validation": 0.2, "metric": ("f1", "top5"),
    }  # fmt: skip
    return {
        "plain": base,
        "clipped": {**base, "clip_norm": 0.5, "ema": 0.9, "schedule": "cosine", "label_smoothing": 0.1},
        "accumulated": {
            **base,
            "accumulate": 2,
            "class_weights": "balanced",
            "optimizer": "sgd",
            "momentum": 0.9,
        },
        "spare": {**base, "model": f"{MODELS}:spare_network", "accumulate": 2},
        "few in the last": {**base, "bs": 23, "split": "auto"},
        "kept": {**base, "split": "auto", "cache": "on", "cache_dir": str(folder / "cache")},
    }


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_ranks_train_as_one_process(ranks: int, url: str, tmp_path: Path) -> None:
    wanted_jobs = jobs(tmp_path, url)
    for name in ("one", "several"):
        (tmp_path / name).mkdir()
    found = together(wanted_jobs, ranks, tmp_path / "several")
    wanted = alone(
        {**wanted_jobs, "kept": {**wanted_jobs["kept"], "cache_dir": str(tmp_path / "own cache")}},
        tmp_path / "one",
    )
    for name, report in wanted.items():
        ours = found[name]
        assert ours["ranks"] == ranks and report["ranks"] == 1
        for own, one in zip(ours["epochs"], report["epochs"], strict=True):
            assert own["samples"] == one["samples"] == 94, "each sample once"
            for figure in ("loss", "validation_loss"):
                assert own[figure] == pytest.approx(one[figure], rel=1e-5), (name, figure)
            for figure in ("accuracy", "validation_accuracy", "validation_f1"):
                assert own[figure] == pytest.approx(one[figure], abs=1e-12), (name, figure)
        details, wanted_details = (r["epochs"][-1]["validation_details"] for r in (ours, report))
        assert details["confusion"] == wanted_details["confusion"]
        assert [w["id"] for w in details["worst"]] == [w["id"] for w in wanted_details["worst"]]
        weights = [torch.load(tmp_path / way / f"{name}.pt") for way in ("one", "several")]
        for key, value in weights[0].items():
            torch.testing.assert_close(weights[1][key], value, rtol=1e-4, atol=1e-6, msg=f"{name} {key}")
    spent = [(e["bytes_received"], e["features_kept"], e["splits"]) for e in found["kept"]["epochs"]]
    assert not spent[2][0], f"ranks share what is kept: {spent}"
