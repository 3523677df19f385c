"""The HTTP application: routes, authorisation, problem details, streaming. No computing on the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from hapi import __version__
from hapi.errors import BusyError, DrainingError, HapiError
from hapi.server.account import processors
from hapi.server.admission import FULL, REASONS, Admission, Slot
from hapi.server.answers import GONE, REQUEST_ID, STATUS, Answer, abort, finished
from hapi.server.costs import Costs, Request, Server, Used
from hapi.server.fair_queue import LEAST_COST, Tenant
from hapi.server.metrics import Metrics
from hapi.server.pace import Pace
from hapi.server.problems import as_hapi_error, body_too_large, problem_response
from hapi.server.service import FrameStream, Service
from hapi.server.tenants import Tenants
from hapi.wire import messages
from hapi.wire.frames import WIRE_VERSION

log = logging.getLogger("hapi.server")

TENANT = web.RequestKey("tenant", Tenant)
LOGGED = web.RequestKey("logged", dict)
"""What the request's line in the log says beside."""

BODY_SECONDS = 30.0
"""Longest time in which a request's body must have arrived."""
MAX_BODIES = 256
"""Most request bodies that may be arriving at a time (each may be as long as ``MAX_REQUEST_BYTES``); of several tenants
one may send half of them."""
DOCUMENT_THREADS = 2
"""Descriptions read from the store at a time."""


