"""Kept gradients are read before they are needed, in their order, within their room, and never those of before."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.offload_loops import backward, groups_of, offloaded, tied_model, train, weights_equal
from torch import nn

from hapi.arrays import Bytes
from hapi.offload.loop.kept_gradients import GradientSpan, KeptGradients
from hapi.offload.states.disk import DiskStates

SECONDS = 240.0


class Room:
    """A store whose reads wait until they are let go, and are told of."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.began: list[int] = []
        self.told = threading.Condition()
        self.go = threading.Semaphore(0)
        self.error: OSError | None = None

    def read_gradient(self, at: int, values: Bytes) -> None:
        with self.told:
            self.began.append(at)
            self.told.notify_all()
        found = self.bytes[at : at + len(values)].copy()
        assert self.go.acquire(timeout=SECONDS)
        if self.error is not None:
            raise self.error
        values[:] = found

    def write_gradient(self, at: int, values: Bytes) -> None:
        self.bytes[at : at + len(values)] = values

    def wait_for(self, began: list[int]) -> None:
        with self.told:
            assert self.told.wait_for(lambda: self.began == began, SECONDS), self.began


def spans(*places: int) -> list[GradientSpan]:
    return [GradientSpan(at, 10) for at in places]


@pytest.fixture
def room() -> Room:
    return Room(100)


def kept_in(room: Room, nbytes: int = 25) -> KeptGradients:
    return KeptGradients(room, nbytes)  # type: ignore[arg-type]


def test_spans_are_read_in_their_order_as_far_as_there_is_room(room: Room) -> None:
    kept = kept_in(room)
    room.bytes[:] = np.arange(100)
    kept.expect(spans(30, 0, 10))
    room.wait_for([30])
    room.go.release(3)
    room.wait_for([30, 0])  # the third has no room
    assert kept.read(GradientSpan(30, 10)).tolist() == list(range(30, 40))
    room.wait_for([30, 0, 10])
    assert [kept.read(span)[0] for span in spans(0, 10)] == [0, 10]
    assert kept.held == 0 and len(room.began) == 3, "nothing is read twice"
    kept.close()


def test_one_span_that_is_larger_than_the_room_is_read_alone(room: Room) -> None:
    kept = kept_in(room, 5)
    room.go.release(2)
    kept.expect(spans(0, 10))
    room.wait_for([0])
    kept.read(GradientSpan(0, 10))
    room.wait_for([0, 10])
    kept.close()


def test_what_is_written_while_it_is_read_is_read_again(room: Room) -> None:
    kept = kept_in(room)
    kept.expect(spans(0))
    room.wait_for([0])
    kept.write(0, np.full(10, 7, np.uint8))
    room.go.release(2)
    assert kept.read(GradientSpan(0, 10)).tolist() == [7] * 10
    assert room.began == [0, 0] and kept.held == 0
    kept.close()


def test_what_is_forgotten_takes_no_memory(room: Room) -> None:
    kept = kept_in(room)
    room.go.release(2)
    kept.expect(spans(0, 10))
    room.wait_for([0, 10])
    kept.forget(0, 20)
    kept.expect(())
    kept.close()
    assert kept.held == 0


def test_an_error_comes_where_the_gradient_is_needed(room: Room) -> None:
    kept = kept_in(room)
    room.error = OSError(5, "broken")
    room.go.release()
    kept.expect(spans(0, 10))
    with pytest.raises(OSError, match="broken"):
        kept.read(GradientSpan(0, 10))
    kept.close()


def test_passes_of_a_window_find_the_gradients_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All reads of further passes come from the thread that reads ahead, also those of a pass's first gradient."""
    reads: list[str] = []
    told = threading.Condition()
    read = DiskStates.read_gradient

    def counted(self: DiskStates, *of: Any) -> None:
        read(self, *of)
        with told:
            reads.append(threading.current_thread().name)
            told.notify_all()

    monkeypatch.setattr(DiskStates, "read_gradient", counted)
    model, twin = tied_model(), tied_model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    moved = offloaded(twin, torch.optim.AdamW(groups_of(twin), lr=1e-2), tmp_path)
    parts = sum(-(-p.numel() // (1 << 12)) for p in twin.parameters() if p.requires_grad)

    def wait_for_reads(count: int) -> None:
        with told:
            assert told.wait_for(lambda: len(reads) == count, SECONDS), len(reads)

    def window(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        for part in range(3):
            backward(model, 10 * step + part)
            if optimizer is moved and step and part < 2:
                wait_for_reads((part + 1) * parts)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step:
            assert set(reads[: 2 * parts]) <= {"hapi-gradients"}
        reads.clear()

    torch.manual_seed(2)
    train(model, optimizer, range(6), window)
    torch.manual_seed(2)
    train(twin, moved, range(6), window)
    with moved:
        assert weights_equal(model, twin)
        assert not moved.report()["redone_steps"] or moved.report()["steps"] == 6
