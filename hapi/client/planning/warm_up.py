"""Tells servers which layers a plan is about to ask for, so that they load them meanwhile."""

from __future__ import annotations

import threading
from contextlib import suppress

from hapi.client.loading.job import ExtractionJob
from hapi.client.transport.server_pool import ServerPool, Stopped
from hapi.errors import HapiError
from hapi.wire.transport.base import Transport
from hapi.wire.warm_up import WARM_PATH, WarmUpRequest


class WarmUp:
    """Names each split once, to all servers. Nothing depends on their answers: some are busy, older ones do not know
    the request. Thread-safe.
    """

    def __init__(self, servers: ServerPool) -> None:
        self._servers = servers
        self._lock = threading.Lock()
        self._named: set[int] = set()

    def name(self, job: ExtractionJob) -> threading.Thread | None:
        """Name the layers of ``job``, unless they were before; return the thread that does it."""
        if job.model is None:
            return None
        with self._lock:
            if job.split in self._named:
                return None
            self._named.add(job.split)
        request = WarmUpRequest(
            model=job.model, split=job.split, split_name=job.split_name, precision=job.precision
        )
        thread = threading.Thread(target=self._send, args=(request,), name="hapi-warm-up", daemon=True)
        thread.start()
        return thread

    def _send(self, request: WarmUpRequest) -> None:
        def attempt(transport: Transport) -> None:
            transport.call("POST", WARM_PATH, request.to_json())

        for url in self._servers.urls:
            with suppress(HapiError, Stopped):
                self._servers.run(attempt, only=url, once=True)
