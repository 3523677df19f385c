"""Bodies of requests: so many at a time, each within a time, parsed one after the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from hapi.errors import BusyError
from hapi.process.threads import Threads
from hapi.server.http.keys import TENANT
from hapi.server.http.problems import body_too_large
from hapi.server.http.response_stream import finished
from hapi.server.http.web_server import EXPECT
from hapi.server.scheduling.admission import FULL, Admission
from hapi.server.scheduling.fair_queue import LEAST_COST, Tenant
from hapi.wire import messages

T = TypeVar("T")

BODY_SECONDS = 30.0
"""Longest time in which a request's body must have arrived."""
MAX_BODIES = 256
"""Most request bodies that may be arriving, or wait to be parsed, at a time (each may be as long as
``MAX_REQUEST_BYTES``); of several tenants one may send half of them."""


class Bodies:
    """Request bodies under way. For the event loop's thread only."""

    def __init__(self, parser: Threads, shed: Callable[[Tenant, str], None]) -> None:
        """Parse in ``parser``; ``shed`` is told the tenant and the reason of each request that is sent away."""
        self._parser, self._shed = parser, shed
        self.count = 0
        """Those that are arriving, or wait to be parsed."""
        self._of: Counter[Tenant] = Counter()
        self.parsing = Admission(1, MAX_BODIES, shed)
        """Turns at the parser, shared out among tenants: one body may take a hundred times as long as another."""

    async def read(self, request: web.Request, parse: Callable[[str, bytes], T], *, alone: bool) -> T:
        """Return the request in the body; refused unread when it is too long, or when there are too many at once.

        Args:
            request: has its tenant.
            parse: makes it of path and body.
            alone: its tenant is the only one.

        Raises:
            TooLargeError: the body is too long.
            BusyError: too many bodies are arriving, or its turn at the parser does not come in time.
        """
        if (request.content_length or 0) > messages.MAX_REQUEST_BYTES:
            raise body_too_large()
        if request.get(EXPECT, "100-continue").lower() != "100-continue":
            raise web.HTTPExpectationFailed
        tenant = request[TENANT]
        if self.count >= MAX_BODIES or self._of[tenant] >= (MAX_BODIES if alone else MAX_BODIES // 2):
            self._shed(tenant, FULL)
            raise BusyError(f"{self.count} requests are arriving; come back in 1 s", retry_after=1.0)
        self.count += 1
        self._of[tenant] += 1
        try:
            if EXPECT in request:
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0  # nothing of the answer itself was sent
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
            # Not in the parser's queue, which would keep the body of who leaves.
            async with self.parsing.slot(tenant, LEAST_COST, BODY_SECONDS):
                reading = self._parser.submit(parse, request.path, body)
                return await finished(reading, lambda asked: None)
        finally:
            self.count -= 1
            self._of[tenant] -= 1
            if not self._of[tenant]:
                del self._of[tenant]
