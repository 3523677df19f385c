"""The device: results in order, and recovery when memory runs out."""

from __future__ import annotations

import threading

import pytest
import torch

from hapi.clocks import StageClock
from hapi.errors import DeviceMemoryError
from hapi.server.device import Device
from hapi.wire.messages import STAGES


class Hungry:
    """Doubles its input; runs out of memory above ``capacity`` samples."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.batches: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        if len(x) > self.capacity:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x * 2


def run(device: Device, layers: object, count: int, key: str = "k") -> tuple[int, torch.Tensor]:
    x = torch.arange(count * 3, dtype=torch.float32).reshape(count, 3)
    out = torch.empty_like(x)
    fitted = device.begin(layers, x, out, key=key, clock=StageClock(STAGES)).result()  # type: ignore[arg-type]
    assert torch.equal(out, x * 2)
    return fitted, out


def test_halves_until_it_fits_and_remembers() -> None:
    device, layers = Device(torch.device("cpu")), Hungry(5)
    assert run(device, layers, 16)[0] == 4
    assert layers.batches == [16, 8, 4, 4, 4, 4]
    layers.batches.clear()
    run(device, layers, 16)
    assert layers.batches == [4, 4, 4, 4]
    assert device.out_of_memory_caught == 2
    layers.batches.clear()
    run(device, layers, 5, key="another")
    assert layers.batches == [5]
    device.close()


def test_one_sample_that_does_not_fit_is_said_so() -> None:
    device = Device(torch.device("cpu"))
    with pytest.raises(DeviceMemoryError, match=r"one sample of shape \(3,\)"):
        run(device, Hungry(0), 4)
    run(device, Hungry(9), 4, key="the device lives on")
    device.close()


def test_other_errors_pass_through() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes do not match")

    device = Device(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="shapes"):
        run(device, broken, 2)
    device.close()


def test_forwards_take_turns() -> None:
    device = Device(torch.device("cpu"))
    inside = threading.Semaphore(1)

    def exclusive(x: torch.Tensor) -> torch.Tensor:
        assert inside.acquire(blocking=False), "two forwards at once"
        try:
            return x * 2
        finally:
            inside.release()

    threads = [threading.Thread(target=run, args=(device, exclusive, 4)) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    device.close()


def test_what_can_be_done_without_goes_before_one_sample_is_refused() -> None:
    layers, asked = Hungry(0), []

    def relieve() -> int:
        asked.append(1)
        layers.capacity = 1
        return 100

    device = Device(torch.device("cpu"), relieve)
    assert run(device, layers, 4)[0] == 1
    device.close()
    assert asked == [1] and layers.batches == [4, 2, 1, 1, 1, 1, 1]


def test_relief_is_asked_for_once() -> None:
    asked: list[int] = []
    device = Device(torch.device("cpu"), lambda: asked.append(1) or 100)  # type: ignore[func-returns-value]
    with pytest.raises(DeviceMemoryError, match="one sample"):
        run(device, Hungry(0), 1)
    assert asked == [1]
    device.close()
