"""Transfers of a drive go on beside each other, and a drive that steps wait for gets the memory that is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import offloaded, weights_equal
from torch import nn

from hapi.arrays import Bytes
from hapi.offload.engine import Engine
from hapi.offload.loop import verdict
from hapi.offload.pieces import Layout, ParameterSize, StatePiece, plan_pieces
from hapi.offload.states.host import HostStates
from hapi.offload.states.queues import Loaded
from hapi.profiler.offload_costs import BUFFERS

SECONDS = 240.0
PIECES = 10


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


class Pairs(HostStates):
    """Each transfer waits until another one is under way."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, 0)
        self._both = threading.Barrier(2)
        self.computed: list[int] = []

    def place(self, piece: StatePiece, slot: int, buffer: Bytes) -> Bytes:
        return buffer

    def read(self, *of: Any) -> None:
        self._both.wait(SECONDS)
        super().read(*of)

    def write(self, *of: Any) -> None:
        self._both.wait(SECONDS)
        super().write(*of)

    def compute(self, piece: StatePiece, loaded: Loaded) -> None:
        self.computed.append(piece.number)


@pytest.fixture
def store() -> Pairs:
    return Pairs(plan_pieces([ParameterSize(100, 2)] * PIECES, 1, 100))


@pytest.fixture
def engine(store: Pairs) -> Iterator[Engine]:
    layout = plan_pieces([ParameterSize(100, 2)] * PIECES, 1, 100)
    engine = Engine(store, layout, store.compute, lambda piece: True, buffers=2)
    engine.has_record = [True] * PIECES
    yield engine
    engine.close()


def test_two_transfers_of_a_drive_are_under_way_together(engine: Engine, store: Pairs) -> None:
    engine.expect(range(PIECES))
    engine.submit(range(PIECES))
    engine.drain()
    engine.settle()
    assert sorted(store.computed) == list(range(PIECES))


def test_room_holds_more_records_and_is_given_back(engine: Engine, store: Pairs) -> None:
    (drive,) = engine._drives

    def is_read(count: int) -> bool:
        return len(engine._loaded) == count and not engine._loading

    engine.expect(range(PIECES))
    wait_until(lambda: is_read(2))
    engine.take_room(4 * drive.size + 1)
    wait_until(lambda: is_read(6))
    engine.take_room(0)
    assert drive.made == 2 and set(engine._loaded) == {0, 1}, "those that are needed first stay"
    assert set(list(drive.expected)[:4]) == {2, 3, 4, 5}
    engine.submit(range(PIECES))
    engine.drain()
    engine.settle()
    assert sorted(store.computed) == list(range(PIECES)) and drive.made == len(drive.free) == 2


def test_what_was_computed_meanwhile_is_not_read_again(engine: Engine) -> None:
    """Behind a piece that is read already stands one whose record was read ahead and is computed by now."""
    (drive,) = engine._drives
    with engine._condition:
        engine._loading, engine._submitted, engine._taken = {8}, {8}, {0, 8}
        drive.asked.extend([8, 0])
        assert engine._next_read(drive) is None and not drive.asked
        engine._loading, engine._submitted = set(), set()


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))


@pytest.mark.slow
def test_steps_that_wait_for_a_disk_have_what_memory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "_NOTABLE", 0.0)
    plain, twin = model(), model()
    optimizer = torch.optim.AdamW(plain.parameters())
    adamw = torch.optim.AdamW(twin.parameters())
    rows = [8] * 8 + [64] + [8] * 3
    with offloaded(twin, adamw, tmp_path, memory=350_000, activations="auto") as moved:
        (drive,) = moved._engine._drives
        buffers = []
        for at, count in enumerate(rows):
            values = torch.randn(count, 64, generator=torch.Generator().manual_seed(at))
            for one, own in ((plain, optimizer), (twin, moved)):
                loss = one(values).square().mean()
                buffers.append(drive.limit)
                loss.backward()
                own.step()
                own.zero_grad()
        spare = moved._activations.spare_bytes
    assert buffers[0] == BUFFERS and buffers[15] > BUFFERS
    assert buffers[17] == BUFFERS, "a larger pass is measured with the memory that it may need"
    assert buffers[-1] <= BUFFERS + spare // drive.size
    assert weights_equal(plain, twin)
