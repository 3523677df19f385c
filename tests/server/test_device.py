"""The device: results in order, and recovery when memory runs out."""

from __future__ import annotations

import threading

import pytest
import torch

from hapi.clocks import StageClock
from hapi.errors import DeviceMemoryError, UsageError
from hapi.server.device import Device, is_out_of_memory, resolve_device
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
    fitted = device.forward(layers, x, out, key=key, clock=StageClock(STAGES))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "", "cuda:x"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="device"):
        resolve_device(name)


def test_kinds_of_out_of_memory() -> None:
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("index out of range"))
    assert not is_out_of_memory(ValueError("out of memory"))