class Application:
    """The aiohttp application of one :class:`Service`.

    ``draining`` refuses new work with 503 while what runs is finished.
    """

    def __init__(self, service: Service, tenants: Tenants | None = None) -> None:
        """``tenants``: who may ask; None: everybody, without a token."""
        self.service = service
        settings = service.settings
        self.tenants = tenants or Tenants()
        self.metrics = Metrics()
        self.admission = Admission(service.slots, settings.max_queued, self._shed)
        self.documents = Admission(DOCUMENT_THREADS, settings.max_queued, self._shed)
        self._costs = Costs()
        self._server = Server(slots=service.slots, processors=processors(), devices=len(service.workers.all))
        self.bodies = 0
        """Request bodies that are arriving now."""
        self._bodies_of: Counter[Tenant] = Counter()
        self.draining = False
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="hapi-parse")
        self._workers = ThreadPoolExecutor(service.slots, thread_name_prefix="hapi-request")
        self._documents = ThreadPoolExecutor(DOCUMENT_THREADS, thread_name_prefix="hapi-document")
        self.web = web.Application(client_max_size=messages.MAX_REQUEST_BYTES, middlewares=[self._guard])
        self._routes()
        self._gauges()

    def close(self) -> None:
        """Stop the worker threads."""
        self._parser.shutdown(wait=False, cancel_futures=True)
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
        workers = service.workers.all
        for name, text, read in (
            ("hapi_model_cache_bytes", "Bytes of resident layers.", lambda w: w.cache.resident_bytes),
            ("hapi_model_cache_hits", "Requests served by resident layers.", lambda w: w.cache.hits),
            ("hapi_model_cache_misses", "Times that layers were loaded.", lambda w: w.cache.misses),
            ("hapi_device_memory_bytes", "Bytes of the budget in use.", lambda w: w.memory.used_bytes),
            ("hapi_device_memory_budget_bytes", "Budget of bytes.", lambda w: w.memory.budget),
            ("hapi_device_memory_waiting", "Requests that wait for memory.", lambda w: w.memory.waiting),
            ("hapi_out_of_memory_caught", "Passes halved.", lambda w: w.device.out_of_memory_caught),
            ("hapi_merged_passes", "Passes that ran together with others.", lambda w: w.device.merged),
        ):
            gauge(name, text, lambda read=read: sum(map(read, workers)))  # type: ignore[misc]
        gauge(
            "hapi_busy_seconds",
            "Seconds with at least one request at work.",
            lambda: service.account.busy.seconds,
        )
        gauge(
            "hapi_decoders_replaced",
            "Decoding processes that died and were replaced.",
            lambda: service.decoders.replaced,
        )
        self._tenant_metrics()

    def _tenant_metrics(self) -> None:
        everybody, gauge = dict.fromkeys(self.tenants.all), self.metrics.tenant_gauge
        gauge(
            "hapi_tenant_queued",
            "Requests that wait for a slot.",
            everybody,
            lambda t: self.admission.of(t)[0],
        )
        gauge(
            "hapi_tenant_running",
            "Requests that hold a slot.",
            everybody,
            lambda t: self.admission.of(t)[1],
        )
        gauge(
            "hapi_tenant_expected_wait_seconds",
            "What the tenant's next request has to expect in the queue.",
            everybody,
            self.admission.expected_wait,
        )
        for tenant in everybody:  # so that a rate can be taken from the first one on
            for reason in REASONS:
                self.metrics.shed.labels(tenant.name, reason)
            for counter in (self.metrics.served, self.metrics.cost, self.metrics.sent):
                counter.labels(tenant.name)

    def _shed(self, tenant: Tenant, reason: str) -> None:
        self.metrics.shed.labels(tenant.name, reason).inc()

    # -- middleware --------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Authorise, time, log, count, and turn every error into problem details."""
        started = time.monotonic()
        request_id = request.headers.get(messages.REQUEST_ID_HEADER, "")[:64]
        request[REQUEST_ID] = request_id if request_id.isalnum() else "-"
        route = request.match_info.route.resource
        name = route.canonical if route is not None else "other"
        status = GONE
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            status = request.get(STATUS, status)
            if status == GONE:
                self.metrics.cancelled.inc()
            self.metrics.requests.labels(name, str(status)).inc()
            level = logging.DEBUG if name in (messages.HEALTH_PATH, messages.READY_PATH) else logging.INFO
            extra = {
                "request_id": request[REQUEST_ID],
                "method": request.method,
                "path": request.path[:200],
                "status": status,
                "seconds": round(time.monotonic() - started, 4),
                **({"tenant": request[TENANT].name} if TENANT in request else {}),
                **request.get(LOGGED, {}),
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
                log.exception("unexpected error", extra={"request_id": request[REQUEST_ID]})
            response = problem_response(problem)
        if not response.prepared:
            try:
                async with asyncio.timeout(self.service.settings.send_timeout):
                    await response.prepare(request)
                    await response.write_eof()
            except (TimeoutError, ConnectionError):  # nobody reads
                request[STATUS] = GONE
                abort(request)
        return response

    def _authorise(self, request: web.Request) -> None:
        if request.path not in (messages.HEALTH_PATH, messages.READY_PATH):
            request[TENANT] = self.tenants.of(request.headers.get("Authorization", ""))

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
        patience, deadline = self.service.settings.max_request_seconds, _deadline(request)
        async with self.documents.slot(request[TENANT], LEAST_COST, patience, deadline):
            reading = self._documents.submit(self.service.document, request.path)
            return web.json_response(await finished(reading, lambda document: None))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self.draining:
            raise DrainingError("the server is shutting down; ask another one")
        arrived, deadline, tenant = time.monotonic(), _deadline(request), request[TENANT]
        body = await self._body(request)
        reading = self._parser.submit(self.service.request, request.path, body)
        asked = await finished(reading, lambda request: None)
        del body
        settings = self.service.settings
        cancelled = threading.Event()
        started = time.monotonic()
        if deadline is not None:
            deadline -= started - arrived
        try:
            cost = self._costs.expected(asked)
            async with self.admission.slot(tenant, cost, settings.max_request_seconds, deadline) as slot:
                opening = self._workers.submit(
                    self.service.stream, asked, cancelled, slot.waited, slot.expected_wait, tenant
                )
                stream = await finished(opening, FrameStream.close)
                latest = started + settings.max_request_seconds
                pace = Pace(settings.pace(), latest, self.admission.pressed)
                answer = Answer(self._workers, settings.send_timeout, pace, self.metrics.bytes_sent.inc)
                self.admission.sent(tenant, stream.content_length)
                try:
                    return await answer.send(request, stream, cancelled)
                finally:
                    self.admission.sent(tenant, -answer.unsent)
                    self._account(request, asked, stream, answer, slot)
        finally:
            cancelled.set()

    async def _body(self, request: web.Request) -> bytes:
        """The request's body; refused unread when it is too long, or when too many arrive at once."""
        if (request.content_length or 0) > messages.MAX_REQUEST_BYTES:
            raise body_too_large()
        tenant = request[TENANT]
        of_one = MAX_BODIES if len(self.tenants.all) == 1 else MAX_BODIES // 2
        if self.bodies >= MAX_BODIES or self._bodies_of[tenant] >= of_one:
            self._shed(tenant, FULL)
            raise BusyError(f"{self.bodies} requests are arriving; come back in 1 s", retry_after=1.0)
        self.bodies += 1
        self._bodies_of[tenant] += 1
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await request.read()
        finally:
            self.bodies -= 1
            self._bodies_of[tenant] -= 1

    def _account(
        self, request: web.Request, asked: Request, stream: FrameStream, answer: Answer, slot: Slot
    ) -> None:
        stages, held = stream.clock.seconds(), time.monotonic() - slot.began
        used = Used(stages, stream.clock.cpu_seconds(), held)
        slot.cost = used.cost(self._server)
        name = request[TENANT].name
        self.metrics.cost.labels(name).inc(slot.cost)
        self.metrics.sent.labels(name).inc(stream.content_length - answer.unsent)
        if request.get(STATUS) == 200:
            self.metrics.served.labels(name).inc()
            self._costs.seen(asked, used.again().cost(self._server))
        for stage, value in stages.items():
            self.metrics.stage_seconds[stage].inc(value)
        self.metrics.samples.inc(stream.samples)
        self.metrics.seconds.labels(request.path).observe(slot.waited + held)
        request[LOGGED] = {
            "samples": stream.samples,
            "bytes": stream.content_length,
            "stages": {k: round(v, 4) for k, v in stages.items() if v},
        }
        if answer.dropped is not None:
            self.metrics.dropped.labels(answer.dropped.reason).inc()
            request[LOGGED]["dropped"] = str(answer.dropped)


def _deadline(request: web.Request) -> float | None:
    """Seconds after which a request that still waits is not wanted any more."""
    return messages.deadline_of(request.headers.get(messages.DEADLINE_HEADER))
