"""A disk that moves bytes only while somebody waits for them: what waits takes as much memory as it can."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hapi.arrays import Bytes
from hapi.offload.engine import Engine


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
