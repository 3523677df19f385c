"""The HTTP application: routes, authorisation, problem details, streaming. No computing on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web

from hapi import __version__
from hapi.errors import BusyError, DrainingError, HapiError, UnauthorizedError
from hapi.server.admission import Admission
from hapi.server.metrics import Metrics
from hapi.server.problems import as_hapi_error, body_too_large, problem_response
from hapi.server.sending import BodySender
from hapi.server.service import Frame, FrameStream, Service
from hapi.wire import messages
from hapi.wire.frames import MEDIA_TYPE, WIRE_VERSION, error_frame, joined

log = logging.getLogger("hapi.server")

T = TypeVar("T")

BODY_SECONDS = 30.0
"""Longest time in which a request's body must have arrived."""
MAX_BODIES = 256
"""Most request bodies that may be arriving at a time: each may be as long as ``MAX_REQUEST_BYTES``."""
GONE = 499
"""Logged and counted as the status of a request whose client went away or was too slow (nginx's number)."""
DOCUMENT_THREADS = 2
"""Descriptions read from the store at a time."""


class Application:
    """The aiohttp application of one :class:`Service`.

    ``draining`` refuses new work with 503 while what runs is finished.
    """

    def __init__(self, service: Service, *, token: str | None = None) -> None:
        self.service = service
        settings = service.settings
        self.admission = Admission(settings.max_running, settings.max_queued)
        self.metrics = Metrics()
        self.documents = Admission(DOCUMENT_THREADS, settings.max_queued)
        self.bodies = 0
        """Request bodies that are arriving now."""
        self.draining = False
        self._token = token.encode() if token else None
        self._workers = ThreadPoolExecutor(settings.max_running, thread_name_prefix="hapi-request")
        self._documents = ThreadPoolExecutor(DOCUMENT_THREADS, thread_name_prefix="hapi-document")
        self.web = web.Application(client_max_size=messages.MAX_REQUEST_BYTES, middlewares=[self._guard])
        self._routes()
        self._gauges()

    def close(self) -> None:
        """Stop the worker threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._documents.shutdown(wait=False, cancel_futures=True)

    def _routes(self) -> None:
        add = self.web.router
        add.add_get("/v1", self._version)
        add.add_get(messages.HEALTH_PATH, self._health)
        add.add_get(messages.READY_PATH, self._ready)
        add.add_get(messages.METRICS_PATH, self._metrics)
        for path in (messages.DATASETS_PATH, messages.MODELS_PATH):
            add.add_get(path, self._document)
            add.add_get(path + "/{name}", self._document)
        for path in (messages.EXTRACT_PATH, messages.SAMPLES_PATH, messages.TENSORS_PATH):
            add.add_post(path, self._stream)

    def _gauges(self) -> None:
        gauge, service = self.metrics.gauge, self.service
        gauge("hapi_requests_running", "Requests that hold a slot.", lambda: self.admission.running)
        gauge("hapi_requests_queued", "Requests that wait for a slot.", lambda: self.admission.queued)
        gauge("hapi_model_cache_bytes", "Bytes of resident layers.", lambda: service.cache.resident_bytes)
        gauge("hapi_model_cache_hits", "Requests served by resident layers.", lambda: service.cache.hits)
        gauge("hapi_model_cache_misses", "Times that layers were loaded.", lambda: service.cache.misses)
        gauge(
            "hapi_device_memory_bytes", "Bytes that torch holds on the device.", service.device.memory_bytes
        )
        gauge(
            "hapi_out_of_memory_caught", "Forward passes halved.", lambda: service.device.out_of_memory_caught
        )
        gauge("hapi_busy_seconds", "Seconds with at least one request at work.", lambda: service.account.busy.seconds)

    # -- middleware --------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Authorise, time, log, count, and turn every error into problem details."""
        started = time.monotonic()
        request_id = request.headers.get(messages.REQUEST_ID_HEADER, "")[:64]
        request["id"] = request_id if request_id.isalnum() else "-"
        route = request.match_info.route.resource
        name = route.canonical if route is not None else "other"
        status = GONE
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            status = request.get("status", status)
            if status == GONE:
                self.metrics.cancelled.inc()
            self.metrics.requests.labels(name, str(status)).inc()
            level = logging.DEBUG if name in (messages.HEALTH_PATH, messages.READY_PATH) else logging.INFO
            extra = {
                "request_id": request["id"],
                "method": request.method,
                "path": request.path[:200],
                "status": status,
                "seconds": round(time.monotonic() - started, 4),
                **request.get("log", {}),
            }
            log.log(level, "request", extra=extra)

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """The handler's answer, or the problem that it met, delivered within the send timeout."""
        try:
            self._authorise(request)
            response: web.StreamResponse = await handler(request)
        except Exception as error:
            problem = as_hapi_error(error)
            if type(problem) is HapiError:
                log.exception("unexpected error", extra={"request_id": request["id"]})
            response = problem_response(problem)
        if not response.prepared:
            try:
                async with asyncio.timeout(self.service.settings.send_timeout):
                    await response.prepare(request)
                    await response.write_eof()
            except (TimeoutError, ConnectionError):  # nobody reads
                request["status"] = GONE
                _abort(request)
        return response

    def _authorise(self, request: web.Request) -> None:
        if self._token is None or request.path in (messages.HEALTH_PATH, messages.READY_PATH):
            return
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            raise UnauthorizedError(
                "this server wants a bearer token; set HAPI_TOKEN or --token-file to the right one"
            )

    # -- handlers ----------------------------------------------------------------------------------------

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"hapi": __version__, "wire": WIRE_VERSION, "server": self.service.id})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _ready(self, request: web.Request) -> web.Response:
        if self.draining:
            raise DrainingError("the server is shutting down")
        return web.json_response({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _document(self, request: web.Request) -> web.Response:
        async with self.documents.slot(self.service.settings.max_request_seconds):
            reading = self._documents.submit(self.service.document, request.path)
            return web.json_response(await _finished(reading, lambda document: None))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self.draining:
            raise DrainingError("the server is shutting down; ask another one")
        body = await self._body(request)
        settings = self.service.settings
        cancelled = threading.Event()
        started = time.monotonic()
        try:
            async with self.admission.slot(settings.max_request_seconds) as waited:
                opening = self._workers.submit(self.service.stream, request.path, body, cancelled, waited)
                stream = await _finished(opening, FrameStream.close)
                try:
                    return await self._send(
                        request, stream, cancelled, started + settings.max_request_seconds
                    )
                finally:
                    self._account(request, stream, time.monotonic() - started)
        finally:
            cancelled.set()

    async def _body(self, request: web.Request) -> bytes:
        """The request's body; refused unread when it is too long, or when too many arrive at once."""
        if (request.content_length or 0) > messages.MAX_REQUEST_BYTES:
            raise body_too_large()
        if self.bodies >= MAX_BODIES:
            raise BusyError(f"{self.bodies} requests are arriving; come back in 1 s", retry_after=1.0)
        self.bodies += 1
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await request.read()
        finally:
            self.bodies -= 1

    async def _send(
        self, request: web.Request, stream: FrameStream, cancelled: threading.Event, deadline: float
    ) -> web.StreamResponse:
        """Send frame after frame while the next one is made. The first is awaited before the status line."""
        loop = asyncio.get_running_loop()

        def following() -> asyncio.Future[Frame | None]:
            return loop.run_in_executor(self._workers, next, stream.frames, None)

        pending = following()
        response = web.StreamResponse(headers={"Content-Type": MEDIA_TYPE})
        response.content_length = stream.content_length
        sender = BodySender(request, response)
        unsent = stream.content_length
        try:
            frame = await asyncio.shield(pending)
            await response.prepare(request)
            while frame is not None:
                pending = following()
                unsent -= await self._write(sender, frame, deadline)
                if not unsent:
                    request["status"] = response.status  # the client has all of it and may leave now
                frame = await asyncio.shield(pending)
            await response.write_eof()
            return response
        except Exception as error:
            if not response.prepared:
                raise
            gone = isinstance(error, ConnectionError | TimeoutError)
            request.setdefault("status", GONE if gone else as_hapi_error(error).status)
            return await self._fail_midway(request, response, sender, error)
        finally:
            cancelled.set()
            sender.close()
            await _done(pending)  # a generator that is at work cannot be closed
            closing = loop.run_in_executor(self._workers, stream.close)
            await _done(closing)
            closing.result()

    async def _write(self, sender: BodySender, frame: Frame, deadline: float) -> int:
        """Send one frame; returns its bytes."""
        sent = 0
        loop, patience = asyncio.get_running_loop(), self.service.settings.send_timeout
        latest = loop.time() + deadline - time.monotonic()
        async with asyncio.timeout(
            None
        ) as limit:  # one for the frame: one for each piece cost a tenth of the rate
            for piece in joined(frame):
                limit.reschedule(min(loop.time() + patience, latest))
                await sender.send(piece)
                sent += len(piece)
        self.metrics.bytes_sent.inc(sent)
        return sent

    async def _fail_midway(
        self, request: web.Request, response: web.StreamResponse, sender: BodySender, error: Exception
    ) -> web.StreamResponse:
        """After the status line only an error frame can tell; then the connection is of no more use."""
        if isinstance(error, ConnectionError | TimeoutError):
            _abort(request)  # closing would wait for the reader that has just been given up
        else:
            problem = as_hapi_error(error)
            if type(problem) is HapiError:
                log.exception("unexpected error in a stream", extra={"request_id": request["id"]})
            with contextlib.suppress(Exception):
                async with asyncio.timeout(5):
                    await sender.send(error_frame(problem))
        response.force_close()
        if request.transport is not None:
            request.transport.close()
        return response

    def _account(self, request: web.Request, stream: FrameStream, seconds: float) -> None:
        stages = stream.clock.seconds()
        for stage, value in stages.items():
            self.metrics.stage_seconds[stage].inc(value)
        self.metrics.samples.inc(stream.samples)
        self.metrics.seconds.labels(request.path).observe(seconds)
        request["log"] = {
            "samples": stream.samples,
            "bytes": stream.content_length,
            "stages": {k: round(v, 4) for k, v in stages.items() if v},
        }


async def _done(future: asyncio.Future[Any]) -> None:
    """Wait for what runs in a thread, whoever cancels: a connection that is dropped cancels its handler."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    future.exception()  # looked at, so that asyncio does not complain; whoever waits for it has raised it


async def _finished(future: Future[T], discard: Callable[[T], None]) -> T:
    """The result of work in a thread.

    A waiter that is cancelled stays until the thread is free, so that its slot is not given away too early and
    work for clients that are gone cannot pile up; what has not begun is not begun, a late result is discarded.
    """
    result = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        if not future.cancel():
            await _done(result)
            if result.exception() is None:
                discard(result.result())
        raise


def _abort(request: web.Request) -> None:
    """Drop the connection with all that waits to be sent."""
    if isinstance(request.transport, asyncio.WriteTransport):
        request.transport.abort()
