"""Who may use how much of the server's own memory: what is read, decoded and sent.

A CPU's weights, layers, inputs and outputs are in its device's budget (:mod:`hapi.server.device.memory_budget`), so
that each byte counts once; a GPU's inputs and outputs, which lie in host memory, are in this one. It has two parts.
From the one a request claims, before it reads anything, what its pipeline takes: a share for each slot, more where
a single sample needs more. In the other, the *image room*, large images are while they are decoded; how large is
known from their headers only. Who decodes waits for nothing but others who decode, so there is no circle of
waiting.

    claim -> waiting, first come first served -> granted -> released
               |
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
"""When whoever met a machine without memory is to ask again."""
LOOK_SECONDS = 0.25
"""How often a request that waits looks whether its client is still there."""
LATE_SECONDS = 5.0
"""When a request that waited for too long is to come back."""
HOST_SHARE, LEAST_PART = 0.5, 8
"""The default budget: so much of what is free beside devices and caches; one in so many bytes of all that is free, when
they were given nearly all."""
UNKNOWN_BYTES = 1 << 46
"""The budget where the system does not tell what is free: none."""
HOST_KINDS = ("features", "samples", "tensors", "images", "decoders")
"""What claims are for: requests by their kind, images while they are decoded, memory shared with decoding processes."""


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """Bytes that a request asks for: what it takes with the smallest pieces, and from where on more is of no use."""

    least: int
    most: int


class Ledger:
    """Bytes that are given out first come, first served; thread-safe."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self._held: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._line)

    def held(self) -> Mapping[str, int]:
        """Bytes given out, by kind."""
        with self._changed:
            return dict(self._held)

    def take(self, kind: str, nbytes: int, look: Callable[[int], None] = lambda waiting: None) -> None:
        """Wait until ``nbytes`` (at most the budget) are there; ``look(waiting)`` may raise meanwhile."""
        place = object()
        with paused(), self._changed:
            self._line.append(place)
            try:
                while self._line[0] is not place or self._held.total() + nbytes > self.budget:
                    self._changed.wait(LOOK_SECONDS)
                    check()
                    look(len(self._line))
                self._held[kind] += nbytes
            finally:
                self._line.remove(place)
                self._changed.notify_all()

    def give_back(self, kind: str, nbytes: int) -> None:
        """Return what was taken."""
        with self._changed:
            self._held[kind] -= nbytes
            self._changed.notify_all()


class ImageRoom:
    """Where large images are while they are decoded: a :class:`hapi.data.transforms.decode_limits.Room`."""

    def __init__(self, nbytes: int, processes: int = 1) -> None:
        """``processes``: how many such rooms the half of the budget was shared among."""
        self._ledger = Ledger(nbytes)
        self.processes = processes

    @property
    def nbytes(self) -> int:
        """How large the room is."""
        return self._ledger.budget

    @property
    def held(self) -> int:
        """Bytes that images take now."""
        return sum(self._ledger.held().values())

    def enter(self, nbytes: int, width: int, height: int) -> None:
        """Wait until there are ``nbytes`` for an image; :class:`HostBudgetError` when there never will be."""
        if nbytes > self.nbytes:
            among = f", for each of {self.processes} processes" if self.processes > 1 else ""
            raise HostBudgetError(
                f"an image of {width} x {height} takes {nbytes} bytes to decode, the server has {self.nbytes} for "
                f"that (half of its --host-memory{among}); give it more, or choose split 0, which leaves decoding to "
                "the trainer"
            )
        self._ledger.take("images", nbytes)

    def leave(self, nbytes: int) -> None:
        """Give back what :meth:`enter` waited for."""
        self._ledger.give_back("images", nbytes)


class HostMemory:
    """The ledger of the server's own memory; thread-safe."""

    def __init__(self, budget: int, slots: int, decoders: int = 0, decoder_bytes: int = 0) -> None:
        """Begin with nothing given out.

        Args:
            budget: Bytes.
            slots: Requests at a time.
            decoders: Processes that decode.
            decoder_bytes: What each of these has always.
        """
        self.budget = budget
        self.decoders_bytes = decoders * decoder_bytes
        rooms = max(1, decoders)
        self.images = ImageRoom(budget // 2 // rooms, rooms)
        """Of this process; with ``decoders`` each of them has one such."""
        self._claims = Ledger(max(0, budget - budget // 2 - self.decoders_bytes))
        self.share = self._claims.budget // slots
        """Bytes that a request gets if it can use them."""

    @contextmanager
    def claim(self, kind: str, need: HostNeed, interest: Interest) -> Iterator[int]:
        """Bytes for a request of ``kind`` inside the block, from least to most of ``need``, once they are there.

        Raises:
            HostBudgetError: Even the least is never there.
            BusyError: It is not there at the deadline of ``interest``.
            BadRequestError: Nobody is interested any more.
        """
        if need.least > self._claims.budget:
            raise HostBudgetError(
                f"this request takes {need.least} bytes of the server's memory with one sample at a time, the server "
                f"has {self._claims.budget} for requests (half of its --host-memory); give it more, or choose split 0 "
                "or a smaller input"
            )
        nbytes = max(need.least, min(need.most, self.share))

        def look(waiting: int) -> None:
            if interest.is_set():
                raise BadRequestError("the client went away")
            if time.monotonic() >= interest.deadline:
                raise BusyError(
                    f"{waiting} requests wait for the server's memory, and this one did for too long "
                    "(--max-request-seconds of hapi-server); come back later, or ask another server",
                    retry_after=LATE_SECONDS,
                )

        self._claims.take(kind, nbytes, look)
        given_back = threading.Lock()

        def give_back() -> None:
            if given_back.acquire(blocking=False):  # once
                self._claims.give_back(kind, nbytes)

        try:
            with when_given_up(give_back):  # its thread may come back only much later
                yield nbytes
        finally:
            give_back()

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        return self._claims.waiting

    def status(self) -> dict[str, Any]:
        """What ``/v1/status`` says of it: bytes of the budget (None: none), those taken by kind, requests that wait."""
        budget = self.budget if self.budget < UNKNOWN_BYTES else None
        return {"budget_bytes": budget, "reserved": self.kinds(), "waiting": self.waiting}

    def kinds(self) -> dict[str, int]:
        """Bytes of the budget that are taken, by :data:`HOST_KINDS`."""
        taken = {**self._claims.held(), "images": self.images.held, "decoders": self.decoders_bytes}
        return {kind: taken.get(kind, 0) for kind in HOST_KINDS}


def out_of_memory() -> HostMemoryError:
    """The error for a request that found no memory on the server's machine."""
    return HostMemoryError(
        "the server's machine is out of memory; ask again or another server, and have its operator lower "
        "--host-memory, --device-memory or --max-running",
        retry_after=SHORT_SECONDS,
    )


def host_budget(given: int | None, taken: int) -> int:
    """Bytes of the budget: ``given``, or :data:`HOST_SHARE` of what is free beside ``taken`` bytes for other things."""
    if given is not None:
        return given
    free = host_free_bytes()
    return UNKNOWN_BYTES if free is None else max(int((free - taken) * HOST_SHARE), free // LEAST_PART)


@contextmanager
def halving(halve: Callable[[], object]) -> Iterator[None]:
    """Have ``halve()`` called for a block that runs out of memory, and its client asked to come back.

    Raises :class:`HostMemoryError` then; the next request of its kind is to take half as much.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        halve()
        give_back_freed_memory()
        raise out_of_memory() from error
