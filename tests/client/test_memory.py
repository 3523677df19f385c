"""The client's frozen layers in micro-batches: the same numbers, and recovery when memory runs out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hapi.client.memory import FrozenRest, MicroBatch, to_device
from hapi.errors import DeviceMemoryError

CPU = torch.device("cpu")


class Hungry(nn.Module):
    """Doubles its input; runs out of memory above ``capacity`` samples."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        if len(x) > self.capacity:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x * 2


class Full(torch.Tensor):
    """A tensor that cannot be moved for lack of memory."""

    def to(self, *_: object, **__: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def rest(layers: nn.Module, micro_batch: int, shape: tuple[int, ...] = (3,)) -> FrozenRest:
    return FrozenRest(layers, shape, torch.float32, MicroBatch(micro_batch), CPU)


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 10, 64])
def test_micro_batches_make_the_whole(micro_batch: int) -> None:
    x = torch.arange(30.0).reshape(10, 3)
    layers = Hungry(100)
    assert torch.equal(rest(layers, micro_batch)(x), x * 2)
    assert sum(layers.batches) == 10 and max(layers.batches) == min(micro_batch, 10)


def test_the_micro_batch_is_halved_and_stays_so() -> None:
    x = torch.arange(30.0).reshape(10, 3)
    layers = Hungry(3)
    size = MicroBatch(10)
    frozen = FrozenRest(layers, (3,), torch.float32, size, CPU)
    assert torch.equal(frozen(x), x * 2)
    assert layers.batches == [10, 5, 2, 2, 2, 2, 2] and size.size == 2
    layers.batches.clear()
    assert torch.equal(frozen(x), x * 2)
    assert layers.batches == [2] * 5


def test_no_gradient_is_kept() -> None:
    layers = nn.Linear(3, 3)
    assert not rest(layers, 2)(torch.ones(4, 3)).requires_grad


def test_what_does_not_fit_is_said_so() -> None:
    with pytest.raises(DeviceMemoryError, match=r"one sample does not fit cpu.*--split freeze"):
        rest(Hungry(0), 4)(torch.ones(4, 3))
    with pytest.raises(DeviceMemoryError, match=r"4 samples, \d+ bytes.*--bs"):
        rest(Hungry(9), 4, shape=(1 << 45,))(torch.ones(4, 3))
    with pytest.raises(DeviceMemoryError, match=r"4 samples, 48 bytes.*--bs"):
        to_device(torch.ones(4, 3).as_subclass(Full), CPU)


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        rest(nn.Linear(5, 3), 4)(torch.ones(4, 3))
