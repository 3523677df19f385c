"""The server's own memory for reading, decoding and sending, divided among requests.

A CPU's weights, layers, inputs and outputs are in its device's budget
(:mod:`hapi.server.device.memory_budget`), so that each byte counts once; a GPU's inputs and outputs, which
lie in host memory, are in this one.

It has two parts. From the first a request claims, before it reads anything, the memory of its pipeline: a
share for each slot, more if a single sample needs more. The second, the *image room*, holds large images
while they are decoded; their size is known from their headers only. A decoding thread waits only for other
decoding threads, so there is no circle of waiting.

    claim -> waiting, first come first served -> granted -> released
      |          |
      +-- never fits (507), client gone, too late (429)
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hapi.allocator import give_back_freed_memory
from hapi.errors import BadRequestError, BusyError, HostBudgetError, HostMemoryError
from hapi.process.free_memory import host_free_bytes
from hapi.process.memory_errors import is_out_of_memory
from hapi.waiting import Interest, check, paused, when_given_up

SHORT_SECONDS = 1.0
"""Seconds after which a client whose request met a machine without memory is to retry."""
LOOK_SECONDS = 0.25
"""Seconds between two checks whether a waiting request's client is still there."""
LATE_SECONDS = 5.0
"""Seconds after which a request that waited for too long is to retry."""
HOST_SHARE, LEAST_PART = 0.5, 8
"""The default budget: so much of what is free beside devices and caches; one in so many bytes of all that is free, when
they were given nearly all."""
UNKNOWN_BYTES = 1 << 46
"""The budget where the system does not tell what is free: none."""
HOST_KINDS = ("features", "samples", "tensors", "images", "decoders", "shared")
"""Kinds of claims: requests by their kind, images while they are decoded, memory shared with decoding
processes, features shared between requests.
"""
SHARED_PART, SHARED_BYTES = 16, 256 << 20
"""The default for shared features: one in so many bytes of the budget, at most the second."""


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """Bytes that a request asks for: with the smallest pieces, and from where on more is of no use."""

    min_bytes: int
    max_bytes: int


class Ledger:
    """Bytes that are given out first come, first served; thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self._held: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Number of waiting claims."""
        return len(self._line)

    def held(self) -> Mapping[str, int]:
        """Bytes given out, by kind."""
        with self._changed:
            return dict(self._held)

    def take(self, kind: str, nbytes: int, on_wait: Callable[[int], None] = lambda waiting: None) -> None:
        """Wait until ``nbytes`` (at most the budget) are free, and take them; ``on_wait(waiting)`` may raise
        meanwhile.
        """
        ticket = object()
        with paused(), self._changed:
            self._line.append(ticket)
            try:
                while self._line[0] is not ticket or self._held.total() + nbytes > self.budget:
                    self._changed.wait(LOOK_SECONDS)
                    check()
                    on_wait(len(self._line))
                self._held[kind] += nbytes
            finally:
                self._line.remove(ticket)
                self._changed.notify_all()

    def give_back(self, kind: str, nbytes: int) -> None:
        """Return taken bytes."""
        with self._changed:
            self._held[kind] -= nbytes
            self._changed.notify_all()


class ImageRoom:
    """Memory for large images while they are decoded: a :class:`hapi.data.transforms.decode_limits.Room`."""

    def __init__(self, nbytes: int, processes: int = 1) -> None:
        """Make a room of ``nbytes``, one of ``processes`` among which half of the budget was divided."""
        self._ledger = Ledger(nbytes)
        self.processes = processes

    @property
    def nbytes(self) -> int:
        """Size of the room."""
        return self._ledger.budget

    @property
    def held(self) -> int:
        """Bytes that images take now."""
        return sum(self._ledger.held().values())

    def enter(self, nbytes: int, width: int, height: int) -> None:
        """Wait until ``nbytes`` are free for an image; :class:`HostBudgetError` when they never will be."""
        if nbytes > self.nbytes:
            among = f", for each of {self.processes} processes" if self.processes > 1 else ""
            raise HostBudgetError(
                f"an image of {width} x {height} takes {nbytes} bytes to decode, the server has {self.nbytes} for "
                f"that (half of its --host-memory{among}); give it more, or choose split 0, which leaves decoding to "
                "the trainer"
            )
        self._ledger.take("images", nbytes)

    def leave(self, nbytes: int) -> None:
        """Return the bytes of :meth:`enter`."""
        self._ledger.give_back("images", nbytes)


