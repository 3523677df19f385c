"""Words on what offloading costs a loop, once it is measured, and on where one goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from hapi.offload.states.queues import Traffic
from hapi.units import format_duration

FIRST_STEP, LAST_STEP = 4, 12
"""Steps between which is measured: the first ones teach what a loop does."""
_NOTABLE = 1.05
"""A step that takes so many times what it would take without waiting is told of."""


_FORWARD_SHARE = 1 / 3
"""Share of a forward pass in computing: backward multiplies twice, for the inputs' gradients and the weights'."""


def verdict(seconds: float, waited: float, drive_seconds: float, *, begins: str = "offloading costs") -> str:
    """Say what a step costs more than its computing, and which batch or freeze would hide that.

    Args:
        seconds: of a step.
        waited: of them, waiting for updates.
        drive_seconds: of a step's reads and writes.
        begins: first words.

    Returns:
        A line; empty where the disk is hidden.
    """
    computing = max(seconds - waited, 1e-9)
    if seconds <= _NOTABLE * computing:
        return ""
    factor = max(drive_seconds, seconds) / computing
    # Layers that are frozen from the input on leave the forward pass as it is.
    share = _FORWARD_SHARE / (factor - (1 - _FORWARD_SHARE))
    return (
        f"{begins} {format_duration(waited)} of {format_duration(seconds)} a step: the disk takes "
        f"{format_duration(drive_seconds)}; a batch {factor:.1f} times as large, as many accumulated passes, or a "
        f"freeze that leaves about {share:.0%} of the trained parameters would hide it"
    )


def resumed(where: str, steps: int, *, is_scheduled: bool) -> str:
    """Say that a loop goes on from a committed step, and what its scheduler needs for that.

    Args:
        where: name of the store for people.
        steps: done.
        is_scheduled: whether a scheduler drove the learning rate.
    """
    text = (
        f"{where} holds step {steps} of a job that was ended: it goes on there; remove its folder hapi-offload to "
        "begin anew"
    )
    if not is_scheduled:
        return text
    return (
        f"{text}. A scheduler drove its learning rate: move the new one on as often as that stepped, where that was "
        "after each step by: for _ in range(optimizer.steps): scheduler.step()"
    )


class StepWatch:
    """Measures some steps, and tells their cost: what is to be expected after two of them, what it is after more."""

    def __init__(self, traffic: Traffic, transfer_seconds: float, say: Callable[[str, bool], None]) -> None:
        """Begin.

        Args:
            traffic: the engine counts on it.
            transfer_seconds: those of a step's bytes at the disks' rates; 0 where they are unknown.
            say: gets a line, and whether it says a cost.
        """
        self._traffic, self._steps = traffic, 0
        self._transfer_seconds, self._say = transfer_seconds, say
        self._began, self._before = 0.0, replace(traffic)
        self._last, self._waited = time.perf_counter(), 0.0

    def step_done(self) -> bool:
        """Count a step; return whether it waited notably for updates. The first ones teach what a loop does."""
        self._steps += 1
        if self._steps == FIRST_STEP:
            self._began, self._before = time.perf_counter(), replace(self._traffic)
        if self._steps == LAST_STEP:
            self._tell()
        last, waited = self._last, self._waited
        self._last, self._waited = time.perf_counter(), self._traffic.waited_seconds
        seconds = self._last - last
        computing = seconds - (self._waited - waited)
        if self._steps == 2:  # the first one prepares much for the first time
            self._foretell(computing)
        return self._steps >= FIRST_STEP and seconds > _NOTABLE * computing

    def _foretell(self, computing: float) -> None:
        seconds = max(computing, self._transfer_seconds)
        line = verdict(
            seconds, seconds - computing, self._transfer_seconds, begins="offloading will cost about"
        )
        if line:
            self._say(line, True)

    def _tell(self) -> None:
        steps, now, before = LAST_STEP - FIRST_STEP, self._traffic, self._before
        drive = now.read_seconds + now.write_seconds - before.read_seconds - before.write_seconds
        waited = now.waited_seconds - before.waited_seconds
        line = verdict((time.perf_counter() - self._began) / steps, waited / steps, drive / steps)
        self._say(line or "offloading is hidden behind forward and backward", bool(line))
