"""Expectations of a loop's next step, learned from the steps before."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from hapi.offload.loop.gradients import GradientChange
from hapi.offload.parameters import TrainedParameter

log = logging.getLogger("hapi.offload")

RECENT_STEPS = 8
"""The most backward passes of so many steps are expected: a last, shorter window of an epoch changes nothing."""
LEARNING_STEPS = 3
"""Gradients are kept in so many steps; afterwards only where a loop touched them, or made a step be computed again."""


class Expectation:
    """Decides what is computed before a loop asks for it. A wrong one costs time, never a bit."""

    def __init__(self, order: Iterable[int], may_be_on: bool, keep_gradients: bool | None) -> None:
        """Expect nothing yet.

        Args:
            order: of the pieces, by backward.
            may_be_on: whether anything is to be computed ahead at all.
            keep_gradients: whether gradients are kept until the step; None to learn it.
        """
        self._may_be_on = may_be_on
        self.is_on = False
        """Whether the next step's pieces are computed as their gradients arrive."""
        self.order = list(order)
        """Pieces in the order in which their gradients are expected."""
        self.active: set[int] = set()
        """Parameters that get a gradient."""
        self._frozen: tuple[bool, ...] = ()
        """Whether each parameter was frozen in the last step."""
        self._recent: deque[int] = deque(maxlen=RECENT_STEPS)
        """Backward passes before each of the last steps."""
        self.changes: tuple[GradientChange, ...] = ()
        """The loop's changes of each gradient between backward and step."""
        self.norms = False
        """Whether the loop asks for norms."""
        self.keeps = keep_gradients is not False
        """Whether gradients are kept until the step."""
        self._learns = keep_gradients is None
        self._steps = 0
        self._was_touched = self._is_carried = False
        self._arrived: list[int] = []
        self.arrivals: list[int] = []
        """Parameters in the order in which a backward pass gives them gradients."""
        self._this_pass: list[int] = []

    @property
    def passes(self) -> int:
        """Backward passes before a step; 0 while none was seen."""
        return max(self._recent, default=0)

    def forbid(self) -> None:
        """Expect nothing any more: the loop changes parameters where updates ahead would not see it."""
        if self._may_be_on:
            log.warning(
                "updates are computed after backward from now on: the loop changes parameters through parameter.data, "
                "or between backward and step; changes under torch.no_grad() after the step cost less"
            )
        self._may_be_on = self.is_on = False

    def check_frozen(self, parameters: Sequence[TrainedParameter]) -> None:
        """Compute nothing ahead in a step for which the loop froze parameters, or thawed some."""
        frozen = tuple(not known.parameter.requires_grad for known in parameters)
        if self._frozen and frozen != self._frozen:
            self.is_on = False
        self._frozen = frozen

    def is_met(
        self,
        computed: Mapping[int, Sequence[tuple[int, int]]],
        now: Callable[[int], Sequence[TrainedParameter]],
    ) -> bool:
        """Return whether pieces that were computed ahead are those that the step asks for.

        Args:
            computed: pieces, each with the numbers of its parameters and gradients as they were.
            now: a piece's parameters.
        """
        expected = list(self.changes)
        for number, used in computed.items():
            active = [known for known in now(number) if known.has_gradient]
            if used != [(known.number, known.generation) for known in active]:
                return False
            if any(known.changes != expected for known in active):
                return False
        return True

    def note_gradient(self, parameter: int) -> bool:
        """Remember that a parameter got a gradient; return whether a backward pass is expected to end with it."""
        if parameter in self._this_pass:
            self._end_pass()
        self._this_pass.append(parameter)
        return self.arrivals[-1:] == [parameter]

    def _end_pass(self) -> None:
        self.arrivals, self._this_pass = self._this_pass or self.arrivals, []

    def note_arrival(self, pieces: Iterable[int]) -> None:
        """Remember that these pieces are complete now."""
        self._arrived += pieces

    def learn(self, active: Sequence[TrainedParameter], was_redone: bool) -> None:
        """Expect what the step did that just ended.

        Args:
            active: parameters that had a gradient.
            was_redone: whether pieces were computed again, for which gradients are needed a second time.
        """
        arrived, self._arrived = self._arrived, []
        self._end_pass()
        if not active:
            return
        changes = tuple(active[0].changes)
        is_alike = all(tuple(known.changes) == changes for known in active)
        self.is_on = self._may_be_on and is_alike and changes == self.changes
        self.changes = changes if is_alike else ()
        passes = max(known.passes for known in active)
        numbers = {known.number for known in active}
        surprises = was_redone or 0 < self.passes < passes or bool(self.active and self.active != numbers)
        self._recent.append(passes)
        self.norms = any(known.norm_wanted for known in active)
        self.active = numbers
        if self._learns:
            self._steps += 1
            is_carried = any(known.is_carried for known in active)
            if is_carried and not self._is_carried:
                self._is_carried = True
                log.warning(
                    "steps are taken with gradients of steps before, which a kill loses: a run that goes on after one "
                    "begins without them"
                )
            was_touched = is_carried or any(known.was_touched for known in active)
            self._was_touched = self._was_touched or surprises or was_touched
            self.keeps = self._was_touched or self._steps < LEARNING_STEPS
        if len(arrived) == len(self.order):
            self.order = arrived
