"""Trainers and servers of one machine: the frozen weights of all of them are in memory once."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

import pytest
from support.harness import RESNET_JOB, losses, packed_digits, report_of, server, start_train, train, wait_for
from support.weight_tools import mapped_kilobytes

from hapi.models.graph.digest import content_key
from hapi.models.zoo.build import ModelSpec, build

JOBS, SPLIT, FREEZE = 8, 6, 11
JOB = (*RESNET_JOB, "--weights", "random:0", "--bs", "32", "--split", str(SPLIT), "--freeze", str(FREEZE))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_digits(tmp_path_factory.mktemp("store"), 96)


@pytest.fixture
def sharing(tmp_path: Path) -> dict[str, str]:
    return {"HAPI_SHARED_WEIGHTS": "on", "HAPI_SHARED_WEIGHTS_DIR": str(tmp_path / "weights")}


@cache
def distinct_bytes(start: int, stop: int) -> int:
    """Bytes of the weights of layers ``start + 1`` to ``stop``, of equal ones once (BatchNorms begin alike)."""
    model = build(ModelSpec(architecture="resnet18", weights="random:0", input_shape=(3, 32, 32)))
    tensors = [(name, model.tensors.get(name)) for name in model.tensor_names(start, stop)]
    return sum({content_key(model.digest_of(name), t): t.nbytes for name, t in tensors}.values())


@pytest.mark.long_cases("bf16")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_those_of_a_job_alone(
    store: Path, tmp_path: Path, sharing: dict[str, str], precision: str
) -> None:
    found = []
    for number, env in enumerate(({}, sharing, sharing)):
        report = tmp_path / f"{number}.json"
        with server(store, "--cos-batch", "16", "--device", "cpu", **env) as running:
            train(
                *JOB, "--epochs", "1", "--server", running.url, "--report", str(report),
                "--frozen-precision", precision, **env,
            )  # fmt: skip
        found.append(losses(report_of(report)))
    assert found[0] == found[1] == found[2]
    stored = sum(path.stat().st_size for path in (tmp_path / "weights").glob("pack-*"))
    least = distinct_bytes(0, FREEZE) * (
        1.0 if precision == "fp32" else 0.5
    )  # a processor may compute in bf16
    assert 0.99 * least <= stored <= 1.05 * distinct_bytes(0, FREEZE)


@pytest.mark.slow
def test_eight_trainers_and_two_servers_hold_one_copy(
    store: Path, tmp_path: Path, sharing: dict[str, str]
) -> None:
    folder = tmp_path / "weights"
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(server(store, "--cos-batch", "16", "--device", "cpu", **sharing))
            for _ in range(2)
        ]
        jobs = []
        for number in range(JOBS):
            url = servers[number % 2].url
            jobs.append(start_train(*JOB, "--epochs", "10000", "--server", url, **sharing))
            stack.callback(jobs[-1].kill)
        pids = [job.pid for job in jobs] + [one.process.pid for one in servers]
        parts = [distinct_bytes(SPLIT, FREEZE)] * JOBS + [distinct_bytes(0, SPLIT)] * 2

        def all_use_theirs() -> bool:
            resident = [mapped_kilobytes(folder, "Rss", pid) * 1024 for pid in pids]
            return all(found >= part for found, part in zip(resident, parts, strict=True))

        wait_for(all_use_theirs, 240, "that all processes have read their weights")
        shares = sum(mapped_kilobytes(folder, "Pss", pid) for pid in pids) * 1024
        assert distinct_bytes(0, FREEZE) <= shares <= 1.05 * distinct_bytes(0, FREEZE)
        assert sum(mapped_kilobytes(folder, "Anonymous", pid) for pid in pids) == 0, "nothing is written"
        assert all(job.poll() is None for job in jobs)
