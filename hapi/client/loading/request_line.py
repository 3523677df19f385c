"""The line of requests that wait for their turn, in the order of their batches, at the pace of the link."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hapi.client.loading.pacing import RequestPacer
from hapi.client.loading.receiver import RequestSlice
from hapi.client.transport.server_pool import Stopped

_SAMPLE_BYTES, _ANSWER_BYTES = 16, 2048
"""Approximate bytes of an answer beside its samples' own and their labels: ids and offsets; frames' headers and the
report. Errors are corrected when the answer has come.
"""


class RequestLine:
    """Lets requests go out one after the other; from any thread."""

    def __init__(
        self, pacing: RequestPacer | None, changed: threading.Condition, over: Callable[[], bool]
    ) -> None:
        """Wait on ``changed``, whose lock guards everything here, until ``over()``; without ``pacing`` nobody waits."""
        self._pacing, self._changed, self._over = pacing, changed, over
        self._waiting: list[RequestSlice] = []

    def await_turn(self, part: RequestSlice) -> None:
        """Return when the request for ``part`` should go out; raise :class:`Stopped` when none should any more."""
        if self._pacing is None:
            return
        job = part.batch.job
        own = job.sample_bytes() if job.split else job.mean_stored_bytes
        each = own + _SAMPLE_BYTES + job.labels.nbytes
        with self._changed:
            self._waiting.append(part)
            try:
                while True:
                    if self._over():
                        raise Stopped
                    first = min(self._waiting, key=lambda p: (p.batch.number, p.rows[0])) is part
                    delay = self._pacing.delay(job.split) if first else None
                    if delay == 0:
                        self._pacing.sent(part, len(part.rows) * each + _ANSWER_BYTES)
                        return
                    self._changed.wait(delay)
            finally:
                self._waiting.remove(part)
                self._changed.notify_all()

    def done(self, part: RequestSlice, received: int | None) -> None:
        """Note that the answer for ``part`` has come, of ``received`` bytes; or that it failed (None)."""
        if self._pacing is not None:
            with self._changed:
                self._pacing.done(part, part.batch.job.split, received)
                self._changed.notify_all()

    def waits(self, seconds: float) -> None:
        """Note for how long the next request would wait for a slot, by a server's answer."""
        if self._pacing is not None:
            with self._changed:
                self._pacing.waits(seconds)
