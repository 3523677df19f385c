"""An answer's frames on their way to the client.

A worker thread makes the frames and hands them to the connection's socket itself: the event loop in between held a
stream at 60 to 75% of a plain socket (a hop to it and back for each frame, a timer for each piece, asyncio's transport
that copies what a send leaves over), the thread at 88% in the same run. The loop keeps the connection: it notices that
the client went away and then shuts the socket under the thread. TLS goes through the loop's transport, piece by piece:
the thread makes them all the same, as a piece may have to be read from the store, for which the loop must not wait.

A reader that takes too little loses its slot (:mod:`hapi.server.http.slow_reader`): the connection is reset, so
that neither the stream's buffers nor the kernel's are kept for it. Requests are idempotent: an honest one asks for
the rest again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web

from hapi.errors import SHORT_OF, HapiError, StoreUnavailableError
from hapi.process.threads import Threads, Work
from hapi.server.frame_stream import FileRange, Frame, FrameStream
from hapi.server.http.keys import GONE, PROBLEM, REQUEST_ID, STATUS
from hapi.server.http.problems import as_hapi_error
from hapi.server.http.slow_reader import DroppedReaderError, SlowReaderGuard
from hapi.waiting import Interest
from hapi.wire.frames import SMALL_BYTES, Buffer, joined
from hapi.wire.messages import REQUEST_ID_HEADER

log = logging.getLogger("hapi.server")

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""How often a waiter looks for itself whether a thread's work is over: without memory the thread cannot tell."""
ERROR_SECONDS = 5.0
"""Longest time for the frame that tells of an error in the middle of an answer."""
_BYTES_ACKED = 120
"""Offset of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info`` (since 4.1)."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""``struct linger``: closing drops what waits to be sent, instead of keeping it for a reader that was given up."""


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """Status and headers of an answer, and how it ends when it fails midway."""

    headers: Mapping[str, str]
    status: int = 200
    failed: Callable[[HapiError], Buffer] | None = None
    """Makes the last bytes, which tell of the error; None: the connection breaks off, as these would pass for data."""


