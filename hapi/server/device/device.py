"""One compute device: one forward at a time, on a thread of its own, with recovery from out-of-memory.

A single thread keeps CUDA's current stream and the CPU's intra-op threads to one owner, so that concurrent
requests share the device in turns (HAPI, section 4.3: the GPU is time-shared, a forward is not parallel).
:class:`~hapi.server.scheduling.device_share.DeviceScheduler` says whose turn it is. On CUDA the copy to the host
runs on a second stream from pinned memory, under the next forward.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hapi.clocks import StageClock
from hapi.errors import TransportError
from hapi.models.devices import does_not_fit, event_on, finish, give_back_unused, set_arithmetic
from hapi.process.memory_errors import is_out_of_memory
from hapi.profiler.timing import work_clock
from hapi.server.batching.forward_memory import ObservedMemory
from hapi.server.device.health import Health
from hapi.server.scheduling.device_share import DeviceScheduler
from hapi.server.scheduling.fair_queue import ANONYMOUS, Tenant
from hapi.waiting import paused

Layers = Callable[[torch.Tensor], torch.Tensor]


class PassMemory(Protocol):
    """Memory of forward passes as known so far; called on the device's thread."""

    def ceiling(self, key: Any, batch: int) -> int:
        """Return ``batch``, or less if as many samples ran out of memory before."""

    def out_of_memory(self, key: Any, batch: int) -> int:
        """Note that ``batch`` samples ran out of memory; return how many to try next, at least 1."""

    def passed(self, key: Any, batch: int, seconds: float, peak_bytes: int | None) -> None:
        """Note that ``batch`` samples took ``seconds``; ``peak_bytes`` is beside weights, None if unknown."""


class Ceilings:
    """The halvings alone."""

    def __init__(self) -> None:
        self._observed = ObservedMemory()

    def ceiling(self, key: Any, batch: int) -> int:
        """Return ``batch``, or less if as many samples ran out of memory before."""
        return self._observed.ceiling(key, batch)

    def out_of_memory(self, key: Any, batch: int) -> int:
        """Remember half of ``batch``, and return it."""
        return self._observed.out_of_memory(key, batch)

    def passed(self, key: Any, batch: int, seconds: float, peak_bytes: int | None) -> None:
        """Do nothing."""
        self._observed.passed(key, batch)


@dataclass(frozen=True, kw_only=True)
class PassPriority:
    """Owner of a forward pass, for the scheduler."""

    tenant: Tenant = ANONYMOUS
    order: int = 0
    """Number of its request, in the order in which requests began."""
    merge_key: Hashable = None
    """Passes that are equal in this, and not None, run the same layers on inputs of one shape: they may be merged."""


@dataclass(frozen=True, eq=False)
class _Pass:
    """One COS batch on its way through the layers."""

    layers: Layers
    inputs: torch.Tensor
    output: torch.Tensor
    key: Any
    clock: StageClock
    priority: PassPriority
    since: float
    future: Future[tuple[int, torch.cuda.Event | None]] = field(default_factory=Future)

    @property
    def count(self) -> int:
        """Samples."""
        return self.inputs.shape[0]


@dataclass(frozen=True)
class Running:
    """A forward pass that was begun."""

    _pass: _Pass
    _computes: bool = False
    """True when it is processors of the host that compute: long as that may take, it does not hang."""

    def result(self) -> int:
        """Wait for the output; return the batch size that fitted. Raises as :func:`does_not_fit` if one
        sample does not.
        """
        with paused() if self._computes else contextlib.nullcontext():
            batch, ready = self._pass.future.result()
        if ready is not None:
            with self._pass.clock.stage("copy_out"):
                ready.synchronize()
        return batch

    def stage(self) -> str:
        """``device_wait`` before it has begun, ``forward`` until it is over, then nothing."""
        future = self._pass.future
        return "" if future.done() else "forward" if future.running() else "device_wait"

    def leave(self) -> None:
        """Drop the output: a pass that has not begun does not begin, one that has is waited for."""
        if not self._pass.future.cancel() and self._pass.future.exception() is None:
            self.result()


