"""Ranks over NCCL train as one process does. With one GPU they share it, where NCCL lets them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import server
from support.joint_training import alone, hapi_train, together
from support.local_job import pack_blobs

pytestmark = pytest.mark.gpu

COUNT = 118


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("joint") / "store"
    pack_blobs(folder, count=COUNT)
    models = [f"support.joint_training:{name}" for name in ("network", "normed_network")]
    with server(folder, *(word for model in models for word in ("--allow-model", model))) as running:
        yield running.url


def job(url: str, **more: Any) -> dict[str, Any]:
    base = {
        "server": (url,), "dataset": "blobs", "model": "support.joint_training:network", "weights": "random",
        "freeze": 2, "split": 2, "bs": 16, "epochs": 3, "lr": 0.01, "optimizer": "adamw", "threads": 1, "cache": "off",
        "validation": 0.2, "device": "cuda:0",
    }  # fmt: skip
    return {**base, **more}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_over_nccl_train_as_one_process(
    ranks: int, url: str, cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    jobs = {
        "plain": job(url),
        "clipped and accumulated": job(url, clip_norm=0.5, ema=0.9, accumulate=2),
        "statistics of all ranks": job(
            url, model="support.joint_training:normed_network", sync_batchnorm=ranks > 1
        ),
    }
    one = {**jobs, "statistics of all ranks": {**jobs["statistics of all ranks"], "sync_batchnorm": False}}
    for name in ("one", "several"):
        (tmp_path / name).mkdir()
    try:
        found = together(jobs, ranks, tmp_path / "several")
    except AssertionError as error:
        if torch.cuda.device_count() < ranks and "refuses these ranks" in str(error):
            pytest.skip("this NCCL lets no two ranks share a GPU")
        raise
    wanted = alone(one, tmp_path / "one")
    for name, report in wanted.items():
        assert found[name]["ranks"] == ranks
        tolerance = 1e-4 if "statistics" in name else 1e-5
        for own, single in zip(found[name]["epochs"], report["epochs"], strict=True):
            assert own["samples"] == single["samples"]
            for figure in ("loss", "validation_loss"):
                assert own[figure] == pytest.approx(single[figure], rel=tolerance), (name, figure)


def test_a_rank_without_a_gpu_is_refused_in_one_line(url: str, cuda: torch.device, tmp_path: Path) -> None:
    ranks = torch.cuda.device_count() + 1
    done = hapi_train(
        ranks, "--server", url, "--dataset", "blobs", "--model", "support.joint_training:network", "--weights",
        "random", "--freeze", "2", "--split", "2", "--bs", "16", "--device", "cuda", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert f"cuda:{ranks - 1}" in line and "CUDA device(s)" in line


def test_states_beside_the_gpu_change_no_loss(url: str, cuda: torch.device, tmp_path: Path) -> None:
    """``--offload host`` and ``--offload disk`` train as without."""
    places = ("off", "host", "disk")
    jobs = {place: job(url, offload=place, clip_norm=1.0, output=str(tmp_path / place)) for place in places}
    found = alone(jobs, tmp_path)
    for place in places[1:]:
        for own, single in zip(found[place]["epochs"], found["off"]["epochs"], strict=True):
            assert own["loss"] == pytest.approx(single["loss"], rel=1e-5)
