"""Something that is done again and again beside a measurement."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self


class Background(ABC):
    """Does its step in a thread, time after time, for the length of a ``with`` block."""

    def __init__(self, every: float) -> None:
        """``every``: seconds between the end of a step and the next."""
        self._every, self._over = every, threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self.step()

    @abstractmethod
    def step(self) -> None:
        """Do it once."""