class Device:
    """Runs frozen layers; thread-safe.

    ``memory`` remembers, per (layers, input shape), batches that ran out of memory. ``relieve`` gives back memory that
    can be done without and returns the bytes; it is asked before one sample is said not to fit. Up to ``merge`` samples
    of passes that are alike run as one. On a GPU, float32 is exact from now on unless ``tf32``, see
    :func:`set_arithmetic`.
    """

    def __init__(
        self,
        device: torch.device,
        relieve: Callable[[], int] = lambda: 0,
        *,
        memory: PassMemory | None = None,
        merge: int = 0,
        tf32: bool = False,
    ) -> None:
        set_arithmetic(device, tf32=tf32)
        self.device = device
        self.health = Health(device)
        self.out_of_memory_caught = 0
        self.merged = 0
        """Forward passes that ran together with another one."""
        self.running = 0
        """Forward passes that run now."""
        self._relieve = relieve
        self._memory = memory or Ceilings()
        self._merge = merge
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._changed = threading.Condition()
        self._scheduler: DeviceScheduler[_Pass] = DeviceScheduler()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"hapi-{device}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Forward passes that wait for their turn."""
        return len(self._scheduler)

    def begin(
        self,
        layers: Layers,
        inputs: torch.Tensor,
        output: torch.Tensor,
        *,
        key: Any,
        clock: StageClock,
        priority: PassPriority | None = None,
    ) -> Running:
        """Begin to write ``layers(inputs)`` into ``output``.

        Args:
            layers: the prefix.
            inputs: [n, ...] in host memory.
            output: [n, ...] in host memory.
            key: identifies layers and input shape, for what is remembered about memory.
            clock: gets the seconds of waiting and forward.
            priority: owner of the pass; None for none.
        """
        new_pass = _Pass(layers, inputs, output, key, clock, priority or PassPriority(), time.monotonic())
        with self._changed:
            if self._closed:
                raise TransportError("the device is closed: the server is shutting down")
            if self.health.broken:
                raise self.health.failure()
            self._scheduler.add(new_pass.priority.tenant, new_pass.priority.order, new_pass)
            self._changed.notify()
        return Running(new_pass, self.device.type == "cpu")

    def close(self) -> None:
        """Stop the thread after the present forward pass; waiting ones are cancelled."""
        with self._changed:
            self._closed = True
            for waiting in self._scheduler.take(lambda _: True):
                waiting.future.cancel()
            self._changed.notify()

    # -- on the device's thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with contextlib.suppress(MemoryError):  # not of a pass itself: the thread must outlive it
                with self._changed:
                    while not self._scheduler and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    passes = self._next()
                self._carry_out(passes)
            self.running = 0
            passes = []  # what a pass holds must not stay until the next one comes

    def _carry_out(self, passes: Sequence[_Pass]) -> None:
        try:
            passes = [p for p in passes if p.future.set_running_or_notify_cancel()]
            self.running = len(passes)
            if passes:
                self._serve(passes)
        except BaseException as error:  # whatever it is, those behind must not wait for ever
            for one in passes:
                if not one.future.done():
                    one.future.set_exception(error)

    def _next(self) -> list[_Pass]:
        """The pass whose turn it is, and those that may run together with it."""
        first = self._scheduler.next(time.monotonic())
        room = 0 if first.priority.merge_key is None else self._merge - first.count

        def fits(other: _Pass) -> bool:
            nonlocal room
            if other.priority.merge_key != first.priority.merge_key or other.count > room:
                return False
            room -= other.count
            return True

        return [first, *self._scheduler.take(fits)] if room > 0 else [first]

    def _serve(self, passes: Sequence[_Pass]) -> None:
        began = time.monotonic()
        for one in passes:
            one.clock.add("device_wait", began - one.since)
        if len(passes) == 1 or not self._together(passes):
            for one in passes:
                self._alone(one)
        # What the future's owners do next is not theirs to be charged for.
        now, count = time.monotonic(), sum(one.count for one in passes)
        with self._changed:
            for one in passes:
                self._scheduler.charge(one.priority.tenant, (now - began) * one.count / count, now)

    def _alone(self, one: _Pass) -> None:
        try:
            if self.health.broken:
                raise self.health.failure()
            one.future.set_result(self._forward(one))
        except BaseException as error:
            one.future.set_exception(self.health.diagnosed(error))
            if self.health.broken:
                self._fail_waiting()

    def _fail_waiting(self) -> None:
        with self._changed:
            waiting = self._scheduler.take(lambda _: True)
        for one in waiting:
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(self.health.failure())

    def _together(self, passes: Sequence[_Pass]) -> bool:
        """Run one forward pass for all of them; False when memory did not suffice, or one of them fails.

        A model's layers may raise anything; alone, each pass gets its own error.
        """
        clock, counts = StageClock(("forward",)), [one.count for one in passes]
        try:
            with clock.stage("forward"), torch.inference_mode():
                x = torch.cat([one.inputs.to(self.device, non_blocking=True) for one in passes])
                outputs = passes[0].layers(x).split(counts)
                ready = [self._copy_out(y, one.output) for y, one in zip(outputs, passes, strict=True)]
                finish(self.device)
        except Exception as error:
            self.out_of_memory_caught += is_out_of_memory(error)
            return False
        sums = [of["forward"] for of in (clock.seconds(), clock.cpu_seconds(), clock.pages())]
        for one, event in zip(passes, ready, strict=True):
            share = one.count / sum(counts)
            one.clock.add("forward", *(value * share for value in sums))
            one.future.set_result((one.count, event))
        self.merged += len(passes)
        return True

    def _forward(self, one: _Pass) -> tuple[int, torch.cuda.Event | None]:
        batch = self._memory.ceiling(one.key, one.count)
        relieved = False
        while True:
            try:
                with one.clock.stage("forward"):
                    return batch, self._run(one, batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.out_of_memory_caught += 1
            # Only here, after the handler, are the tensors gone that the error's frames held.
            if batch > 1:
                batch = self._memory.out_of_memory(one.key, batch)
            elif relieved or not self._relieve():
                raise does_not_fit(
                    self.device,
                    f"one sample of shape {tuple(one.inputs.shape[1:])} does not fit {self.device}; "
                    "choose an earlier split or a smaller input",
                )
            else:
                relieved = True
            give_back_unused(self.device)

    def _run(self, one: _Pass, batch: int) -> torch.cuda.Event | None:
        ready = None
        before, clock = self._start_of_peak(), work_clock(self.device)
        began = clock()
        with torch.inference_mode():
            for start in range(0, one.count, batch):
                x = one.inputs[start : start + batch].to(self.device, non_blocking=True)
                y = one.layers(x)
                ready = self._copy_out(y, one.output[start : start + batch])
        finish(self.device)  # so that the stage's seconds are the device's
        seconds = (clock() - began) * batch / one.count
        peak = None if before is None else torch.cuda.max_memory_allocated(self.device) - before
        self._memory.passed(one.key, batch, seconds, peak)
        return ready

    def _start_of_peak(self) -> int | None:
        """Bytes on the device before a pass; None where nobody counts them."""
        if self._copy_stream is None:
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _copy_out(self, y: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        """Copy ``y`` to the host under whatever the device does next; the event says when it is there."""
        if self._copy_stream is None:
            target.copy_(y)
            return None
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            target.copy_(y, non_blocking=True)
        y.record_stream(self._copy_stream)  # its memory is not given out again before the copy has ended
        return event_on(self._copy_stream)

    # -- host memory ---------------------------------------------------------------------------------------

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory, pinned when the device is a GPU."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._copy_stream is not None)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` in pinned memory when the device is a GPU, otherwise itself."""
        return tensor.pin_memory() if self._copy_stream is not None else tensor

    def memory_bytes(self) -> int:
        """Bytes that torch holds on the device now (0 on the CPU, where the process's size tells)."""
        return torch.cuda.memory_allocated(self.device) if self._copy_stream is not None else 0
