"""The trainer's GPU: pinned buffers that are not reused under their copy, full memory, whole jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.gpu_tools import MIB, Hungry, cycles_of, memory_limit
from support.harness import losses, report_of, server, train
from support.plain import FAMILIES, open_session
from torch import nn

from hapi.client.loading.buffers import BufferPool
from hapi.client.memory import FrozenSuffix, MicroBatch, to_device
from hapi.errors import DeviceMemoryError
from hapi.server.service import Service

pytestmark = pytest.mark.gpu

RESNET = next(f for f in FAMILIES if f.name == "resnet18")


def test_buffers_are_pinned(cuda: torch.device) -> None:
    pool = BufferPool(pinned=True)
    tensor = pool.tensor((5, 7), torch.float32)
    assert tensor.is_pinned() and tensor[2:4].is_pinned()
    address = tensor.data_ptr()
    del tensor
    assert pool.tensor((5, 7), torch.float32).data_ptr() == address


def test_a_buffer_is_not_refilled_under_its_copy(
    place: str, cuda: torch.device, make_service: Callable[..., Service]
) -> None:
    """A step that keeps the GPU busy delays the next batch's copy; its memory must wait for the copy."""
    service = make_service()

    def batches(device: str, step: Callable[[], None]) -> list[torch.Tensor]:
        kept = []
        with open_session(service, RESNET, 0, 0, device=device, prefetch_bytes=0) as session:
            for epoch in range(4):
                for features, _ in session.epoch(epoch):
                    step()
                    kept.append(features)
        return [features.cpu() for features in kept]

    cycles = cycles_of(0.1)
    expected = batches("cpu", lambda: None)
    found = batches(place, lambda: torch.cuda._sleep(cycles))
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


def test_a_loop_left_in_the_middle_waits_for_the_copy(
    cuda: torch.device, make_service: Callable[..., Service]
) -> None:
    with open_session(make_service(), RESNET, 0, 0, device="cuda") as session:
        stream = session.epoch(0)
        torch.cuda._sleep(cycles_of(0.2))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert torch.cuda.current_stream().query()


def test_the_micro_batch_is_halved(cuda: torch.device) -> None:
    micro_batch = MicroBatch(16)
    rest = FrozenSuffix(Hungry(), (3,), torch.float32, micro_batch, cuda)
    x = torch.randn(40, 3, pin_memory=True)
    with memory_limit(700 * MIB):  # sixteen samples need 1024 MiB, eight 512
        assert torch.equal(rest(x).cpu(), x * 2)
        assert micro_batch.size == 8
    assert torch.equal(rest(x).cpu(), x * 2)
    assert micro_batch.size == 8


def test_what_does_not_fit_is_said_so(cuda: torch.device) -> None:
    with memory_limit(32 * MIB):
        with pytest.raises(DeviceMemoryError, match=r"one sample does not fit cuda:0.*--split freeze"):
            FrozenSuffix(Hungry(), (3,), torch.float32, MicroBatch(16), cuda)(torch.randn(4, 3))
        with pytest.raises(DeviceMemoryError, match=r"4 samples.*--bs"):
            FrozenSuffix(nn.Identity(), (16 * MIB,), torch.float32, MicroBatch(16), cuda)(torch.randn(4, 3))
        with pytest.raises(DeviceMemoryError, match=r"4 samples.*--bs"):
            to_device(torch.empty(4, 16 * MIB), cuda)


def test_a_job_of_two_processes_on_the_gpu(place: str, store: Path, tmp_path: Path) -> None:
    """``hapi-server --device cuda`` and ``hapi-train --device cuda`` beside the same on the CPU."""
    settings = ("--dataset", "digits", "--model", "resnet18", "--bs", "8", "--epochs", "2", "--seed", "3",
                "--weights", "random", "--split", "6")  # fmt: skip
    reports = {}
    for device in (place, "cpu"):
        path = tmp_path / f"{device}.json"
        with server(store, "--device", device) as running:
            train("--server", running.url, "--device", device, "--report", str(path), *settings)
        reports[device] = report_of(path)
    assert reports[place]["device"].startswith(place)
    # Another device, not only another batch size: sums are made in another order in every layer of each step.
    assert losses(reports[place]) == pytest.approx(losses(reports["cpu"]), rel=1e-3)
    weights = 11_000_000 * 4 // 2
    assert weights < reports[place]["peak_memory_bytes"] < 16 << 30


def test_a_gpu_that_is_not_there_is_refused(cuda: torch.device, store: Path) -> None:
    done = train("--store", str(store), "--dataset", "digits", "--device", "cuda:99", code=2)
    assert "cuda:99" in done.stderr and "CUDA device(s)" in done.stderr and "Traceback" not in done.stderr
