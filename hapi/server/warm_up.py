"""Layers loaded ahead: a client names the next split of its plan before it asks for features there."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from hapi.errors import HapiError
from hapi.process.threads import Threads
from hapi.server.device.memory_budget import MemoryRequest
from hapi.server.device.memory_format import BATCH
from hapi.server.device.prefix_loader import prefix_key
from hapi.server.device.worker import Workers
from hapi.waiting import Interest
from hapi.wire.warm_up import WarmUpRequest, WarmUpState

log = logging.getLogger("hapi.server")


class WarmUps:
    """Loads layers into the devices' model caches, one request's at a time; thread-safe.

    The layers take memory from the device's budget as those of a request do, but do not wait for it. They stay as long
    as those of an idle request: until others need the room.
    """

    def __init__(self, workers: Workers, threads: Threads, *, keeps: bool) -> None:
        """Load for ``workers`` in ``threads``; nothing unless the server ``keeps`` layers between requests."""
        self._workers, self._threads, self._keeps = workers, threads, keeps
        self._loading = threading.Lock()

    def close(self) -> None:
        """Stop the thread."""
        self._threads.close()

    def begin(self, request: WarmUpRequest, *, busy: bool) -> WarmUpState:
        """Begin to load the layers that ``request`` names, and return at once; not if the server is ``busy``."""
        if not self._keeps or busy or not self._loading.acquire(blocking=False):
            return "busy"
        interest = Interest(f"layers 1 to {request.split} of {request.model.name}", time.monotonic())
        try:
            self._threads.submit_in(interest, self._load, request, interest)
        except BaseException:
            self._loading.release()
            raise
        return "loading"

    def _load(self, request: WarmUpRequest, interest: Interest) -> None:
        began = time.monotonic()
        try:
            with suppress(HapiError):  # it is met again, and told, when features are asked for
                self._place(request, interest)
                extra = {"model": request.model.name, "layers": request.split}
                log.info(
                    "layers loaded ahead", extra={**extra, "seconds": round(time.monotonic() - began, 4)}
                )
        finally:
            self._loading.release()

    def _place(self, request: WarmUpRequest, interest: Interest) -> None:
        sizes = self._workers.sizing.of(request)
        weights = sizes.weights
        with self._workers.one(weights[0].key) as worker:
            wanted = MemoryRequest(
                key=(f"ahead {weights[0].key}", request.split, request.model.input_shape),
                samples=BATCH,
                forward=sizes.forward,
                weights=weights,
                smallest=1,
                largest=BATCH,
            )
            with worker.memory.reserve(wanted, interest) as reservation:
                key, batch = prefix_key(request), reservation.batch
                with worker.cache.prefix(key, lambda: worker.prefixes.load(request, batch)):
                    worker.memory.loaded(reservation)
