"""Replay of an iteration under a plan, tensor by tensor: the most memory that it takes. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hapi.offload.layer_memory import Action, Layer, LayerPlan
from hapi.process.direct_io import ALIGNMENT, aligned


class Happening(Enum):
    """Kind of an event."""

    CALL = "a layer's forward pass begins"
    INPUT = "a tensor goes into it"
    SAVED = "a tensor is saved for backward, for the first time"
    SHARED = "it is saved once more"
    RELEASED = "the model itself does not use it any more"
    USE = "memory is in use beside saved tensors"
    LOSS = "the model's forward pass ends"
    FETCHED = "backward asks for a tensor"
    DROPPED = "backward does not need it any more"


class Event(NamedTuple):
    """Something that happens in an iteration, in whatever way its tensors are treated."""

    kind: Happening
    layer: int = 0
    """Its place in the order of the pass."""
    tensor: int = 0
    nbytes: int = 0
    """Bytes of the tensor."""
    working: int = 0
    """Bytes in use beside saved tensors: temporary ones, and tensors that are not saved yet, or dropped."""
    is_backward: bool = False


class HighestUse(NamedTuple):
    """Most bytes on the device."""

    peak: int
    """Beside parameters, their gradients and the pass's input."""
    saved: int
    """Those of saved tensors alone, on their way included."""


@dataclass(eq=False)
class _Tensor:
    """One saved tensor: where its bytes are."""

    nbytes: int
    call: tuple[int, int] | None = None
    """Call that computes it a second time."""
    order: int = -1
    """Place in the order of saving; -1 for one that is not saved."""
    is_owned: bool = True
    """Whether the model itself still uses it."""
    is_seen: bool = False
    """Whether its bytes are no longer counted as working memory."""
    is_kept: bool = False
    is_recomputed: bool = False
    """Whether it was computed a second time, and is needed yet."""
    layer: int = 0
    """Layer whose room it takes."""
    leaving: int = 0
    back: int = 0
    waiting: int = 0
    """Times that backward has not asked for it."""
    counted: int = 0

    @property
    def is_saved(self) -> bool:
        return self.order >= 0

    @property
    def is_away(self) -> bool:
        """Whether it is needed, and on no device."""
        return self.is_saved and not self.is_kept and not self.back and self.waiting > 0

    @property
    def on_device(self) -> int:
        own = self.nbytes if self.is_owned or self.is_kept else self.leaving
        return (own if self.is_seen else 0) + (self.nbytes if self.is_recomputed else 0) + self.back


@dataclass
class _Call:
    """One call of a layer that is computed a second time."""

    inputs: list[_Tensor] = field(default_factory=list)
    inner: list[_Tensor] = field(default_factory=list)
    saved: int = 0
    highest: int = 0
    is_done: bool = False


def highest_use(
    layers: Sequence[Layer],
    plans: Sequence[LayerPlan],
    buffer_bytes: int,
    events: Sequence[Event] = (),
    *,
    has_tier_below: bool = True,
    leaves_in_order: bool = False,
) -> HighestUse:
    """Compute the most bytes that an iteration takes on the device.

    Bytes leave as late as they may and come back as early as they may, so that no disk's pace takes more.

    Args:
        layers: in the order of the forward pass.
        plans: of each layer.
        buffer_bytes: most bytes on their way to or from the tiers below.
        events: of a measured iteration; without any, those that the layers' numbers stand for.
        has_tier_below: whether bytes can leave at all.
        leaves_in_order: whether they leave tensor by tensor, as with one drive; otherwise in any parts.
    """
    replay = _Replay(layers, plans, buffer_bytes, has_tier_below, leaves_in_order and bool(events))
    replay.run(events or events_of(layers, plans, buffer_bytes))
    return HighestUse(replay.peak, replay.most_saved)