class Answer:
    """Sends the stream of one request."""

    def __init__(
        self,
        workers: Threads,
        send_timeout: float,
        guard: SlowReaderGuard,
        count: Callable[[float], None],
        head: AnswerHead,
    ) -> None:
        """``send_timeout``: seconds in which the headers must leave; ``count`` is told the bytes sent."""
        self._workers = workers
        self._send_timeout = send_timeout
        self._guard = guard
        self._count = count
        self._head = head
        self.sent = 0
        """Bytes of its frames that have left."""
        self._complete = False
        """True once the last one has."""
        self._chunked = False
        self.dropped: DroppedReaderError | None = None
        """Reason why its reader lost its slot; None if it did not."""
        self._socket: socket.socket | None = None
        self._interest = Interest()
        self._acked_before: int | None = None
        """Bytes that the connection's reader acknowledged before this answer; None if unknown."""
        self._handed = 0
        """Bytes of the answer that went into the socket."""

    async def send(self, request: web.Request, stream: FrameStream) -> web.StreamResponse:
        """Send all frames. The first is awaited before the status line."""
        interest = self._interest = stream.context.interest
        working: Work[Any] = self._workers.submit_in(interest, next, stream.frames, None)
        headers = {**self._head.headers, REQUEST_ID_HEADER: request[REQUEST_ID]}
        response = web.StreamResponse(status=self._head.status, headers=headers)
        self._frame_up(request, response, stream.content_length)
        try:
            frame: Frame | None = await outcome(working)
            async with asyncio.timeout(self._send_timeout):
                await response.prepare(request)
                await response.write(b"")  # the headers alone: what goes with them would take the slow way
                self._socket = await _duplicate(request)
            send = self._way(request, response)
            working = self._workers.submit_in(interest, self._send_stream, stream, frame, send)
            await outcome(working)
            request[STATUS] = response.status
            await response.write_eof()
            return response
        except Exception as error:
            if not response.prepared:
                raise
            if isinstance(error, DroppedReaderError):
                self.dropped = error
            gone = isinstance(error, ConnectionError | TimeoutError)
            request[STATUS] = GONE if gone else as_hapi_error(error).status
            return await self._fail_midway(request, response, error)
        finally:
            interest.set()
            if not working.is_over:  # the client is gone: what waits for it must wake up
                self._shut(request, response)
            await over(working)  # a generator that is at work cannot be closed
            if self._complete or self.sent == stream.content_length:
                request[STATUS] = response.status  # the client had all of it and was free to leave
            try:
                await self._close(stream, working)
            finally:
                if self._socket is not None:
                    self._socket.close()

    def _frame_up(self, request: web.Request, response: web.StreamResponse, length: int | None) -> None:
        """Choose how the answer tells its length: beforehand, chunk by chunk, or by the connection's end."""
        if length is not None:
            response.content_length = length
        elif request.version >= HttpVersion11:
            response.enable_chunked_encoding()
            self._chunked = True
        else:
            response.force_close()

    async def _close(self, stream: FrameStream, last: Work[Any]) -> None:
        """Close the stream, whose ``last`` work is over; a lost thread does it itself when it comes back."""
        if not last.done():
            last.add_done_callback(lambda _: stream.close())
            return
        closing = self._workers.submit_in(stream.context.interest, stream.close)
        await over(closing)
        closing.outcome()

    def _way(self, request: web.Request, response: web.StreamResponse) -> Callable[[Frame], None]:
        """The way for frames into the connection: its socket, or the loop's transport; called in a worker thread."""
        sock = self._socket or (request.transport and request.transport.get_extra_info("socket"))
        self._acked_before = _acked(sock)
        if self._socket is not None:
            return partial(self._through_socket, self._socket)
        return partial(
            self._through_transport, asyncio.get_running_loop(), partial(self._write, sock, response)
        )

    def _send_stream(self, stream: FrameStream, frame: Frame | None, send: Callable[[Frame], None]) -> None:
        """Send every frame as it is made, in a worker thread. It rests only while it waits for the reader: what a frame
        waits for the store may be given up.
        """
        while frame is not None:
            with stream.context.clock.stage("send"):
                send(frame)
            frame = next(stream.frames, None)
        self._complete = True

    def _through_socket(self, sock: socket.socket, frame: Frame) -> None:
        if isinstance(frame, FileRange):
            self._send_all(sock, frame.sender(sock), frame.nbytes)
            self._count_sent(frame.nbytes)
            return
        for part in joined(frame):
            for framed in self._chunk(part):
                view = memoryview(framed).cast("B")
                self._send_all(sock, lambda done, view=view: sock.send(view[done:]), view.nbytes)  # type: ignore[misc]
            self._count_sent(len(part))

    def _chunk(self, part: Buffer) -> Sequence[Buffer]:
        """Buffers that go into the socket for ``part``."""
        if not self._chunked:
            return (part,)
        head = b"%x\r\n" % len(part)
        return (head + part + b"\r\n",) if len(part) <= SMALL_BYTES else (head, part, b"\r\n")

    def _send_all(self, sock: socket.socket, send: Callable[[int], int], nbytes: int) -> None:
        """Send all of ``nbytes`` over a non-blocking socket by ``send(done)``, as long as its reader keeps pace."""
        writable: select.poll | None = None
        done = 0
        while done < nbytes:
            try:
                sent = send(done)
            except BlockingIOError:
                if writable is None:
                    writable = select.poll()
                    writable.register(sock, select.POLLOUT)
                since = time.monotonic()
                with self._interest.paused():
                    writable.poll(self._guard.interval * 1000)
                self._check_reader(sock, since)
            else:
                self._handed += sent
                done += sent

    def _through_transport(
        self,
        loop: asyncio.AbstractEventLoop,
        write: Callable[[Buffer], Coroutine[Any, Any, None]],
        frame: Frame,
    ) -> None:
        for part in joined(frame):
            writing = asyncio.run_coroutine_threadsafe(write(part), loop)
            with self._interest.paused():
                while not wait([writing], LOOK_SECONDS).done:
                    if self._interest.is_set():
                        writing.cancel()
                        raise ConnectionResetError("the client is gone")
            writing.result()
            self._count_sent(len(part))

    async def _write(self, sock: Any, response: web.StreamResponse, part: Buffer) -> None:
        """Write ``part`` to the loop's transport, as long as the reader keeps pace."""
        writing = asyncio.ensure_future(response.write(part))
        self._handed += len(part)
        try:
            while not writing.done():
                since = time.monotonic()
                await asyncio.wait([writing], timeout=self._guard.interval)
                self._check_reader(sock, since)
            await writing
        finally:
            writing.cancel()

    def _check_reader(self, sock: Any, since: float) -> None:
        """The reader let the server wait from ``since`` until now."""
        now = time.monotonic()
        if self._guard.waited(since, now):
            acked = _acked(sock)
            if acked is None or self._acked_before is None:
                self._guard.check(now, self._handed)
            else:
                self._guard.check(now, acked - self._acked_before)

    def _count_sent(self, count: int) -> None:
        self._interest.moved()
        self.sent += count
        self._count(count)

    def _shut(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._socket is None:
            if response.prepared:
                abort(request)
        else:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self._socket.shutdown(socket.SHUT_RDWR)

    async def _fail_midway(
        self, request: web.Request, response: web.StreamResponse, error: Exception
    ) -> web.StreamResponse:
        """Report an error after the status line by an error frame, and close the connection."""
        if isinstance(error, ConnectionError | TimeoutError):
            abort(request)  # closing would wait for the reader that has just been given up
        else:
            problem = request[PROBLEM] = as_hapi_error(error)
            if type(problem) is HapiError:
                log.exception("unexpected error in a stream", extra={"request_id": request[REQUEST_ID]})
            if self._head.failed is None:
                abort(request)
            else:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(ERROR_SECONDS):
                        await self._send_last(response, self._head.failed(problem))
        response.force_close()
        if request.transport is not None:
            request.transport.close()
        return response

    async def _send_last(self, response: web.StreamResponse, frame: Buffer) -> None:
        if self._socket is None:
            await response.write(frame)
        else:
            for part in self._chunk(frame):
                await asyncio.get_running_loop().sock_sendall(self._socket, part)


def _acked(sock: Any) -> int | None:
    """Bytes that the other side has acknowledged on a TCP connection so far; None where the system does not tell."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
    except (OSError, AttributeError):  # closed meanwhile; or not Linux
        return None
    if len(info) < _BYTES_ACKED + 8:
        return None
    (count,) = struct.unpack_from("=Q", info, _BYTES_ACKED)
    return int(count)


async def _duplicate(request: web.Request) -> socket.socket | None:
    """A duplicate of a plain connection's socket once the transport has nothing left to send.

    None where frames go through the transport: over TLS, and when there is no descriptor.
    """
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
    try:
        duplicate = socket.socket(fileno=os.dup(own.fileno()))
    except OSError as error:
        if error.errno in SHORT_OF:  # the transport needs none
            return None
        raise
    duplicate.setblocking(False)
    return duplicate


async def over(work: Work[Any]) -> None:
    """Wait until ``work`` is done or its thread is lost, whoever cancels: a connection that is dropped cancels its
    handler."""
    ending = asyncio.wrap_future(work.over)
    while not (ending.done() or work.is_over):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([ending], timeout=LOOK_SECONDS)


async def outcome(work: Work[T]) -> T:
    """Return the result of work in a thread, as :meth:`Work.outcome` does. A waiter that is cancelled leaves
    at once.
    """
    ending = asyncio.wrap_future(work.over)
    while not (ending.done() or work.is_over):
        await asyncio.wait([ending], timeout=LOOK_SECONDS)
    return work.outcome()


async def finished(
    work: Work[T], discard: Callable[[T], object], gone: Callable[[], object] = lambda: None
) -> T:
    """Return the result of work in a thread.

    A waiter that is cancelled stays until the thread is free or lost, so that its slot is not given away too
    early and work for absent clients cannot pile up; work that has not begun does not begin, a late result is
    discarded.

    Args:
        work: the thread's work.
        discard: called with a late result.
        gone: tells the thread at once, so that it need not go on waiting for something itself.
    """

    def discard_late(done: Future[T]) -> None:
        """Discard the result that came after the waiter had left."""
        if not done.cancelled() and done.exception() is None:
            discard(done.result())

    try:
        return await outcome(work)
    except asyncio.CancelledError:
        gone()
        if not work.cancel():
            await over(work)
            work.add_done_callback(discard_late)
        raise
    except StoreUnavailableError:
        if not work.done():  # lost
            work.add_done_callback(discard_late)
        raise


def abort(request: web.Request) -> None:
    """Drop the connection with all that waits to be sent."""
    if request.transport is not None:
        sock = request.transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        request.transport.abort()
