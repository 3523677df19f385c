"""Times of checkpoints, with retries after a failure: a full disk never ends a running training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hapi.errors import DivergedError, HapiError

log = logging.getLogger("hapi.client")

Position = tuple[int, int]
"""Epoch and batch of the next step."""


class Keeper:
    """Calls ``write`` when a checkpoint is due, and survives its failures.

    After a failure it tries again between steps, after pauses that double, and always at an epoch's end. Only
    at the end of the training is a checkpoint that cannot be written an error, after more tries.
    """

    FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0
    """Seconds between two tries while training runs."""
    LAST_SECONDS = 60.0
    """Longest time of the tries at the end."""

    def __init__(
        self,
        write: Callable[[], None] | None,
        every: int | None,
        retry_timeout: float,
        *,
        together: bool = False,
    ) -> None:
        """Begin with no checkpoint written.

        Args:
            write: writes a checkpoint; raises :class:`HapiError` when it fails. None: nothing is saved.
            every: batches between two checkpoints inside an epoch; None for one at each epoch's end.
            retry_timeout: seconds of the tries at the end.
            together: other ranks take part in each checkpoint, so none comes earlier after a failure.
        """
        self._together = together
        self._write, self._every = write, every
        self._retry_timeout = min(retry_timeout, self.LAST_SECONDS)
        self.saved: Position | None = None
        """Position of the last checkpoint; None before the first."""
        self.troubles: list[str] = []
        """Failures that did not end the training, for the report."""
        self._failures = 0
        """Number of failures in a row."""
        self._pause, self._again_at = self.FIRST_PAUSE, 0.0

    def step(self, position: Position) -> None:
        """Note that a step ended and ``position`` comes next."""
        regular = bool(self._every) and position[1] % (self._every or 1) == 0
        due = (regular or self._failures) and time.monotonic() >= self._again_at
        if regular if self._together else due:
            self._try(position)

    def epoch(self, position: Position) -> None:
        """Note that an epoch ended, or the last possible one."""
        self._try(position)

    def last(self, position: Position) -> None:
        """Save the training's end at ``position``; :class:`HapiError` when that fails."""
        if self._write is None or self.saved == position:
            return
        deadline, pause = time.monotonic() + self._retry_timeout, 1.0
        while (error := self._try(position)) is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise error
            if pause == 1.0:
                log.warning("%s; trying again for %.0f s (Ctrl-C stops that)", error, left)
            time.sleep(min(pause, left))
            pause *= 2

    def _try(self, position: Position) -> HapiError | None:
        """Write; the error that it ended with."""
        if self._write is None:
            return None
        try:
            self._write()
        except DivergedError:
            raise
        except HapiError as error:
            self._failed(position, error)
            return error
        if self._failures:
            self._note(f"the checkpoint of {_at(position)} was written, after {self._failures} that failed")
        self._failures, self._pause, self._again_at = 0, self.FIRST_PAUSE, 0.0
        self.saved = position
        return None

    def _failed(self, position: Position, error: HapiError) -> None:
        self._failures += 1
        if self._failures == 1:
            self._note(f"{error} (at {_at(position)}); training goes on and it is tried again")
        self._again_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, self.LONGEST_PAUSE)

    def _note(self, line: str) -> None:
        log.warning("%s", line)
        self.troubles.append(line)


def _at(position: Position) -> str:
    return f"epoch {position[0]}, batch {position[1]}"