class _Replay:
    """State of the device's memory while events happen."""

    def __init__(
        self,
        layers: Sequence[Layer],
        plans: Sequence[LayerPlan],
        buffer_bytes: int,
        has_tier_below: bool,
        leaves_in_order: bool,
    ) -> None:
        self._layers, self._plans, self._buffer = layers, plans, buffer_bytes
        self._has_tier_below, self._leaves_in_order = has_tier_below, leaves_in_order
        self.peak = self.most_saved = 0
        self._total = self._saved = 0
        self._tensors: dict[int, _Tensor] = {}
        self._order: list[_Tensor] = []
        self._queue: deque[_Tensor] = deque()
        self._leaving = self._back = 0
        self._ahead = 0
        self._kept_before: deque[_Tensor] = deque()
        self._rooms = [0] * len(layers)
        """Bytes that each layer keeps now."""
        self._calls: dict[int, list[_Call]] = defaultdict(list)
        self._kept_limit = sum(plan.kept_bytes for plan in plans)

    def run(self, events: Iterable[Event]) -> None:
        """Let the events happen."""
        handlers = {
            Happening.CALL: lambda event: self._calls[event.layer].append(_Call()),
            Happening.INPUT: self._input,
            Happening.SAVED: self._save,
            Happening.SHARED: self._share,
            Happening.RELEASED: self._release,
            Happening.USE: self._use,
            Happening.LOSS: self._lose,
            Happening.FETCHED: self._fetch,
            Happening.DROPPED: self._drop,
        }
        for event in events:
            handlers[event.kind](event)

    # -- forward ---------------------------------------------------------------------------------------------

    def _input(self, event: Event) -> None:
        """Save an input that is saved in any case: for a second computation, or since its maker is recomputed."""
        tensor = self._tensors.setdefault(event.tensor, _Tensor(event.nbytes))
        is_recomputed = self._is_recomputed(event.layer)
        if not tensor.is_saved and (is_recomputed or tensor.call is not None):
            self._place(tensor, event.layer)
        if is_recomputed:
            self._calls[event.layer][-1].inputs.append(tensor)
            tensor.waiting += 1

    def _save(self, event: Event) -> None:
        tensor = self._tensors.setdefault(event.tensor, _Tensor(event.nbytes))
        tensor.is_seen = True
        if tensor.is_saved:
            self._count(tensor)
        elif self._is_recomputed(event.layer):
            call = self._calls[event.layer][-1]
            tensor.call = event.layer, len(self._calls[event.layer]) - 1
            call.inner.append(tensor)
            call.saved += tensor.nbytes
            self._count(tensor)
        else:
            self._place(tensor, event.layer)
            tensor.waiting = 1

    def _share(self, event: Event) -> None:
        if not self._is_recomputed(event.layer):
            self._tensors[event.tensor].waiting += 1

    def _place(self, tensor: _Tensor, layer: int) -> None:
        """Save a tensor in its layer's room, or let it leave."""
        nbytes, plan = tensor.nbytes, self._plans[layer]
        is_kept = not self._has_tier_below or self._rooms[layer] + nbytes <= plan.kept_bytes
        if not is_kept:
            self._leave(self._leaving + nbytes - self._buffer)
        tensor.order, tensor.layer = len(self._order), layer
        self._order.append(tensor)
        self._ahead = tensor.order
        self._kept_before.clear()
        if is_kept:
            tensor.is_kept = True
            self._rooms[layer] += nbytes
        else:
            self._queue.append(tensor)
            tensor.leaving = nbytes
            self._leaving += nbytes
            if not self._leaves_in_order:
                self._leave(self._leaving - self._buffer)
        self._saved += tensor.counted
        self._count(tensor)

    def _leave(self, excess: int) -> None:
        """Let so many bytes leave, the oldest first."""
        while excess > 0 and self._queue:
            tensor = self._queue[0]
            gone = tensor.leaving if self._leaves_in_order else min(tensor.leaving, excess)
            tensor.leaving -= gone
            self._leaving -= gone
            excess -= gone
            if not tensor.leaving:
                self._queue.popleft()
            self._count(tensor)

    def _release(self, event: Event) -> None:
        tensor = self._tensors.get(event.tensor)
        if tensor is not None:
            tensor.is_owned, tensor.is_seen = False, True
            self._count(tensor)

    def _use(self, event: Event) -> None:
        working = self._layers[event.layer].working
        self._note(event.working + (working.waiting if event.is_backward else working.ahead))
        if not event.is_backward and self._is_recomputed(event.layer) and self._calls[event.layer]:
            call = self._calls[event.layer][-1]
            call.highest = max(call.highest, call.saved + event.working)

    def _lose(self, event: Event) -> None:
        while self._queue and self._saved > self._kept_limit:
            self._leave(self._saved - self._kept_limit)

    # -- backward --------------------------------------------------------------------------------------------

    def _fetch(self, event: Event) -> None:
        tensor = self._tensors[event.tensor]
        waiting = self._layers[event.layer].working.waiting
        if self._is_recomputed(event.layer):
            self._recompute(event, tensor, waiting)
        elif tensor.is_saved:
            self._bring(tensor)
        self._note(event.working + waiting)

    def _recompute(self, event: Event, tensor: _Tensor, waiting: int) -> None:
        """Compute the layer a second time, unless that was done."""
        calls = self._calls[event.layer]
        if tensor.call is not None and tensor.call[0] == event.layer:
            call = calls[tensor.call[1]]
        else:
            call = next((call for call in reversed(calls) if not call.is_done), calls[-1])
        if call.is_done:
            return
        call.is_done = True
        for value in call.inputs:
            if value.is_saved:
                self._bring(value)
        self._note(call.highest + max(event.working, self._layers[event.layer].working.output) + waiting)
        for value in call.inner:
            value.is_recomputed = True
            self._count(value)

    def _bring(self, tensor: _Tensor) -> None:
        """Bring a tensor back if it is away, and begin to read those before it."""
        self._read_ahead(tensor.order)
        if tensor.is_away and not (tensor.leaving and self._leaves_in_order):
            self._read(tensor)
        if tensor.waiting:
            tensor.waiting -= 1
            if not tensor.waiting and tensor.back:
                self._back -= tensor.nbytes

    def _read(self, tensor: _Tensor) -> None:
        self._back += tensor.nbytes
        tensor.back = aligned(tensor.nbytes) + ALIGNMENT
        self._count(tensor)

    def _read_ahead(self, order: int) -> None:
        """Read what was saved before, newest first, while there is room in the buffers, as the swapper does."""
        self._ahead = min(self._ahead, order - 1)
        while self._kept_before and self._kept_before[0].order >= order:
            self._kept_before.popleft()
        between = sum(tensor.nbytes for tensor in self._kept_before)
        while self._ahead >= 0 and between <= self._buffer:
            tensor = self._order[self._ahead]
            if tensor.leaving and self._leaves_in_order:
                return
            if tensor.is_away:
                if self._back + self._leaving + tensor.nbytes > self._buffer:
                    return
                self._read(tensor)
            elif tensor.is_kept:
                self._kept_before.append(tensor)
                between += tensor.nbytes
            self._ahead -= 1

    def _drop(self, event: Event) -> None:
        tensor = self._tensors.pop(event.tensor, None)
        if tensor is None:
            return
        if tensor.is_kept:
            self._rooms[tensor.layer] -= tensor.nbytes
        if tensor.waiting and tensor.back:
            self._back -= tensor.nbytes
        tensor.is_kept = tensor.is_owned = tensor.is_recomputed = False
        tensor.waiting = tensor.back = 0
        self._count(tensor)

    def _is_recomputed(self, layer: int) -> bool:
        return self._plans[layer].action is Action.RECOMPUTE

    def _count(self, tensor: _Tensor) -> None:
        """Take note of where a tensor's bytes are now."""
        added = tensor.on_device - tensor.counted
        tensor.counted += added
        self._total += added
        if tensor.is_saved:
            self._saved += added
            self.most_saved = max(self.most_saved, self._saved)

    def _note(self, working: int) -> None:
        self.peak = max(self.peak, self._total + working)


