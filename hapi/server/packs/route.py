"""``GET /v1/packs/ID``: whole packs and ranges of them, with the access rules, limits and counts of other answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web

from hapi.errors import NotFoundError, TooLargeError
from hapi.process.threads import Threads
from hapi.repository.packs.place import check_pack
from hapi.server.context import RequestContext
from hapi.server.frame_stream import FrameStream
from hapi.server.http.keys import LOGGED, TENANT, deadline_of
from hapi.server.http.metrics import Metrics
from hapi.server.http.openapi import BYTES_MEDIA_TYPE
from hapi.server.http.response_stream import Answer, AnswerHead, finished
from hapi.server.http.slow_reader import SlowReaderGuard
from hapi.server.packs.byte_ranges import named_end, wanted_range
from hapi.server.packs.streams import STREAMS
from hapi.server.scheduling.admission import Admission
from hapi.server.scheduling.fair_queue import LEAST_COST, Tenant
from hapi.server.service import Service
from hapi.server.settings import ServiceSettings
from hapi.waiting import Interest
from hapi.wire import messages

IMMUTABLE = "private, max-age=31536000, immutable"
"""A pack's id is the digest of what is in it: what was read once need not be asked for again."""


class PackLane(NamedTuple):
    """Slots and threads of clients, or of other servers."""

    admission: Admission
    workers: Threads


class PackRoute:
    """Answers requests for packs. They take no slots of other requests."""

    def __init__(
        self,
        service: Service,
        shed: Callable[[Tenant, str], None],
        sent: Callable[[Tenant, int], None],
        metrics: Metrics,
    ) -> None:
        """Answer for ``service``; the others are told of requests sent away, and of bytes sent to tenants."""
        self._service, self._sent = service, sent
        self._metrics = metrics
        self._lanes = {
            peer: PackLane(
                Admission(STREAMS, service.settings.max_queued, shed),
                service.watch.threads(STREAMS + 1, name, of_slots=True),
            )
            for peer, name in ((False, "hapi-pack"), (True, "hapi-peer"))
        }

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return sum(lane.admission.running for lane in self._lanes.values())

    @property
    def admissions(self) -> list[Admission]:
        """Admissions of its lanes."""
        return [lane.admission for lane in self._lanes.values()]

    def close(self) -> None:
        """Stop the threads."""
        for lane in self._lanes.values():
            lane.workers.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a GET or HEAD of a pack."""
        pack = check_pack(request.match_info["pack"])
        if "*" not in request[TENANT].access.models:  # whose model it is of takes reading all of them
            raise NotFoundError(f"there is no pack {pack} here")
        longest, tenant, deadline = self._settings.max_request_seconds, request[TENANT], deadline_of(request)
        subject = f"pack {pack}"
        self._service.watch.check(subject)
        interest = Interest(subject, time.monotonic() + longest)
        lane, needed = self._lanes[_is_peer(request)], named_end(request.headers.get("Range"))
        try:
            async with lane.admission.slot(tenant, LEAST_COST, longest, deadline) as slot:
                looking = lane.workers.submit_in(interest, self._service.packs.size, pack, needed)
                size = await finished(looking, lambda size: None, interest.set)
                headers = _headers(pack)
                if request.headers.get("If-None-Match") == headers["ETag"]:
                    return web.Response(status=304, headers=headers)
                if request.method == "HEAD":
                    response = web.StreamResponse(headers=headers)
                    response.content_length = size
                    return response
                clock = self._service.account.clock("")
                clock.add("queue", slot.waited)
                context = RequestContext(clock=clock, tenant=tenant, interest=interest)
                return await self._send(request, lane, pack, size, context)
        finally:
            interest.set()

    @property
    def _settings(self) -> ServiceSettings:
        return self._service.settings

    async def _send(
        self, request: web.Request, lane: PackLane, pack: str, size: int, context: RequestContext
    ) -> web.StreamResponse:
        """Send what a GET asks for."""
        headers = _headers(pack)
        fresh = request.headers.get("If-Range", headers["ETag"]) == headers["ETag"]
        wanted = wanted_range(request.headers.get("Range") if fresh else None, size)
        start, stop = wanted or (0, size)
        self._check_length(stop - start)
        opening = lane.workers.submit_in(
            context.interest,
            lambda: self._service.packs.stream(
                pack, start, stop, context, peer=_is_peer(request), plain=_is_plain(request)
            ),
        )
        stream = await finished(opening, FrameStream.close, context.interest.set)
        if wanted is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        answer = Answer(
            lane.workers,
            self._settings.send_timeout,
            SlowReaderGuard(self._settings.pace_limits(), context.interest.deadline, lane.admission.pressed),
            self._metrics.bytes_sent.inc,
            AnswerHead(status=200 if wanted is None else 206, headers=headers),
        )
        lane.admission.sent(context.tenant, stop - start)
        began = time.monotonic()
        try:
            return await answer.send(request, stream)
        finally:
            lane.admission.sent(context.tenant, answer.sent - (stop - start))
            self._metrics.seconds.labels(messages.PACKS_PATH).observe(time.monotonic() - began)
            request[LOGGED] = {"bytes": answer.sent}
            self._sent(context.tenant, answer.sent)
            if answer.dropped is not None:
                self._metrics.dropped.labels(answer.dropped.reason).inc()
                request[LOGGED]["dropped"] = str(answer.dropped)

    def _check_length(self, nbytes: int) -> None:
        if nbytes > self._settings.max_response_bytes:
            raise TooLargeError(
                f"the answer would be {nbytes} bytes, at most {self._settings.max_response_bytes} "
                "(--max-response-bytes of hapi-server); ask for ranges"
            )


def _headers(pack: str) -> dict[str, str]:
    return {
        "Content-Type": BYTES_MEDIA_TYPE,
        "ETag": f'"{pack}"',
        "Cache-Control": IMMUTABLE,
        "Accept-Ranges": "bytes",
    }


def _is_peer(request: web.Request) -> bool:
    """Return whether another server asks."""
    return messages.PEER_HEADER in request.headers


def _is_plain(request: web.Request) -> bool:
    """Return whether the connection is not encrypted."""
    return request.transport is not None and request.transport.get_extra_info("sslcontext") is None
