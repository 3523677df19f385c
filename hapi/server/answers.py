"""An answer's frames on their way to the client.

A worker thread makes the frames and hands them to the connection's socket itself: the event loop in between held a
stream at 60 to 75% of a plain socket (a hop to it and back for each frame, a timer for each piece, asyncio's transport
that copies what a send leaves over), the thread at 88% in the same run. The loop keeps the connection: it notices that
the client went away and then shuts the socket under the thread. TLS goes through the loop's transport, frame by frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from hapi.errors import HapiError
from hapi.server.problems import as_hapi_error
from hapi.server.service import Frame, FrameStream
from hapi.wire.frames import MEDIA_TYPE, Buffer, error_frame, joined
from hapi.wire.messages import REQUEST_ID_HEADER

log = logging.getLogger("hapi.server")

T = TypeVar("T")

REQUEST_ID = web.RequestKey("id", str)
STATUS = web.RequestKey("status", int)
"""What a request ended as when that is not its response's status."""
PROBLEM = web.RequestKey("problem", HapiError)
"""The error that ended it, if one did."""
GONE = 499
"""Logged and counted as the status of a request whose client went away or was too slow (nginx's number)."""
ERROR_SECONDS = 5.0
"""Longest time for the frame that tells of an error in the middle of an answer."""


class Answer:
    """Sends the stream of one request."""

    def __init__(
        self, workers: ThreadPoolExecutor, send_timeout: float, count: Callable[[float], None]
    ) -> None:
        """``send_timeout``: seconds in which the client must take a piece; ``count`` is told the bytes sent."""
        self._workers = workers
        self._send_timeout = send_timeout
        self._count = count
        self.unsent = 0
        """Bytes of the answer that have not left."""
        self._socket: socket.socket | None = None

    async def send(
        self, request: web.Request, stream: FrameStream, cancelled: threading.Event, deadline: float
    ) -> web.StreamResponse:
        """Send all frames, until ``deadline`` (``time.monotonic``). The first is awaited before the status line."""
        loop = asyncio.get_running_loop()
        self.unsent = stream.content_length
        working: asyncio.Future[Any] = loop.run_in_executor(self._workers, next, stream.frames, None)
        headers = {"Content-Type": MEDIA_TYPE, REQUEST_ID_HEADER: request[REQUEST_ID]}
        response = web.StreamResponse(headers=headers)
        response.content_length = stream.content_length
        try:
            frame: Frame | None = await asyncio.shield(working)
            async with asyncio.timeout(self._send_timeout):
                await response.prepare(request)
                await response.write(b"")  # the headers alone: what goes with them would take the slow way
                self._socket = await _duplicate(request)
            if self._socket is None:
                await self._through_transport(response, stream, frame, deadline)
            else:
                sending = (stream, self._socket, frame, deadline)
                working = loop.run_in_executor(self._workers, self._through_socket, *sending)
                await asyncio.shield(working)
            request[STATUS] = response.status
            await response.write_eof()
            return response
        except Exception as error:
            if not response.prepared:
                raise
            gone = isinstance(error, ConnectionError | TimeoutError)
            request[STATUS] = GONE if gone else as_hapi_error(error).status
            return await self._fail_midway(request, response, error)
        finally:
            cancelled.set()
            if not working.done():  # the client is gone: what waits for it must wake up
                self._shut()
            await done(working)  # a generator that is at work cannot be closed
            if not self.unsent:
                request[STATUS] = response.status  # the client had all of it and was free to leave
            closing = loop.run_in_executor(self._workers, stream.close)
            await done(closing)
            if self._socket is not None:
                self._socket.close()
            closing.result()

    def _through_socket(
        self, stream: FrameStream, sock: socket.socket, frame: Frame | None, deadline: float
    ) -> None:
        """In a worker thread: every frame as it is made."""
        while frame is not None:
            with stream.clock.stage("send"):
                for piece in joined(frame):
                    _send_all(sock, piece, min(time.monotonic() + self._send_timeout, deadline))
                    self._sent(len(piece))
            frame = next(stream.frames, None)

    async def _through_transport(
        self, response: web.StreamResponse, stream: FrameStream, frame: Frame | None, deadline: float
    ) -> None:
        loop = asyncio.get_running_loop()
        while frame is not None:
            following = loop.run_in_executor(self._workers, next, stream.frames, None)
            try:
                async with asyncio.timeout(None) as limit:
                    for piece in joined(frame):
                        left = min(self._send_timeout, deadline - time.monotonic())
                        limit.reschedule(loop.time() + left)
                        await response.write(piece)
                        self._sent(len(piece))
                frame = await asyncio.shield(following)
            finally:
                await done(following)

    def _sent(self, count: int) -> None:
        self.unsent -= count
        self._count(count)

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    async def _fail_midway(
        self, request: web.Request, response: web.StreamResponse, error: Exception
    ) -> web.StreamResponse:
        """After the status line only an error frame can tell; then the connection is of no more use."""
        if isinstance(error, ConnectionError | TimeoutError):
            abort(request)  # closing would wait for the reader that has just been given up
        else:
            problem = request[PROBLEM] = as_hapi_error(error)
            if type(problem) is HapiError:
                log.exception("unexpected error in a stream", extra={"request_id": request[REQUEST_ID]})
            with contextlib.suppress(Exception):
                async with asyncio.timeout(ERROR_SECONDS):
                    await self._send_last(response, error_frame(problem))
        response.force_close()
        if request.transport is not None:
            request.transport.close()
        return response

    async def _send_last(self, response: web.StreamResponse, frame: Buffer) -> None:
        if self._socket is None:
            await response.write(frame)
        else:
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)


def _send_all(sock: socket.socket, piece: Buffer, latest: float) -> None:
    """Send ``piece`` wholly over a non-blocking socket; TimeoutError when the client has not taken it by ``latest``."""
    view = memoryview(piece).cast("B")
    writable: select.poll | None = None
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            if writable is None:
                writable = select.poll()
                writable.register(sock, select.POLLOUT)
            left = latest - time.monotonic()
            if left <= 0 or not writable.poll(left * 1000):
                raise TimeoutError from None


async def _duplicate(request: web.Request) -> socket.socket | None:
    """A duplicate of a plain connection's socket once the transport has nothing left to send; None over TLS."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    own = transport.get_extra_info("socket")
    if own is None or transport.get_extra_info("sslcontext") is not None or not hasattr(select, "poll"):
        return None
    while transport.get_write_buffer_size() and not transport.is_closing():
        await asyncio.sleep(0.001)
    if transport.is_closing():
        raise ConnectionResetError("the client is gone")
    duplicate = socket.socket(fileno=os.dup(own.fileno()))
    duplicate.setblocking(False)
    return duplicate


async def done(future: asyncio.Future[Any]) -> None:
    """Wait for what runs in a thread, whoever cancels: a connection that is dropped cancels its handler."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    future.exception()  # looked at, so that asyncio does not complain; whoever waits for it has raised it


async def finished(future: Future[T], discard: Callable[[T], None]) -> T:
    """The result of work in a thread.

    A waiter that is cancelled stays until the thread is free, so that its slot is not given away too early and
    work for clients that are gone cannot pile up; what has not begun is not begun, a late result is discarded.
    """
    result = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        if not future.cancel():
            await done(result)
            if result.exception() is None:
                discard(result.result())
        raise


def abort(request: web.Request) -> None:
    """Drop the connection with all that waits to be sent."""
    if request.transport is not None:
        request.transport.abort()
