"""Samples that one request computes, for itself and for others that wait for the same ones.

    loading -> loaded -> begun -> done
       |          |        |
       +----------+--------+--> failed: whoever waits computes for itself

The forward pass of loaded samples is begun by whoever needs it first. So a request whose own reader is slow, and which
is busy with sending, holds up nobody. A pass waits for the device alone, and a claim's loading for the store and the
decoders; neither waits for another claim or for reserved memory, so there is no circle of waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from hapi.arrays import Bytes, IntArray
from hapi.errors import BadRequestError, HapiError
from hapi.waiting import LOOK_SECONDS, Interest, check, paused

PATIENCE_SECONDS = 30.0
"""Seconds without a step of the request that loads samples after which those that wait compute them for themselves."""


class ForwardPass(Protocol):
    """A forward pass that was begun. Any thread may wait for it."""

    def features(self) -> Bytes:
        """Wait for the pass; return its features, uint8 [n, bytes of a sample]. Raises the error of a pass that
        failed."""

    def fitted(self) -> int:
        """Wait for the pass; return the batch, in samples, that fitted the memory. Raises as :meth:`features`."""

    def stage(self) -> str:
        """Return the stage that it is in (:data:`hapi.wire.report.STAGES`); empty when it is over."""

    def leave(self) -> None:
        """Drop the result: a pass that has not begun does not begin, one that has is waited for."""


class RestOfPass:
    """Some samples of another claim's forward pass."""

    def __init__(self, whole: ForwardPass | None, first: int, count: int) -> None:
        """Take ``count`` samples of ``whole`` from ``first`` on; HapiError when there is no such pass any more."""
        if whole is None:
            raise HapiError("the forward pass was given up")
        self._whole, self._rows = whole, slice(first, first + count)

    def features(self) -> Bytes:
        """Wait for the whole pass; return the features of these samples."""
        found: Bytes = self._whole.features()[self._rows]
        return found

    def fitted(self) -> int:
        """Wait for the whole pass; return the batch that fitted the memory."""
        return self._whole.fitted()

    def stage(self) -> str:
        """Return the stage that the whole pass is in."""
        return self._whole.stage()

    def leave(self) -> None:
        """Leave the pass to the claim that it belongs to."""


class PendingBatch:
    """Samples that one request computes. Thread-safe."""

    def __init__(self, ids: IntArray, owner: Interest) -> None:
        """Claim samples ``ids``, int64 [n], for the request of ``owner``."""
        self.ids = ids
        self._owner = owner
        self._changed = threading.Condition()
        self._start: Callable[[], ForwardPass] | None = None
        self._pass: ForwardPass | None = None
        self._failed = False

    def loaded(self, start: Callable[[], ForwardPass]) -> None:
        """Note that the samples' inputs are there; ``start`` begins their forward pass, once at most."""
        with self._changed:
            if not self._failed:
                self._start = start
                self._changed.notify_all()

    def begin(self) -> ForwardPass | None:
        """Begin the pass unless it has begun, and return it; None while samples are loaded, and after a failure."""
        with self._changed:
            start, self._start = self._start, None
            if start is not None:
                try:
                    self._pass = start()
                except BaseException:
                    self._failed = True
                    raise
                finally:
                    self._changed.notify_all()
            return None if self._failed else self._pass

    def fail(self) -> ForwardPass | None:
        """Note that the owner gives up; return the pass that it has to leave, if one has begun."""
        with self._changed:
            self._failed, self._start = True, None
            self._changed.notify_all()
            return self._pass

    def wait(self, interest: Interest) -> Bytes | None:
        """Wait for the features, for a request of ``interest`` that does not own the claim.

        Returns:
            uint8 [n, bytes of a sample], not to be written to; None if they will not come, and are to be computed.

        Raises:
            BadRequestError: its client is gone.
            StoreUnavailableError: its own work was given up.
        """
        with paused():
            begun = self._begun(interest)
            if begun is None:
                return None
            try:
                return begun.features()
            except Exception:  # its owner tells its client; this request may have more luck
                return None

    def _begun(self, interest: Interest) -> ForwardPass | None:
        since = time.monotonic()
        while True:
            try:
                begun = self.begin()
            except Exception:
                return None
            with self._changed:
                if begun is not None or self._failed:
                    return begun
                if self._start is None and self._pass is None:
                    self._changed.wait(LOOK_SECONDS)
            check()
            if interest.is_set():
                raise BadRequestError("the client went away")
            if time.monotonic() - max(since, self._owner.moved_at) > PATIENCE_SECONDS:
                return None
