"""The client's frozen layers in micro-batches: the same numbers, and recovery when memory runs out."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from support.hungry import Hungry
from torch import nn

from hapi.client.memory import FrozenSuffix, MemoryBudget, MicroBatch, move_weights, to_device
from hapi.errors import DeviceMemoryError

CPU = torch.device("cpu")


class Full(torch.Tensor):
    """A tensor that cannot be moved for lack of memory."""

    def to(self, *_: object, **__: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def rest(layers: nn.Module, micro_batch: int, shape: tuple[int, ...] = (3,)) -> FrozenSuffix:
    return FrozenSuffix(layers, shape, torch.float32, MicroBatch(micro_batch), CPU)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError),
        (RuntimeError("no such device"), RuntimeError),
    ],
)
def test_weights_that_do_not_fit_are_told(error: Exception, raised: type[Exception]) -> None:
    class Model:
        rounding = None

        def to(self, *span: object) -> None:
            assert span == (CPU, 3, 8)
            raise error

    with pytest.raises(raised) as caught:
        move_weights(Model(), CPU, 3, 8)  # type: ignore[arg-type]
    if raised is DeviceMemoryError:
        assert "layers 4 to 8 do not fit cpu" in str(caught.value) and "--split freeze" in str(caught.value)


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 10, 64])
def test_micro_batches_make_the_whole(micro_batch: int) -> None:
    x = torch.arange(30.0).reshape(10, 3)
    layers = Hungry(100)
    assert torch.equal(rest(layers, micro_batch)(x), x * 2)
    assert sum(layers.batches) == 10 and max(layers.batches) == min(micro_batch, 10)


def test_the_micro_batch_is_halved_and_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.device] = []
    monkeypatch.setattr("hapi.client.memory.give_back_unused", given.append)
    x = torch.arange(30.0).reshape(10, 3)
    layers = Hungry(3)
    size = MicroBatch(10)
    frozen = FrozenSuffix(layers, (3,), torch.float32, size, CPU)
    assert torch.equal(frozen(x), x * 2)
    assert layers.batches == [10, 5, 2, 2, 2, 2, 2] and size.size == 2
    assert given == [CPU, CPU]
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


# -- the budget ----------------------------------------------------------------------------------------------------

MIB = 1 << 20
needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a process's peak"
)


def filled(nbytes: int) -> np.ndarray:
    """Memory that is really there."""
    return np.ones(nbytes, dtype=np.uint8)


@needs_linux
def test_a_budget_is_exceeded_by_what_was_really_used() -> None:
    budget = MemoryBudget(48 * MIB, CPU)
    assert budget.enforced and budget.bytes == 48 * MIB
    budget.begin()
    assert not budget.exceeded()
    del_me = filled(96 * MIB)
    assert budget.exceeded()
    del del_me
    assert budget.exceeded(), "the peak counts, also when it is over"
    budget.begin()
    assert not budget.exceeded(), "from now on"
    assert 90 * MIB < budget.highest() < 200 * MIB


@needs_linux
def test_what_was_there_before_is_not_the_budgets() -> None:
    held, gone = filled(64 * MIB), filled(128 * MIB)
    del gone
    budget = MemoryBudget(32 * MIB, CPU)
    assert not budget.exceeded() and budget.highest() < 32 * MIB
    assert held[0] == 1


@needs_linux
def test_without_a_limit_nothing_is_enforced_and_the_peak_is_told() -> None:
    budget = MemoryBudget(None, CPU)
    assert budget.bytes is not None and budget.bytes > 0, "what is free is planned with"
    budget.begin()
    del_me = filled(64 * MIB)
    del del_me
    assert not budget.exceeded() and budget.highest() >= 60 * MIB


@needs_linux
def test_the_plan_leaves_room_for_an_embedded_server_and_a_users_limit_stays() -> None:
    free, limited = MemoryBudget(None, CPU), MemoryBudget(32 * MIB, CPU)
    before = free.bytes
    assert before is not None
    for budget in (free, limited):
        budget.leave(64 * MIB)
    assert free.bytes == before - 64 * MIB and limited.bytes == 32 * MIB
    free.leave(before)
    assert free.bytes == 1, "never below what a plan can be refused for"


@needs_linux
def test_the_processs_peak_survives_the_budgets_looks() -> None:
    """Linux forgets the peak of which getrusage tells when the budget makes it begin anew."""
    budget = MemoryBudget(16 * MIB, CPU)
    del_me = filled(256 * MIB)
    del del_me
    peak = budget.process_highest()
    for _ in range(3):
        budget.begin()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < peak
    assert budget.process_highest() >= peak


@needs_linux
def test_a_budget_that_is_exceeded_halves_the_micro_batch() -> None:
    """Every sample takes 24 MiB for a moment: of 8 at a time 2 fit 64 MiB."""

    class Wasteful(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(filled(len(x) * 24 * MIB)[-1])

    size, x = MicroBatch(8), torch.arange(48.0).reshape(16, 3)
    frozen = FrozenSuffix(Wasteful(), (3,), torch.float32, size, CPU, MemoryBudget(64 * MIB, CPU))
    assert torch.equal(frozen(x), x)
    assert size.size == 2


@needs_linux
def test_one_sample_that_exceeds_the_budget_is_told() -> None:
    class Wasteful(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(filled(96 * MIB)[-1])

    frozen = FrozenSuffix(Wasteful(), (3,), torch.float32, MicroBatch(4), CPU, MemoryBudget(32 * MIB, CPU))
    with pytest.raises(DeviceMemoryError, match="one sample does not fit cpu"):
        frozen(torch.ones(40, 3))
