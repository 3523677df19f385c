"""``ActivationOffload``: measures one iteration of a model, plans its activations, and applies the plan."""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hapi.errors import UsageError
from hapi.offload.activations.calls import dense_bytes, is_transformed, recomputed, tensors_in
from hapi.offload.activations.compiling import is_compiled, is_traced, key_of
from hapi.offload.activations.counters import LayerRoom
from hapi.offload.activations.freed_memory import FreedMemory
from hapi.offload.activations.layers import layers_of, release, take, why_not_recomputed
from hapi.offload.activations.measuring import IterationMeasure, host_room, measured_machine
from hapi.offload.activations.reporting import moved, planned, tell
from hapi.offload.activations.saved import SavedTensor
from hapi.offload.activations.spill import SpillFiles
from hapi.offload.activations.swapper import Swapper
from hapi.offload.activations.watching import Moment
from hapi.offload.layer_memory import Action, GradientRoom, keep_whole
from hapi.offload.loop.admission import check_policy
from hapi.offload.loop.fixed import BoundToModel
from hapi.offload.loop.notices import notice
from hapi.offload.pass_memory import highest_use
from hapi.offload.planner import Case, Plan, Problem, StateTraffic, evaluate, plan_activations
from hapi.process.mapped_files import give_back_file_pages

_COMPILED = "torch compiles the model, so its activations stay in memory"
"""Cut between layers, its graphs would compute other bits."""
_BUFFER_SHARE = 8
"""Part of the memory that bytes on their way may take: one in so many."""
_MAX_BUFFER_BYTES = 256 << 20
_PROFILE_SHARE = 2
"""Part of the memory that the measured iteration keeps: one in so many; it does not know the layers yet."""
_ALLOCATOR_FACTOR = 1.25
"""Memory of a process over what it allocated, where the C library keeps what was freed: 1.22 for a small GPT."""


