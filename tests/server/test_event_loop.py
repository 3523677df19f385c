"""A server's event loop and connections on a machine without memory: nothing ends, nobody is left waiting."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web_protocol
from support.http_tools import ServedApplication, exchange, served

from hapi.process.threads import Threads, Work
from hapi.server.http import response_stream
from hapi.server.http.response_stream import outcome, over
from hapi.server.lifecycle import event_loop
from hapi.server.lifecycle.log_limits import JsonLines, LimitedHandler


@pytest.mark.parametrize("error", [MemoryError, SystemError])
def test_the_loop_goes_on_after_its_own_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    turn, left = asyncio.base_events.BaseEventLoop._run_once, [error(), error()]  # type: ignore[attr-defined]

    def short(loop: Any) -> None:
        if left and loop._ready:
            raise left.pop()
        turn(loop)

    async def main() -> int:
        await asyncio.sleep(0.01)
        return 5

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "_run_once", short)
    assert event_loop.run(main()) == 5
    assert not left


def test_an_error_of_the_programs_own_ends_it() -> None:
    async def main() -> None:
        raise MemoryError("of the program's own")

    with pytest.raises(MemoryError, match="own"):
        event_loop.run(main())


def test_a_connection_whose_error_cannot_be_told_is_closed() -> None:
    class Transport:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    async def main() -> list[bool]:
        loop, transports = asyncio.get_running_loop(), [Transport(), Transport()]

        def failing(context: dict[str, Any]) -> None:
            raise MemoryError

        loop.default_exception_handler = failing  # type: ignore[method-assign]
        for transport, error in zip(transports, (MemoryError(), ValueError()), strict=True):
            loop.call_exception_handler({"message": "", "exception": error, "transport": transport})
        return [transport.aborted for transport in transports]

    assert event_loop.run(main()) == [True, False]


def test_a_pause_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, asked = asyncio.sleep, list[float]()

    async def short(seconds: float) -> None:
        asked.append(seconds)
        if seconds:
            raise MemoryError
        await sleep(0)

    async def main() -> None:
        monkeypatch.setattr(asyncio, "sleep", short)
        await event_loop.pause(60.0)

    event_loop.run(main())
    assert asked == [60.0, 0]


def test_small_objects_have_room() -> None:
    held = event_loop.reserve_small_objects(4 << 20)
    assert 4 <= len(held) <= 16 and sum(map(len, held)) < 16 << 10


# -- connections ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server(folder: Path) -> Any:
    with served(folder) as application:
        yield application


def short(*_: Any, **__: Any) -> Any:
    raise MemoryError


def never_heard(server: ServedApplication) -> None:
    """The connection is closed, long before any time limit."""
    with pytest.raises(ConnectionError):
        exchange(server.port, "GET", "/healthz")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (web_protocol, "StreamWriter"),  # where the library does not catch it
        (web_protocol.RequestHandler, "data_received"),
        (web_protocol.RequestHandler, "connection_made"),
        (web_protocol.RequestHandler, "start"),
    ],
)
def test_who_cannot_be_answered_is_disconnected(
    server: ServedApplication, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(place, name, short)
        never_heard(server)
    assert exchange(server.port, "GET", "/healthz").status == 200


def test_an_error_that_cannot_be_logged_ends_its_connection(
    server: ServedApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(web_protocol.RequestHandler, "_handle_request", short)
        patched.setattr(web_protocol.RequestHandler, "log_exception", short)
        never_heard(server)
    assert exchange(server.port, "GET", "/healthz").status == 200


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [outcome, over])
def test_work_whose_end_cannot_be_told_is_seen_all_the_same(
    monkeypatch: pytest.MonkeyPatch, wait: Any
) -> None:
    monkeypatch.setattr(response_stream, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(Work, "end", lambda work: None)
    pool, go_on = Threads(1, "test"), threading.Event()

    async def main() -> Any:
        work = pool.submit(lambda: go_on.wait(240) and 7)
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await wait(work)
        return work.result()

    assert asyncio.run(asyncio.wait_for(main(), 240)) == 7
    pool.close()


def test_a_line_for_which_there_is_no_memory_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    handler, record = LimitedHandler(stream), logging.makeLogRecord({"msg": "a line"})
    with monkeypatch.context() as patched:
        patched.setattr(JsonLines, "format", short)
        handler.handle(record)
    assert stream.getvalue() == "" == capsys.readouterr().err
    handler.handle(record)
    assert '"a line"' in stream.getvalue()
