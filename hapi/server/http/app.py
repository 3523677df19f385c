"""The HTTP application: routes, authorisation, problem details, streaming. No computing on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from hapi.errors import DrainingError, HapiError, StuckError
from hapi.process.processors import processor_count
from hapi.process.telemetry import Telemetry
from hapi.server.context import Progress, RequestContext
from hapi.server.frame_stream import FrameStream
from hapi.server.http import openapi
from hapi.server.http.bodies import Bodies
from hapi.server.http.connections import Connections
from hapi.server.http.disclosure import Disclosure
from hapi.server.http.keys import (
    AUDITED,
    BEGAN,
    GONE,
    HEALTH,
    LOGGED,
    OPEN,
    PROBLEM,
    QUIET,
    REQUEST_ID,
    SENT_AWAY,
    STATUS,
    TENANT,
    deadline_of,
    facts_of,
    named_in,
    request_id_of,
    stall_of,
)
from hapi.server.http.metrics import Metrics
from hapi.server.http.overview import Looks, Overview
from hapi.server.http.page import page, page_headers
from hapi.server.http.problems import as_hapi_error, problem_response
from hapi.server.http.response_stream import Answer, AnswerHead, abort, finished
from hapi.server.http.same_origin import check_origin
from hapi.server.http.slow_reader import SlowReaderGuard
from hapi.server.http.web_server import WebRunner, connection_of
from hapi.server.lifecycle.descriptors import connection_limits, descriptor_limit
from hapi.server.lifecycle.log_limits import REQUEST
from hapi.server.lifecycle.progress_watch import subject_of
from hapi.server.packs.route import PackRoute
from hapi.server.scheduling.admission import Admission, Slot
from hapi.server.scheduling.costs import Costs, Request, Server, Used
from hapi.server.scheduling.fair_queue import LEAST_COST, Tenant
from hapi.server.scrub import Scrub
from hapi.server.service import DOCUMENT_PATHS, Service
from hapi.server.status import Board, RunningRequest
from hapi.server.tenants.accounting import Account, Accounts
from hapi.server.tenants.by_token import Tenants
from hapi.waiting import Interest
from hapi.wire import messages
from hapi.wire.frames import MEDIA_TYPE, VERSION_HEADER, agreed_version, error_frame
from hapi.wire.warm_up import WARM_PATH, WarmUpRequest

T = TypeVar("T")

log = logging.getLogger("hapi.server")

DOCUMENT_THREADS = 2
"""Descriptions read from the store at a time."""


class Application:
    """The aiohttp application of one :class:`Service`.

    A ``lame_duck`` tells balancers to look elsewhere, and still takes work; ``draining`` refuses it with 503 while
    what runs is finished.
    """

    def __init__(
        self,
        service: Service,
        tenants: Tenants | None = None,
        accounts: Accounts | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """Serve ``service`` to ``tenants``; None: to everybody, without a token. The others are told of all use."""
        self.service, settings, self._telemetry = service, service.settings, telemetry
        self.tenants = tenants or Tenants()
        self.board = Board(self.tenants.all, accounts)
        self.admission = Admission(service.slots, settings.max_queued, self._shed)
        self.connections = Connections(connection_limits(settings, service.slots, descriptor_limit()))
        self.disclosure = Disclosure(service.store.url)
        self.scrub = Scrub(service.store, settings.scrub_rate, busy=lambda: bool(self.admission.queued))
        self.overview = Overview(service, self.admission, self.board, self.connections, self.scrub)
        self.metrics = Metrics(self.overview.metrics)
        self.documents = Admission(DOCUMENT_THREADS, settings.max_queued, self._shed)
        self._costs = Costs()
        self._server = Server(
            slots=service.slots, processors=processor_count(), devices=len(service.workers.all)
        )
        self.lame_duck = self.draining = False
        watch = service.watch
        self._parser = watch.threads(1, "hapi-parse")
        self.bodies = Bodies(self._parser, self._shed)
        self._workers = watch.threads(service.slots + 1, "hapi-request", of_slots=True)
        self._documents = watch.threads(DOCUMENT_THREADS, "hapi-document")
        self.status_threads = watch.threads(1, "hapi-look")
        """For looks at the server, and for tidying up."""
        self.looks = Looks(self.status_threads, self._shed)
        self.web = web.Application(client_max_size=messages.MAX_REQUEST_BYTES, middlewares=[self._guard])
        for device in service.devices():
            self.metrics.cos_batch.labels(device.name)
        self.packs = PackRoute(service, self._shed, self.board.sent_pack, self.metrics)
        self._routes()

    def change_tenants(self, tenants: Tenants) -> None:
        """Serve ``tenants`` from now on; requests that run, and those that wait, go on as they are."""
        self.tenants = tenants
        self.board.change_tenants(tenants.all)
        shared = (self.admission, self.documents, self.bodies.parsing, self.looks.admission)
        for admission in (*shared, *self.packs.admissions):
            admission.change_tenants(tenants.all)

    @property
    def state(self) -> str:
        """State of the server in a word."""
        return "draining" if self.draining else "lame-duck" if self.lame_duck else "serving"

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return self.admission.running + self.packs.running

    def runner(self) -> WebRunner:
        """Return aiohttp's runner of it."""
        return WebRunner(self.web, self.connections)

    def close(self) -> None:
        """Stop the worker threads."""
        self.scrub.stop()
        for pool in (self._parser, self._workers, self._documents, self.status_threads, self.packs):
            pool.close()

    def _routes(self) -> None:
        add = self.web.router
        add.add_get(messages.VERSION_PATH, self._version)
        add.add_get(messages.OPENAPI_PATH, self._openapi)
        add.add_get(messages.HEALTH_PATH, self._health)
        add.add_get(messages.READY_PATH, self._ready)
        add.add_get(messages.METRICS_PATH, self._metrics)
        add.add_get(messages.STATUS_PATH, self._status)
        add.add_get(messages.PAGE_PATH, self._page)
        for path in DOCUMENT_PATHS:
            add.add_get(path, self._document)
        add.add_get(f"{messages.PACKS_PATH}/{{pack}}", self._pack)
        for path in (messages.EXTRACT_PATH, messages.SAMPLES_PATH, messages.TENSORS_PATH):
            add.add_post(path, self._stream)
        add.add_post(WARM_PATH, self._warm)

    def _shed(self, tenant: Tenant, reason: str) -> None:
        self.board.shed(tenant, reason)

    def _chosen(self, device: str, batch: int) -> None:
        self.metrics.cos_batch.labels(device).observe(batch)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Authorise, time, log, count, and turn every error into problem details."""
        started = time.monotonic()
        request[REQUEST_ID] = request_id_of(request)
        route = request.match_info.route.resource
        name = route.canonical if route is not None else "other"
        status = GONE
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            status = request.get(STATUS, status)
            self.metrics.cancelled.inc(status == GONE)
            self.metrics.requests.labels(name, str(status)).inc()
            quiet = name in QUIET and status < 400
            facts = self._log(request, logging.DEBUG if quiet else logging.INFO, status, started)
            if self._telemetry is not None and not quiet:
                self._telemetry.answered(name, time.monotonic() - started, facts, request.get(BEGAN, {}))

    def _log(self, request: web.Request, level: int, status: int, started: float) -> dict[str, Any]:
        """Log one line for each request, with the id that the client's errors name; return its fields."""
        extra = facts_of(request, status, time.monotonic() - started)
        problem = request.get(PROBLEM)
        if problem is not None:
            extra |= {"error": problem.slug, "detail": str(problem)}
            if isinstance(problem, AUDITED):
                extra |= {"audit": problem.slug, "remote": request.remote}
            self.metrics.errors.labels(problem.slug).inc()
            if TENANT in request:  # those of health checks, and without a token, would push out all others
                disclosed, tenant = self._disclosed(request, problem), request[TENANT].name
                self.board.failed(disclosed, request_id=request[REQUEST_ID], tenant=tenant, path=request.path)
        log.log(level, REQUEST, extra=extra)
        return extra

    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """The handler's answer, or the problem that it met, delivered within the send timeout."""
        try:
            self._authorise(request)
            response: web.StreamResponse = await handler(request)
        except Exception as error:
            problem = request[PROBLEM] = as_hapi_error(error)
            if type(problem) is HapiError:
                log.exception("unexpected error", extra={"request_id": request[REQUEST_ID]})
            response = problem_response(self._disclosed(request, problem))
            if isinstance(problem, SENT_AWAY):
                response.force_close()
        connection = connection_of(request)
        if connection is not None and connection.over:
            response.force_close()
        if not response.prepared:
            response.headers[messages.REQUEST_ID_HEADER] = request[REQUEST_ID]
            try:
                async with asyncio.timeout(self.service.settings.send_timeout):
                    await response.prepare(request)
                    await response.write_eof()
            except (TimeoutError, ConnectionError):  # nobody reads
                request[STATUS] = GONE
                abort(request)
        return response

    def _disclosed(self, request: web.Request, problem: HapiError) -> HapiError:
        """The form of ``problem`` for the tenant that asks."""
        whole = TENANT not in request or request[TENANT].access.whole
        return self.disclosure.of(problem, everything=self.service.settings.tell_store and whole)

    def _authorise(self, request: web.Request) -> None:
        """Find the tenant that asks, and refuse who may not."""
        path, connection = request.path, connection_of(request)
        if path in HEALTH:
            return
        if connection is not None:
            connection.check()
        if self.tenants.open:
            check_origin(request.headers.get("Host"), request.headers.get("Origin"))
        if path not in OPEN:
            request[TENANT] = self.tenants.of(request.headers.get("Authorization", ""))
            if connection is not None:
                self.connections.authorise(connection)

    # -- handlers ----------------------------------------------------------------------------------------

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response(self.service.version(self.admission.lasting_wait(request[TENANT])))

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=openapi.document(), content_type=openapi.JSON_MEDIA_TYPE)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _ready(self, request: web.Request) -> web.Response:
        if self.draining or self.lame_duck:
            raise DrainingError("the server is shutting down")
        if not self.service.workers.usable:
            raise DrainingError("no device of the server works any more")
        if reason := self.service.watch.stuck():
            raise StuckError(f"stuck: {reason}; ask another server")
        return web.json_response({"status": "ready"})

    async def _metrics(self, request: web.Request) -> web.Response:
        tenant = request[TENANT]
        text = await self.looks.see(tenant, tenant.access.metrics, self.metrics.render)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _status(self, request: web.Request) -> web.Response:
        tenant = request[TENANT]
        read = partial(self.overview.document, self.state)
        document = await self.looks.see(tenant, tenant.access.status, read)
        return web.json_response(document, headers={"Cache-Control": "no-store"})

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(body=page(), headers=page_headers())

    async def _document(self, request: web.Request) -> web.Response:
        max_wait, deadline = self.service.settings.max_request_seconds, deadline_of(request)
        tenant = request[TENANT]
        # That others' reads hang must not tell a tenant that what it may not see is there.
        subject = f"GET {request.path[:200]}" + ("" if tenant.access.whole else f" of {tenant.name}")
        self.service.watch.check(subject)
        async with self.documents.slot(tenant, LEAST_COST, max_wait, deadline):
            interest = Interest(subject, time.monotonic())  # two of them that hang would keep out all others
            reading = self._documents.submit_in(interest, self.service.document, request.path, tenant.access)
            return web.json_response(await finished(reading, lambda document: None, interest.set))

    async def _pack(self, request: web.Request) -> web.StreamResponse:
        self._check_taking_work()
        return await self.packs.answer(request)

    def _check_taking_work(self) -> None:
        if self.draining:
            raise DrainingError("the server is shutting down; ask another one")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self._check_taking_work()
        arrived, deadline, tenant = time.monotonic(), deadline_of(request), request[TENANT]
        share = stall_of(request)
        self.admission.check_place(tenant)
        asked = await self._asked(request, self.service.request)
        request[LOGGED] = named_in(asked)
        tenant.access.check(asked)
        settings, job = self.service.settings, str(request[LOGGED].get("job", ""))
        started = time.monotonic()
        subject = subject_of(asked)
        self.service.watch.check(subject)
        interest = Interest(subject, started + settings.max_request_seconds)
        if deadline is not None:
            deadline -= started - arrived
        self.board.stalls.begin(tenant.name, job, share, started)
        try:
            cost = self._costs.expected(asked)
            async with self.admission.slot(tenant, cost, settings.max_request_seconds, deadline) as slot:
                clock = self.service.clock(asked)
                clock.add("queue", slot.waited)
                context = RequestContext(
                    clock=clock,
                    tenant=tenant,
                    interest=interest,
                    progress=Progress(self._chosen, clock.under_way),
                    wire=agreed_version(request.headers.get(VERSION_HEADER)),
                    expected_wait=slot.expected_wait,
                )
                at_work = RunningRequest(
                    request_id=request[REQUEST_ID], asked=asked, context=context, waited=slot.waited
                )
                with self.board.running(at_work):
                    return await self._worked_on(request, asked, context, slot)
        finally:
            interest.set()
            self.board.stalls.end(tenant.name, job, share, time.monotonic())

    async def _worked_on(
        self, request: web.Request, asked: Request, context: RequestContext, slot: Slot
    ) -> web.StreamResponse:
        """The answer of a request that has its slot, sent by its deadline."""
        service, interest, settings = self.service, context.interest, self.service.settings
        opening = self._workers.submit_in(interest, service.stream, asked, context)
        stream = await finished(opening, FrameStream.close, interest.set)

        def pressed() -> bool:
            device = context.progress.device
            return self.admission.pressed() or service.workers.pressed(device) or service.host.waiting > 0

        guard = SlowReaderGuard(settings.pace_limits(), interest.deadline, pressed)
        head = AnswerHead(
            headers={"Content-Type": MEDIA_TYPE, messages.CODE_HEADER: service.code},
            failed=lambda problem: error_frame(self._disclosed(request, problem), context.wire),
        )
        answer = Answer(self._workers, settings.send_timeout, guard, self.metrics.bytes_sent.inc, head)
        self.admission.sent(context.tenant, stream.max_bytes)
        try:
            return await answer.send(request, stream)
        finally:
            self.admission.sent(context.tenant, answer.sent - stream.max_bytes)
            self._account(request, asked, stream, answer, slot)

    async def _warm(self, request: web.Request) -> web.Response:
        self._check_taking_work()
        ahead = await self._asked(request, lambda _, body: WarmUpRequest.from_json(messages.parse_body(body)))
        request[LOGGED] = named_in(ahead)
        request[TENANT].access.check(ahead)
        state = self.service.warm_ups.begin(ahead, busy=bool(self.admission.queued))
        return web.json_response({"state": state})

    async def _asked(self, request: web.Request, parse: Callable[[str, bytes], T]) -> T:
        """Request in the body; refused unread when it is too long, or when there are too many at once."""
        return await self.bodies.read(request, parse, alone=len(self.tenants.all) == 1)

    def _account(
        self, request: web.Request, asked: Request, stream: FrameStream, answer: Answer, slot: Slot
    ) -> None:
        clock = stream.context.clock
        stages, held = clock.seconds(), time.monotonic() - slot.began
        request[BEGAN] = clock.began
        used = Used(stages, clock.cpu_seconds(), held)
        slot.cost = used.cost(self._server)
        served = request.get(STATUS) == 200
        use = Account(served=served, samples=stream.samples, sent_bytes=answer.sent, cost_seconds=slot.cost)
        self.board.used(request[TENANT], use)
        if served:
            self._costs.seen(asked, used.without_loading().cost(self._server))
        self.metrics.samples.inc(stream.samples)
        self.metrics.seconds.labels(request.path).observe(slot.waited + held)
        request[LOGGED] |= {
            "samples": stream.samples,
            "bytes": answer.sent if stream.content_length is None else stream.content_length,
            "stages": {k: round(v, 4) for k, v in stages.items() if v},
        }
        if answer.dropped is not None:
            self.metrics.dropped.labels(answer.dropped.reason).inc()
            request[LOGGED]["dropped"] = str(answer.dropped)
