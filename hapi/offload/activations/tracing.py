"""Record of an iteration's events: when tensors are saved, in use, asked for and dropped."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hapi.offload.activations.saved import Key, Lies, SavedTensor, StoredBytes
from hapi.offload.pass_memory import Event, Happening

_OF_NO_LAYER = (Happening.RELEASED, Happening.LOSS, Happening.DROPPED)


class _Followed:
    """A tensor whose model may still use it."""

    def __init__(self, key: Key, owner: StorageWeakRef) -> None:
        self.key, self.owner = key, owner
        self.stored: weakref.ref[StoredBytes] | None = None
        self.holders: weakref.WeakSet[SavedTensor] = weakref.WeakSet()

    @property
    def is_used(self) -> bool:
        """Whether anything beside what was saved holds the storage."""
        stored = None if self.stored is None else self.stored()
        own = 0
        if stored is not None and stored.lies is Lies.KEPT:
            own = len(self.holders)
        elif stored is not None and stored.lies is Lies.LEAVING:
            own = 1
        return _uses(self.key.storage) > (own + _wrapper_uses() if own else 0)


class PassTracer:
    """Writes down what happens, layers by their numbers."""

    def __init__(self) -> None:
        """Begin without events."""
        _wrapper_uses()  # an operator would be seen while memory is looked at
        self._events: list[Event] = []
        self._followed: dict[int, _Followed] = {}
        self._numbers: dict[Key, int] = {}
        """Numbers of tensors that are alive."""
        self._of_stored: dict[int, Key] = {}
        self._next = 0

    def call(self, layer: int) -> None:
        """Note that a layer's forward pass begins."""
        self._events.append(Event(Happening.CALL, layer))

    def put_in(self, layer: int, key: Key, tensor: torch.Tensor) -> None:
        """Note a tensor that goes into a layer."""
        number = self._number(key, tensor)
        self._events.append(Event(Happening.INPUT, layer, number, key.extent.nbytes))

    def save(self, layer: int, key: Key | None, tensor: torch.Tensor, saved: SavedTensor) -> None:
        """Note a tensor that was saved; ``key`` is None where its bytes were saved before, or are not stored."""
        stored = saved.stored
        if stored is None:
            return
        if key is not None:
            self._of_stored[stored.number] = key
            number, kind = self._number(key, tensor), Happening.SAVED
            self._followed[number].stored = weakref.ref(stored)
        elif stored.number in self._of_stored:
            number, kind = self._numbers[self._of_stored[stored.number]], Happening.SHARED
        else:
            return
        if number in self._followed:
            self._followed[number].holders.add(saved)
        self._events.append(Event(kind, layer, number, stored.extent.nbytes))

    def use(self, layer: int, working: int, *, is_backward: bool) -> None:
        """Note memory in use beside saved tensors, after what the model has released."""
        for number in [number for number, followed in self._followed.items() if not followed.is_used]:
            followed = self._followed.pop(number)
            self._events.append(Event(Happening.RELEASED, layer, number))
            if followed.stored is None:
                del self._numbers[followed.key]
        event = Event(Happening.USE, layer, working=working, is_backward=is_backward)
        before = self._events[-1] if self._events else None
        if before is not None and before._replace(working=working) == event:
            self._events[-1] = event._replace(working=max(working, before.working))
        else:
            self._events.append(event)

    def end_forward(self) -> None:
        """Note that the model's forward pass ends."""
        self._events.append(Event(Happening.LOSS))

    def fetch(self, layer: int, saved: SavedTensor, working: int) -> None:
        """Note that backward asks for a tensor while so many bytes are in use beside saved ones."""
        if saved.stored is not None and saved.stored.number in self._of_stored:
            number = self._numbers[self._of_stored[saved.stored.number]]
            self._events.append(Event(Happening.FETCHED, layer, number, working=working))

    def drop(self, stored: int) -> None:
        """Note that backward does not need the stored bytes of a number any more."""
        key = self._of_stored.pop(stored, None)
        if key is not None:
            number = self._numbers.pop(key)
            self._followed.pop(number, None)
            self._events.append(Event(Happening.DROPPED, 0, number))

    def events(self, places: Mapping[int, int]) -> list[Event]:
        """Return the events, layers by their places in the pass; without those of layers that have none."""
        return [
            event._replace(layer=places.get(event.layer, 0))
            for event in self._events
            if event.layer in places or event.kind in _OF_NO_LAYER
        ]

    def _number(self, key: Key, tensor: torch.Tensor) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._next
            self._next += 1
            self._followed[number] = _Followed(key, StorageWeakRef(tensor.untyped_storage()))
        return number


def _uses(storage: int) -> int:
    return int(torch._C._storage_Use_Count(storage))


@cache
def _wrapper_uses() -> int:
    """Uses of a storage by its object in Python, once there was one."""
    probe = torch.empty(2, device="cpu")
    address = probe.untyped_storage()._cdata
    return _uses(address) - 1
