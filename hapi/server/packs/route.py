"""``GET /v1/packs/ID``: whole packs and ranges of them, with the access rules, limits and counts of other answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from aiohttp import web

from hapi.errors import TooLargeError
from hapi.repository.packs.place import check_pack
from hapi.server.context import RequestContext
from hapi.server.frame_stream import FrameStream
from hapi.server.http.keys import LOGGED, REQUEST_ID, TENANT, deadline_of
from hapi.server.http.metrics import Metrics
from hapi.server.http.openapi import BYTES_MEDIA_TYPE
from hapi.server.http.response_stream import Answer, AnswerHead, finished
from hapi.server.http.slow_reader import SlowReaderGuard
from hapi.server.packs.byte_ranges import wanted_range
from hapi.server.packs.streams import STREAMS, PackStreams
from hapi.server.scheduling.admission import Admission
from hapi.server.scheduling.fair_queue import LEAST_COST, Tenant
from hapi.server.service import Service
from hapi.waiting import Interest
from hapi.wire import messages

IMMUTABLE = "private, max-age=31536000, immutable"
"""A pack's id is the digest of what is in it: what was read once need not be asked for again."""


class PackRoute:
    """Answers requests for packs. They take no slots of other requests."""

    def __init__(self, service: Service, shed: Callable[[Tenant, str], None], metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self.admission = Admission(STREAMS, service.settings.max_queued, shed)
        self._workers = service.watch.threads(STREAMS + 1, "hapi-pack", of_slots=True)

    def close(self) -> None:
        """Stop the threads."""
        self._workers.close()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a GET or HEAD of a pack."""
        pack = check_pack(request.match_info["pack"])
        settings, tenant = self._service.settings, request[TENANT]
        subject = f"pack {pack}"
        self._service.watch.check(subject)
        interest = Interest(subject, time.monotonic() + settings.max_request_seconds)
        deadline = deadline_of(request)
        try:
            async with self.admission.slot(
                tenant, LEAST_COST, settings.max_request_seconds, deadline
            ) as slot:
                looking = self._workers.submit_in(interest, self._packs.size, pack)
                size = await finished(looking, lambda size: None, interest.set)
                etag = f'"{pack}"'
                headers = {"Content-Type": BYTES_MEDIA_TYPE, "ETag": etag, "Cache-Control": IMMUTABLE}
                headers["Accept-Ranges"] = "bytes"
                if request.headers.get("If-None-Match") == etag:
                    return web.Response(status=304, headers=headers)
                if request.method == "HEAD":
                    response = web.StreamResponse(headers=headers)
                    response.content_length = size
                    return response
                asked = request.headers.get("Range")
                if request.headers.get("If-Range", etag) != etag:
                    asked = None
                wanted = wanted_range(asked, size)
                context = RequestContext(
                    clock=self._service.account.clock(""), tenant=tenant, interest=interest
                )
                context.clock.add("queue", slot.waited)
                return await self._send(request, pack, wanted, size, headers, context)
        finally:
            interest.set()

    @property
    def _packs(self) -> PackStreams:
        return self._service.packs

    async def _send(
        self,
        request: web.Request,
        pack: str,
        wanted: tuple[int, int] | None,
        size: int,
        headers: Mapping[str, str],
        context: RequestContext,
    ) -> web.StreamResponse:
        """Send the wanted bytes; None: all."""
        start, stop = wanted or (0, size)
        settings = self._service.settings
        if stop - start > settings.max_response_bytes:
            raise TooLargeError(
                f"the answer would be {stop - start} bytes, at most {settings.max_response_bytes} "
                "(--max-response-bytes of hapi-server); ask for ranges"
            )
        transport = request.transport
        stream = await finished(
            self._workers.submit_in(
                context.interest,
                lambda: self._packs.stream(
                    pack,
                    start,
                    stop,
                    context,
                    peer=messages.PEER_HEADER in request.headers,
                    plain=transport is not None and transport.get_extra_info("sslcontext") is None,
                ),
            ),
            FrameStream.close,
            context.interest.set,
        )
        ranged = {} if wanted is None else {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
        answer = Answer(
            self._workers,
            settings.send_timeout,
            SlowReaderGuard(settings.pace_limits(), context.interest.deadline, self.admission.pressed),
            self._metrics.bytes_sent.inc,
            AnswerHead(status=200 if wanted is None else 206, headers={**headers, **ranged}),
        )
        self.admission.sent(context.tenant, stop - start)
        began = time.monotonic()
        try:
            return await answer.send(request, stream)
        finally:
            self.admission.sent(context.tenant, answer.sent - (stop - start))
            self._metrics.seconds.labels(messages.PACKS_PATH).observe(time.monotonic() - began)
            request[LOGGED] = {"bytes": answer.sent, "request_id": request[REQUEST_ID]}
            if answer.dropped is not None:
                self._metrics.dropped.labels(answer.dropped.reason).inc()
                request[LOGGED]["dropped"] = str(answer.dropped)
