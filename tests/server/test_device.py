"""The device: results in order, and recovery when memory runs out."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from support.hungry import Hungry

from hapi.clocks import StageClock
from hapi.errors import HostMemoryError, TransportError
from hapi.server.batching.forward_memory import HEALTHY_PASSES
from hapi.server.device.device import Device, PassPriority
from hapi.server.scheduling.fair_queue import Tenant
from hapi.wire.report import STAGES


def run(device: Device, layers: object, count: int, key: str = "k") -> tuple[int, torch.Tensor]:
    x = torch.arange(count * 3, dtype=torch.float32).reshape(count, 3)
    out = torch.empty_like(x)
    fitted = device.begin(layers, x, out, key=key, clock=StageClock(STAGES)).result()  # type: ignore[arg-type]
    assert torch.equal(out, x * 2)
    return fitted, out


def test_halves_until_it_fits_and_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.device] = []
    monkeypatch.setattr("hapi.server.device.device.give_back_unused", given.append)
    device, layers = Device(torch.device("cpu")), Hungry(5)
    assert run(device, layers, 16)[0] == 4
    assert layers.batches == [16, 8, 4, 4, 4, 4]
    assert given == [torch.device("cpu")] * 2
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
    with pytest.raises(HostMemoryError, match=r"one sample of shape \(3,\)"):
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
    with pytest.raises(HostMemoryError, match="one sample"):
        run(device, Hungry(0), 1)
    assert asked == [1]
    device.close()


class Gate:
    """Layers that wait until they are let through, and note who came."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.seen: list[float] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.open.wait(240)
        self.seen += x[:, 0].tolist()
        return x * 2


def begin(
    device: Device, layers: Any, value: float, priority: PassPriority | None = None, count: int = 1
) -> Any:
    x = torch.full((count, 3), value)
    out = torch.full_like(x, -1.0)
    return device.begin(layers, x, out, key="k", clock=StageClock(STAGES), priority=priority), out


def held_up(device: Device) -> tuple[Gate, Any]:
    """A pass that keeps the device until its gate opens."""
    gate = Gate()
    first, _ = begin(device, gate, 0.0)
    assert gate.entered.wait(240)
    return gate, first


def test_the_tenant_that_used_it_least_is_next() -> None:
    device = Device(torch.device("cpu"))
    heavy, light = Tenant(name="heavy"), Tenant(name="light")
    slow = threading.Event()
    begin(device, lambda x: (slow.wait(0.5), x)[1], 0.0, PassPriority(tenant=heavy))[0].result()
    gate, _ = held_up(device)
    running = [begin(device, gate, 1.0, PassPriority(tenant=heavy, order=1))[0] for _ in range(3)]
    running += [begin(device, gate, 2.0, PassPriority(tenant=light, order=2))[0] for _ in range(2)]
    assert device.waiting == 5
    gate.open.set()
    for one in running:
        one.result()
    device.close()
    assert gate.seen == [0.0, 2.0, 2.0, 1.0, 1.0, 1.0]


def test_what_nobody_waits_for_does_not_begin() -> None:
    device = Device(torch.device("cpu"))
    gate, _ = held_up(device)
    gone, _ = begin(device, gate, 1.0)
    wanted, _ = begin(device, gate, 2.0)
    gone.leave()
    gate.open.set()
    wanted.result()
    wanted.leave()  # is over already
    device.close()
    assert gate.seen == [0.0, 2.0]