class HostMemory:
    """The ledger of the server's own memory; thread-safe."""

    def __init__(
        self,
        budget: int,
        slots: int,
        decoders: int = 0,
        decoder_bytes: int = 0,
        shared_bytes: int = 0,
    ) -> None:
        """Begin with all memory free.

        Args:
            budget: bytes.
            slots: requests at a time.
            decoders: decoding processes.
            decoder_bytes: bytes that each of these always has.
            shared_bytes: bytes for features that requests share.
        """
        self.budget = budget
        self.decoders_bytes = decoders * decoder_bytes
        rooms = max(1, decoders)
        self.images = ImageRoom(budget // 2 // rooms, rooms)
        """Room of this process; with ``decoders`` each of them has one such."""
        self.shared_held: Callable[[], int] = lambda: 0
        """Asked for the bytes that shared features take now."""
        self._reserved = Ledger(max(0, budget - budget // 2 - self.decoders_bytes - shared_bytes))
        self.share = self._reserved.budget // slots
        """Bytes that a request gets if it can use them."""

    @contextmanager
    def reserve(self, kind: str, need: HostNeed, interest: Interest) -> Iterator[int]:
        """Hold bytes for a request of ``kind`` inside the block, between the least and the most of ``need``.

        Raises:
            HostBudgetError: even the least will never be free.
            BusyError: it is not free at the deadline of ``interest``.
            BadRequestError: the client is gone.
        """
        if need.min_bytes > self._reserved.budget:
            raise HostBudgetError(
                f"one sample of this request takes {need.min_bytes} bytes of the server's memory, the server "
                f"has {self._reserved.budget} for requests (half of its --host-memory); give it more, choose split 0 "
                "or a smaller input"
            )
        nbytes = max(need.min_bytes, min(need.max_bytes, self.share))

        def check_wanted(waiting: int) -> None:
            """Check that the request is still wanted."""
            if interest.is_set():
                raise BadRequestError("the client went away")
            if time.monotonic() >= interest.deadline:
                raise BusyError(
                    f"{waiting} requests wait for the server's memory, and this one did for too long "
                    "(--max-request-seconds of hapi-server); come back later, or ask another server",
                    retry_after=LATE_SECONDS,
                )

        self._reserved.take(kind, nbytes, check_wanted)
        given_back = threading.Lock()

        def give_back() -> None:
            """Return the claim's bytes."""
            if given_back.acquire(blocking=False):  # once
                self._reserved.give_back(kind, nbytes)

        try:
            with when_given_up(give_back):  # its thread may come back only much later
                yield nbytes
        finally:
            give_back()

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        return self._reserved.waiting

    def status(self) -> dict[str, Any]:
        """Return the figures for ``/v1/status``: bytes of the budget (None: none), taken bytes by kind,
        waiting requests.
        """
        budget = self.budget if self.budget < UNKNOWN_BYTES else None
        return {"budget_bytes": budget, "reserved": self.kinds(), "waiting": self.waiting}

    def kinds(self) -> dict[str, int]:
        """Bytes of the budget that are taken, by :data:`HOST_KINDS`."""
        taken = {
            **self._reserved.held(),
            "images": self.images.held,
            "decoders": self.decoders_bytes,
            "shared": self.shared_held(),
        }
        return {kind: taken.get(kind, 0) for kind in HOST_KINDS}


def out_of_memory() -> HostMemoryError:
    """Return the error for a request that found no memory on the server's machine."""
    return HostMemoryError(
        "the server's machine is out of memory; ask again or another server, and have its operator lower "
        "--host-memory, --device-memory or --max-running",
        retry_after=SHORT_SECONDS,
    )


def host_budget(given: int | None, taken: int) -> int:
    """Return the bytes of the budget: ``given``, or :data:`HOST_SHARE` of the free memory beside ``taken``
    bytes.
    """
    if given is not None:
        return given
    free = host_free_bytes()
    return UNKNOWN_BYTES if free is None else max(int((free - taken) * HOST_SHARE), free // LEAST_PART)


def shared_bytes(given: int | None, budget: int) -> int:
    """Return the bytes for features that requests share: ``given``, or a small part of ``budget``."""
    return min(SHARED_BYTES, budget // SHARED_PART) if given is None else given


@contextmanager
def halving(halve: Callable[[], object]) -> Iterator[None]:
    """Call ``halve()`` for a block that runs out of memory, and ask its client to retry.

    Raises :class:`HostMemoryError` then; the next request of its kind takes half as much.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        halve()
        give_back_freed_memory()
        raise out_of_memory() from error
