"""The line to a cache's writer: in turn, bounded, and never a reason for what computes to wait or to fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
from support.waiting import PATIENCE, until

from hapi.cache.writing import line
from hapi.cache.writing.line import WriterLine


class Held:
    """Work that stays in the thread's hands until it is released."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.release.wait(240)


def appending(done: list[int], number: int) -> Callable[[], None]:
    return lambda: done.append(number)


def test_work_is_done_in_turn() -> None:
    done: list[int] = []
    writer = WriterLine("test")
    assert writer.wait(0)
    assert all(writer.offer(1, appending(done, number)) for number in range(100))
    assert writer.wait(240) and done == list(range(100))
    writer.close(60)


def test_a_full_line_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "LINE_BYTES", 100)
    done: list[int] = []
    held, writer = Held(), WriterLine("test")
    assert writer.offer(500, held), "one piece alone may have more"
    assert held.begun.wait(240) and not writer.offer(1, appending(done, 0)) and not writer.wait(0.01)
    held.release.set()
    assert writer.wait(240)
    held = Held()
    assert writer.offer(60, held) and held.begun.wait(240)
    assert writer.offer(40, appending(done, 1)) and not writer.offer(1, appending(done, 2))
    writer.drop()
    assert writer.offer(40, appending(done, 3)) and not writer.offer(1, appending(done, 4))
    held.release.set()
    assert writer.wait(240) and done == [3]
    writer.close(60)


def test_close_ends_the_thread_and_forgets_what_waits() -> None:
    done: list[int] = []
    held, writer = Held(), WriterLine("closing-line")
    assert writer.offer(1, held) and held.begun.wait(240) and writer.offer(1, appending(done, 0))
    writer.close(0.01)  # a disk that hangs holds up nobody
    held.release.set()
    writer.close(60)
    assert not done and not writer.offer(1, appending(done, 1))
    assert "closing-line" not in [thread.name for thread in threading.enumerate()]


def test_work_that_fails_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise MemoryError("short")

    done: list[int] = []
    writer = WriterLine("test")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert writer.offer(1, fails) and writer.offer(1, appending(done, number))
        assert writer.wait(240)
    assert done == [0, 1, 2] and [record.message for record in caplog.records] == [
        "cache: something was not kept (MemoryError: short)"
    ]
    writer.close(60)


def test_what_was_written_is_flushed_soon() -> None:
    flushed, done = threading.Event(), list[int]()
    writer = WriterLine("test", flush=flushed.set, flush_seconds=0.02)
    assert not flushed.wait(0.05), "nothing was written"
    assert writer.offer(1, appending(done, 0))
    assert flushed.wait(240) and done == [0]
    flushed.clear()
    assert not flushed.wait(0.05), "nothing was written since"
    writer.close(60)


def test_a_flush_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    failures, flushed, done = [MemoryError("short")], threading.Event(), list[int]()

    def flush() -> None:
        if failures:
            raise failures.pop()
        flushed.set()

    writer = WriterLine("test", flush=flush, flush_seconds=0.0)
    assert writer.offer(1, appending(done, 0))
    until(lambda: not failures, 20, "the flush that fails")
    assert writer.offer(1, appending(done, 1)) and flushed.wait(PATIENCE)
    writer.close(60)
    assert done == [0, 1] and "something was not kept (MemoryError: short)" in caplog.text
