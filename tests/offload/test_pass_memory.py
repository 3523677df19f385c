"""Replay of an iteration's events: what is kept, leaves, comes back, is recomputed, and is still used by the model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.offload.layer_memory import Action, Layer, LayerPlan
from hapi.offload.pass_memory import Event, Happening, HighestUse, highest_use


def layer() -> Layer:
    return Layer(name="a", flops=1.0, saved_bytes=0)


def plan(action: Action, kept: int = 0) -> LayerPlan:
    return LayerPlan(name="a", action=action, kept_bytes=kept, host_bytes=0, disk_bytes=0)


def chain(sizes: Sequence[int], working: int = 0, owned: Sequence[int] = ()) -> list[Event]:
    """One layer whose first tensor goes into it; the model goes on to use those in ``owned``."""
    events = [Event(Happening.CALL), Event(Happening.INPUT, 0, 0, sizes[0])]
    for number, nbytes in enumerate(sizes):
        events.append(Event(Happening.SAVED, 0, number, nbytes))
        if number not in owned:
            events.append(Event(Happening.RELEASED, 0, number))
        events.append(Event(Happening.USE, working=working))
    events.append(Event(Happening.LOSS))
    for number in reversed(range(len(sizes))):
        events.append(Event(Happening.FETCHED, 0, number))
        events.append(Event(Happening.USE, working=working, is_backward=True))
        events.append(Event(Happening.DROPPED, 0, number))
    return events


def forward(events: list[Event]) -> list[Event]:
    return events[: events.index(Event(Happening.LOSS))]


def use(
    events: list[Event], action: Action, kept: int = 0, buffer: int = 0, in_order: bool = True
) -> HighestUse:
    return highest_use([layer()], [plan(action, kept)], buffer, events, leaves_in_order=in_order)


def test_what_is_kept_adds_up() -> None:
    assert use(chain([10, 20, 30], 7), Action.KEEP, 60) == HighestUse(67, 60)


def test_a_tensor_leaves_whole_before_the_next_one_that_has_no_room() -> None:
    events = forward(chain([5, 4, 6, 1]))
    assert use(events, Action.DISK, buffer=11).saved == 11  # 4, 6 and 1: 5 has left
    assert use(events, Action.DISK, buffer=9).saved == 9
    assert use(events, Action.DISK, buffer=8).saved == 7
    assert use(events, Action.DISK, buffer=8, in_order=False).saved == 8


def test_a_tensor_that_the_model_uses_stays_when_it_has_left() -> None:
    assert use(forward(chain([5, 4, 4], owned=[0])), Action.DISK, buffer=5).saved == 9
    assert use(forward(chain([5, 4, 4])), Action.DISK, buffer=5).saved == 5


@pytest.mark.parametrize("working", [0, 9])
def test_recomputed_tensors_come_in_backward_beside_the_input(working: int) -> None:
    found = use(chain([10, 20, 30], working), Action.RECOMPUTE, 10)
    assert found == HighestUse(60 + working, 10)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=9),
    st.integers(0, 200),
    st.integers(50, 100),
    st.sets(st.integers(0, 8)),
)
def test_a_treatment_takes_no_more_than_its_room(
    sizes: list[int], kept: int, buffer: int, owned: set[int]
) -> None:
    sizes = [nbytes * 4096 for nbytes in sizes]
    kept, buffer = kept * 4096, buffer * 4096
    events = chain(sizes, owned=sorted(owned))
    used = sum(nbytes for number, nbytes in enumerate(sizes) if number in owned)
    whole = use(events, Action.KEEP, sum(sizes)).peak
    for in_order in (True, False):
        found = use(events, Action.DISK, kept, buffer, in_order)
        assert max(sizes) <= found.peak <= kept + buffer + max(sizes) + used + len(sizes) * 4096
        assert found.saved >= found.peak and (kept < whole or found.peak == whole)