class ActivationOffload(BoundToModel):
    """Holds a model's saved activations in ``memory`` bytes; gradients are bit by bit those of plain training.

    The first iteration is measured: what it saves beyond half of the memory goes to the tiers below. From the second
    one on each layer (:func:`hapi.offload.activations.layers.layers_of`) keeps, swaps or recomputes what it saves, as
    :mod:`hapi.offload.planner` chose. An iteration with a larger input than any before is measured again. It needs no
    offloaded optimiser: without :meth:`step_done` the plan is made when the next forward pass begins.

    A layer is never recomputed where its forward pass changes buffers, such as BatchNorm's statistics in training,
    which would move twice, or draws from Python's or NumPy's generator. :meth:`report` says so.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: int,
        folders: Sequence[Path] | None = None,
        policy: str = "auto",
        *,
        traffic: StateTraffic | None = None,
        gradients: GradientRoom | None = None,
    ) -> None:
        """Prepare; nothing changes before :meth:`install`.

        Args:
            model: any module; its parameters and buffers are never moved.
            memory: bytes that a pass may take on the model's device, beside parameters and their gradients.
            folders: one on each drive to swap to; None without a disk.
            policy: "auto" plans; "keep" changes nothing; "swap" recomputes nothing; "recompute" all it can.
            traffic: bytes that the optimiser's states move at the same time.
            gradients: those that are in ``memory`` for a while; None where all have memory of their own.

        Raises:
            UsageError: an unknown policy, or a folder that cannot be written.
        """
        check_policy(policy)
        if policy != "keep" and is_compiled(model):
            notice(_COMPILED)
            policy = "keep"
        self._model, self._memory, self._policy = model, memory, policy
        self._folders = list(folders or ())
        self._traffic, self._gradients = traffic or StateTraffic(), gradients or GradientRoom()
        self._layers = layers_of(model)
        self._numbers = weakref.WeakKeyDictionary({module: i for i, (_, module) in enumerate(self._layers)})
        self._buffer_bytes = min(_MAX_BUFFER_BYTES, max(1, memory // _BUFFER_SHARE))
        try:
            self._files = SpillFiles(self._folders) if self._folders and policy != "keep" else None
        except OSError as error:
            raise UsageError(
                f"activations cannot be swapped to {error.filename}: {error.strerror}; name a folder that can "
                "be written"
            ) from None
        if self._files is not None:
            weakref.finalize(self, self._files.close)
        self._swapper = Swapper(self._files, self._buffer_bytes)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._plan: Plan | None = None
        self._problem: Problem | None = None
        self._measure: IterationMeasure | None = None
        self._reasons: list[str | None] = [None] * len(self._layers)
        self._actions = [Action.KEEP] * len(self._layers)
        self._rooms = [LayerRoom() for _ in self._layers]
        self._steps_aside = self._has_grown = False
        self._planned: frozenset[int] = frozenset()
        self._late: set[int] = set()
        """Layers that a pass used and its plan did not know; each has the next pass measured once."""
        self._largest_input = self._asked_before = 0
        self._freed, self._key = FreedMemory(), key_of(self)
        weakref.finalize(self, self._freed.close)
        self.on_measure: Callable[[], None] = lambda: None  # then spare bytes are needed
        self.spare_bytes = 0
        """Bytes of a CPU's memory that the planned passes never take, with what is freed in pieces."""
        self._handles: list[Any] = []
        self._replaced: list[tuple[nn.Module, Any]] = []

    def install(self) -> ActivationOffload:
        """Put the layers under this object's control, unless others have them; return it."""
        if self._policy == "keep" and self._traffic != StateTraffic():
            self._freed.give_back()  # states are elsewhere because memory is short, and gradients come and go
        if self._policy == "keep" or self._handles or not take(self._layers):
            return self
        self._handles = [
            self._model.register_forward_pre_hook(self._begin_pass, with_kwargs=True),
            self._model.register_forward_hook(self._end_pass),
        ]
        for _, module in self._layers:  # a bound method: a copy of the module gets one that is bound to it
            before = module.__dict__.get("forward")
            self._replaced.append((module, before))
            module.forward = types.MethodType(self._forward_in_place_of(before), module)
        self._exempt(())
        self._start_measuring()
        return self

    def _forward_in_place_of(self, before: Any) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_traced(self._key):  # the compiled code has nothing of this
                return (
                    type(module).forward(module, *args, **kwargs)
                    if before is None
                    else before(*args, **kwargs)
                )
            return self._call(module, before, args, kwargs)

        return forward

    def note_compiling(self) -> None:
        """Leave activations in memory from now on: torch compiles the model, or a part of it."""
        if self._policy == "keep":
            return
        notice(_COMPILED)
        self._policy, self._steps_aside, self.spare_bytes = "keep", True, 0
        if self._measure is not None:
            self._measure.watch.end()
        self._measure = self._plan = None
        self._freed.give_back()

    def step_done(self) -> None:
        """Plan if an iteration was measured; an optimiser calls it after each step.

        Raises:
            ActivationError: what has to be swapped finds no room.
        """
        if torch._C._current_graph_task_id() >= 0:  # a hook's step: the pass is not over
            return
        if self._measure is not None and self._swapper.counters.asked > self._asked_before:
            self._make_plan(self._measure)

    def report(self) -> dict[str, Any]:
        """Return the plan, its prediction and what was measured, as numbers and text for people and programs."""
        plan, problem = self._plan, self._problem
        is_off = self._policy == "keep" or not self._handles
        state = "kept" if is_off else "measuring" if plan is None else "planned"
        known = {"policy": self._policy, "state": state, **moved(self._swapper.counters), "layers": []}
        if plan is not None and problem is not None:
            reasons = {name: why for (name, _), why in zip(self._layers, self._reasons, strict=True)}
            known |= planned(problem, plan, reasons)
        return known

    def reset_peak(self) -> None:
        """Begin anew with the highest number of bytes on the device, which :meth:`report` tells."""
        self._swapper.counters.peak_bytes = self._swapper.counters.live_bytes

    def close(self) -> None:
        """Give the layers back as they were, and the disk's bytes. Call it after backward."""
        while self._handles:
            self._handles.pop().remove()
        release(module for module, _ in self._replaced)
        for module, before in self._replaced:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before
        self._replaced = []
        self._freed.close()
        if self._measure is not None:
            self._measure.watch.end()
        self._swapper.close()
        if self._files is not None:
            self._files.close()
            self._files = None

    def __enter__(self) -> ActivationOffload:
        """Install."""
        return self.install()

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _exempt(self, inputs: Sequence[torch.Tensor]) -> None:
        """Leave parameters, buffers and the model's input where they are: their owner holds them anyway."""
        stays = (*self._model.parameters(), *self._model.buffers(), *inputs)
        kept = [tensor.untyped_storage()._cdata for tensor in stays if tensor.layout is torch.strided]
        self._swapper.exempt = frozenset(kept)

    def _end_pass(self, module: nn.Module, *_: object) -> None:
        if is_traced(self._key) or module is not self._model or not torch.is_grad_enabled():
            return
        if self._measure is not None:  # what is not needed any more and still leaves is no layer's own
            self._swapper.let_leave(0)
            self._measure.watch.tracer.end_forward()
        elif self._plan is not None:
            self._swapper.let_leave(self._plan.kept_bytes)
        self._freed.bound()

    def _begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_own = module is self._model and self._policy != "keep"  # a copy has this hook too
        if is_traced(self._key) or not is_own or not torch.is_grad_enabled() or is_transformed():
            return
        self.step_done()
        inputs = tensors_in((args, kwargs))
        self._exempt(inputs)
        size = dense_bytes(inputs)
        if size > self._largest_input or self._has_grown:
            self._largest_input = max(size, self._largest_input)
            if self._measure is None:
                self._start_measuring()
        if self._measure is not None and is_compiled(self._model):
            self.note_compiling()
        if self._measure is not None:
            self._measure.begin_pass()

    def _start_measuring(self) -> None:
        """Treat the next iteration as the first: what it saves beyond a part of the memory is swapped."""
        self.spare_bytes = 0
        self.on_measure()
        self._freed.give_back()
        self._measure = IterationMeasure(self._model, self._layers)
        self._measure.watch.with_bytes = self._swapper.with_bytes
        self._swapper.on_death = self._measure.watch.tracer.drop
        self._swapper.most_bytes = math.inf
        self._asked_before = self._swapper.counters.asked
        shared = LayerRoom(self._memory // _PROFILE_SHARE, host_room(self._device))
        self._rooms = [shared] * len(self._layers)
        self._steps_aside = self._has_grown = False

    def _call(self, module: nn.Module, before: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer, or a copy of one, whose forward is that of its class."""
        number = self._numbers.get(module)
        is_own = number is not None and before is not None
        original = before if is_own else types.MethodType(type(module).forward, module)
        if number is None or not torch.is_grad_enabled() or self._policy == "keep" or is_transformed():
            return original(*args, **kwargs)
        self._note_call()
        measure = self._measure
        if measure is not None:
            return self._measured_call(measure, number, original, args, kwargs)
        if number not in self._planned and number not in self._late:
            self._late.add(number)
            self._has_grown = True
        if self._steps_aside and number in self._planned:
            return original(*args, **kwargs)
        with self._hooks(number):
            if self._actions[number] is Action.RECOMPUTE and why_not_recomputed(module) is None:
                return recomputed(module, original, args, kwargs)
            return original(*args, **kwargs)

    def _note_call(self) -> None:
        """Begin a measured pass, or end the measured iteration, where a loop calls layers and not their model."""
        if self._measure is None or torch._C._current_graph_task_id() >= 0:
            return
        if self._swapper.counters.asked > self._asked_before:
            self.step_done()
        elif not self._measure.watch.is_begun:
            self._measure.begin_pass()

    def _measured_call(
        self,
        measure: IterationMeasure,
        number: int,
        original: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        inputs = tensors_in((args, kwargs))
        keys = [(self._swapper.key_of(tensor), tensor) for tensor in inputs]
        known = {key: (tensor, self._swapper.saver_of(key)) for key, tensor in keys if key is not None}
        measure.begin_call(number, known)
        waited = self._swapper.counters.waited_seconds
        with self._hooks(number), measure.call(number, inputs, waited) as after:
            result = original(*args, **kwargs)
            after.append(self._swapper.counters.waited_seconds)
            measure.watch.put_out(number, dense_bytes(tensors_in(result)))
        return result

    def _hooks(self, number: int) -> AbstractContextManager[Any]:
        name, room = self._layers[number][0], self._rooms[number]
        swapper, measure = self._swapper, self._measure
        if measure is not None:
            return self._measured_hooks(measure, number, name, room)

        def pack(tensor: torch.Tensor) -> SavedTensor:
            return swapper.save(tensor, number, name, room)[0]

        return torch.autograd.graph.saved_tensors_hooks(pack, swapper.fetch)

    def _measured_hooks(
        self, measure: IterationMeasure, number: int, name: str, room: LayerRoom
    ) -> AbstractContextManager[Any]:
        swapper, watch = self._swapper, measure.watch

        def pack(tensor: torch.Tensor) -> SavedTensor:
            with watch.paused():
                saved, key = swapper.save(tensor, number, name, room)
                watch.tracer.save(number, key, tensor, saved)
            if key is not None:
                measure.saved(number, key)
            watch.probe()
            return saved

        def unpack(saved: SavedTensor) -> torch.Tensor:
            watch.at(Moment.BACKWARD, number)
            watch.tracer.fetch(number, saved, watch.working_now)
            with watch.paused():
                return swapper.fetch(saved)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _make_plan(self, measure: IterationMeasure) -> None:
        measure.end()
        for number, (_, module) in enumerate(self._layers):
            why = why_not_recomputed(module) or measure.highest[number].side_effect
            if why is None and measure.highest[number].saved_bytes <= 0:
                why = "it would free nothing: it saves no more than its input"
            self._reasons[number] = why
        layers, rate = measure.planned(self._reasons, self._gradients)
        largest = measure.largest_bytes  # beside those on their way there are an operator's own
        self._swapper.buffer_bytes = max(self._buffer_bytes - largest, largest)
        events = measure.events()
        kept = [keep_whole(layer) for layer in layers]
        fits = highest_use(layers, kept, 0, events, has_tier_below=False).peak <= self._memory
        files, buffers = None if fits else self._files, self._swapper.buffer_bytes  # no rates where all fits
        machine = measured_machine(rate, files, self._device, self._memory, buffers, largest)
        problem = Problem(layers=layers, machine=machine, traffic=self._traffic, events=events)
        plan = self._choose(problem)
        if self._files is not None:
            self._files.check_room(plan.disk_bytes)
        self._apply(problem, plan)
        if self._traffic != StateTraffic():
            give_back_file_pages()  # of code that measures, and is not used any more

    def _choose(self, problem: Problem) -> Plan:
        if self._policy == "auto":
            return plan_activations(problem)
        return evaluate(problem, range(len(problem.layers)) if self._policy == "swap" else ())

    def _apply(self, problem: Problem, plan: Plan) -> None:
        self._problem, self._plan, self._measure = problem, plan, None
        self._swapper.on_death = lambda number: None
        self._steps_aside = plan.case is Case.FITS
        if self._device.type == "cpu":
            self.spare_bytes = max(0, self._memory - int(plan.peak_bytes * _ALLOCATOR_FACTOR))
        if self._gradients.total and self._device.type == "cpu" and not plan.swapped_bytes:
            self._freed.keep(min(int(plan.peak_bytes * _ALLOCATOR_FACTOR), self._memory) - plan.kept_bytes)
        elif self._steps_aside and plan.peak_bytes * _ALLOCATOR_FACTOR <= self._memory:
            self._freed.close()
        else:
            self._freed.give_back()
        names, host = [name for name, _ in self._layers], host_room(self._device)
        numbers = [names.index(treated.name) for treated in plan.layers]
        self._planned, self._actions = frozenset(numbers), [Action.KEEP] * len(names)
        spare = LayerRoom(max(0, self._memory - plan.peak_bytes), host)  # also of layers that come later
        apart = LayerRoom(
            self._memory // _PROFILE_SHARE, host
        )  # these stayed away from a pass measured for them
        self._rooms = [apart if number in self._late else spare for number in range(len(names))]
        for number, treated in zip(numbers, plan.layers, strict=True):
            self._rooms[number] = LayerRoom(treated.kept_bytes, treated.host_bytes)
            self._actions[number] = treated.action
        self._swapper.most_bytes = plan.most_bytes if plan.swapped_bytes else math.inf
        self.reset_peak()
        tell(problem, plan, self._memory, self._policy, has_disk=self._files is not None)