def test_alike_passes_run_together() -> None:
    device = Device(torch.device("cpu"), merge=8)
    gate, _ = held_up(device)
    calls: list[int] = []

    def layers(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x * 2

    merge_key, other = PassPriority(merge_key="front"), PassPriority(merge_key="another")
    running = [begin(device, layers, float(n), merge_key, count=3) for n in (1, 2, 3)]
    running += [begin(device, layers, 4.0, other, count=3), begin(device, layers, 5.0, None, count=3)]
    gate.open.set()
    for number, (one, out) in enumerate(running, start=1):
        assert one.result() == 3
        assert torch.equal(out, torch.full((3, 3), 2.0 * number))
    device.close()
    assert calls == [6, 3, 3, 3] and device.merged == 2, "the third would have been more than 8"


def test_new_memory_of_merged_passes_is_shared_by_their_samples() -> None:
    """Else a profile would take all of it for one request's, and none for the others'."""
    device = Device(torch.device("cpu"), merge=100)
    gate, _ = held_up(device)
    new = 4000

    def layers(x: torch.Tensor) -> torch.Tensor:
        with mmap.mmap(-1, new * mmap.PAGESIZE) as memory:
            memory[:: mmap.PAGESIZE] = bytes(new)
        return x * 2

    clocks = {count: StageClock(STAGES) for count in (3, 9)}
    running = [
        device.begin(
            layers,
            torch.ones(count, 3),
            torch.empty(count, 3),
            key="k",
            clock=clock,
            priority=PassPriority(merge_key="front"),
        )
        for count, clock in clocks.items()
    ]
    gate.open.set()
    for one in running:
        one.result()
    device.close()
    assert device.merged == 2
    pages = {count: clock.pages()["forward"] for count, clock in clocks.items()}
    assert pages[9] == pytest.approx(3 * pages[3])
    assert new <= sum(pages.values()) < 2 * new


def test_merged_passes_that_fail_run_alone() -> None:
    device = Device(torch.device("cpu"), merge=100)
    gate, _ = held_up(device)
    hungry = Hungry(5)
    merge_key = PassPriority(merge_key="front")
    running = [begin(device, hungry, float(n), merge_key, count=4) for n in (1, 2)]
    gate.open.set()
    for number, (one, out) in enumerate(running, start=1):
        assert one.result() == 4 and torch.equal(out, torch.full((4, 3), 2.0 * number))
    device.close()
    assert hungry.batches == [8, 4, 4] and device.out_of_memory_caught == 1


@pytest.mark.parametrize("kind", [ValueError, IndexError, TypeError, AssertionError, SystemExit])
def test_merged_passes_get_any_error_of_the_layers(kind: type[BaseException]) -> None:
    """The device goes on, whatever a model raises."""
    device = Device(torch.device("cpu"), merge=100)
    gate, _ = held_up(device)

    def picky(x: torch.Tensor) -> torch.Tensor:
        if (x == -2.0).any():
            raise kind("not this one")
        return x * 2

    merge_key = PassPriority(merge_key="front")
    good, bad = (begin(device, picky, value, merge_key, count=4)[0] for value in (1.0, -2.0))
    gate.open.set()
    with pytest.raises(kind):
        bad.result()
    if issubclass(kind, Exception):
        assert good.result() == 4
    assert run(device, picky, 1, key="the device lives on")[0] == 1
    device.close()


def test_a_broken_device_fails_all_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA after a device-side assert: whoever waits hears at once that another server is to be asked."""

    def refuse() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def broken(x: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(device.health, "probe", refuse)
        raise RuntimeError(
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"
        )

    device = Device(torch.device("cpu"))
    gate, first = held_up(device)
    running = [begin(device, layers, 1.0)[0] for layers in (broken, gate, gate)]
    gate.open.set()
    first.result()
    for one in running:
        with pytest.raises(
            TransportError, match="does not work any more: CUDA error: device-side assert"
        ) as caught:
            one.result()
        assert caught.value.retryable
    with pytest.raises(TransportError, match="does not work any more"):
        begin(device, gate, 2.0)
    assert gate.seen == [0.0] and device.waiting == 0
    device.close()


def test_a_closed_device_takes_nothing() -> None:
    device = Device(torch.device("cpu"))
    gate, first = held_up(device)
    waiting, _ = begin(device, gate, 1.0)
    device.close()
    gate.open.set()
    first.result()
    with pytest.raises(CancelledError):
        waiting.result()
    with pytest.raises(TransportError, match="shutting down"):
        begin(device, gate, 2.0)
    assert gate.seen == [0.0]


def test_a_halved_batch_grows_again_after_many_good_passes() -> None:
    device, layers = Device(torch.device("cpu")), Hungry(9)
    assert run(device, layers, 16)[0] == 8
    layers.capacity = 100
    fitted = [run(device, layers, 16)[0] for _ in range(HEALTHY_PASSES + 1)]
    device.close()
    assert fitted[0] == 8 and fitted[-1] == 16