def events_of(layers: Sequence[Layer], plans: Sequence[LayerPlan], buffer_bytes: int) -> Iterator[Event]:
    """Yield events of an iteration of which only the layers' numbers are known.

    A layer works with most when all that it saves is there. What does not stay is cut anywhere: of it are there the
    bytes that are on their way.
    """
    tensors: list[list[int]] = []
    under_way = number = 0
    for index, (layer, plan) in enumerate(zip(layers, plans, strict=True)):
        is_recomputed = plan.action is Action.RECOMPUTE
        amount = layer.input_bytes if is_recomputed else layer.all_bytes
        sizes = [plan.kept_bytes, min(amount - plan.kept_bytes, buffer_bytes)]
        sizes += [layer.saved_bytes] if is_recomputed else []
        under_way += sizes[1]
        tensors.append([*range(number, number + len(sizes))])
        number += len(sizes)
        yield Event(Happening.CALL, index)
        for place, (tensor, nbytes) in enumerate(zip(tensors[-1], sizes, strict=True)):
            if is_recomputed and place < 2:
                yield Event(Happening.INPUT, index, tensor, nbytes)
            yield Event(Happening.SAVED, index, tensor, nbytes)
            yield Event(Happening.RELEASED, index, tensor)
        yield Event(Happening.USE, index, working=layer.working.forward)
        yield Event(Happening.USE, index, working=layer.working.after)
    yield Event(Happening.LOSS)
    for _, away, *_ in tensors:
        yield Event(Happening.DROPPED, 0, away)
    for index in reversed(range(len(layers))):
        working = layers[index].working.backward + min(buffer_bytes, under_way)
        kept, _, *inner = tensors[index]
        for tensor in (*inner, kept):
            yield Event(Happening.FETCHED, index, tensor, working=min(buffer_bytes, under_way))
        yield Event(Happening.USE, index, working=working, is_backward=True)
        for tensor in tensors[index]:
            yield Event(Happening.DROPPED, index, tensor)
