"""Disks that move bytes only while somebody waits for them: what is on its way takes as much memory as it can."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hapi.arrays import Bytes
from hapi.offload.activations.spill import SpillDrive
from hapi.offload.activations.swapper import Swapper
from hapi.offload.engine import Engine


@contextmanager
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write swapped activations one by one, while the training waits for room; all are written when the loss comes."""
    held: deque[Callable[[], None]] = deque()
    write = SpillDrive.write

    def hold(self: SpillDrive, *job: Any) -> None:
        held.append(lambda: write(self, *job))

    def wait(self: Swapper, has_room: Callable[[], bool]) -> None:
        while self._leaving and not has_room():
            if held:
                held.popleft()()
            self._lock.wait()
            self._check()
            self._bury()

    def let_leave(self: Swapper, until: int) -> None:
        with self._lock:
            wait(self, lambda: False)

    def close(self: Swapper) -> None:
        while held:
            held.popleft()()
        end(self)

    end = Swapper.close
    with monkeypatch.context() as patch:
        patch.setattr(SpillDrive, "write", hold)
        patch.setattr(Swapper, "_wait_to_leave", wait)
        patch.setattr(Swapper, "let_leave", let_leave)
        patch.setattr(Swapper, "close", close)
        yield


@contextmanager
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read records of states one by one, while the training waits for their updates."""
    go = threading.Semaphore(0)
    under_way: set[int] = set()
    read, wait = Engine._read, Engine._wait

    def hold(self: Engine, number: int, buffer: Bytes) -> None:
        go.acquire()
        under_way.clear()
        read(self, number, buffer)

    def let_go(self: Engine, is_done: Callable[[], bool]) -> None:
        def done() -> bool:
            if is_done():
                return True
            if not under_way:
                under_way.add(0)
                go.release()
            return False

        wait(self, done)

    def close(self: Engine) -> None:
        go.release(len(self._pieces) + 1)
        end(self)

    end = Engine.close
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_read", hold)
        patch.setattr(Engine, "_wait", let_go)
        patch.setattr(Engine, "close", close)
        yield
