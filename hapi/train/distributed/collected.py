"""The parts of a checkpoint that all ranks hold, collected by all of them and written by the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hapi.client.joint.ranks import Ranks
from hapi.train.checkpoints.checkpoint import KeptState, Part
from hapi.train.report import Measured
from hapi.train.running_epoch import RunningEpoch


class Collected:
    """Parts and measurements of the newest position; collected once each, since only the first rank tries again."""

    def __init__(self, ranks: Ranks, running: RunningEpoch, parts: Callable[[], dict[str, Part]]) -> None:
        """Begin with nothing.

        Args:
            ranks: those that train.
            running: measurements of the epoch.
            parts: parts with a state, by their names in the checkpoint.
        """
        self._ranks, self._running, self._parts = ranks, running, parts
        self.together = True
        """False once this rank has failed where the others go on, so that it can ask them for nothing."""
        self._known: tuple[tuple[int, int], Mapping[str, Part], Measured] | None = None

    def at(self, position: tuple[int, int]) -> tuple[Mapping[str, Part], Measured]:
        """Return the parts, and the measurements of the epoch so far.

        Args:
            position: epoch and batch of the next step, the same on all ranks.
        """
        if self._ranks.size == 1:
            return self._parts(), self._running.measured
        if self._known is None or self._known[0] != position:
            states = {name: KeptState(part.state_dict()) for name, part in self._parts().items()}
            measured = self._running.of_all_ranks() if self.together else self._running.measured
            self._known = position, states, measured
        return self._known[1:]

    def clear(self) -> None:
        """Let the states go, once they are written."""
        self._known = None
