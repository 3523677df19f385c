"""Admission of requests: :class:`FairQueue` on an event loop.

A bounded number runs, a bounded number waits in lines by tenant, the rest is told when to return.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hapi.errors import BusyError, DeadlineError, HapiError
from hapi.server.scheduling.fair_queue import FairQueue, Tenant, Ticket
from hapi.server.scheduling.refusals import queue_full, too_late

FULL, LATE, EXPIRED = "full", "late", "expired"
"""Reasons for sending a request away: the queue was full; its turn would have come too late; it did."""
REASONS = (FULL, LATE, EXPIRED)


@dataclass
class Slot:
    """The right of a request to be worked on."""

    waited: float
    """Seconds."""
    began: float
    """``time.monotonic`` seconds."""
    expected_wait: Callable[[], float]
    """Asked at the request's end, from any thread: seconds that the tenant's next one has to expect."""
    cost: float | None = None
    """Its cost (:mod:`hapi.server.scheduling.costs`); set it before the end. None: the cost of its slot's
    seconds.
    """


class Admission:
    """Lives on the event loop's thread; :meth:`expected_wait`, :meth:`lasting_wait`, :meth:`pressed` and the counts may
    be asked from any.

    ``shed`` is told the tenant and the reason of each request that is sent away.
    """

    def __init__(
        self, slots: int, max_queued: int, shed: Callable[[Tenant, str], None] = lambda tenant, reason: None
    ) -> None:
        self._slots = slots
        self._queue = FairQueue(slots, max_queued)
        self._lock = threading.Lock()
        self._granted: dict[Ticket, asyncio.Future[None]] = {}
        self._shed = shed
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Requests that hold a slot now."""
        return self._queue.running

    @property
    def queued(self) -> int:
        """Requests that wait now."""
        return self._queue.queued

    def change_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Take the weights and limits of ``tenants`` from now on, also for those that wait."""
        with self._lock:
            self._queue.change_tenants(tenants)
        self._move_on()

    def of(self, tenant: Tenant) -> tuple[int, int]:
        """Return how many requests of ``tenant`` wait, and how many hold a slot."""
        with self._lock:
            return self._queue.of(tenant)

    def expected_wait(self, tenant: Tenant, *, leaving: bool = False) -> float:
        """Return the seconds that a request of ``tenant`` would wait now, or when one of its own is over."""
        with self._lock:
            return self._queue.expected_wait(tenant, time.monotonic(), leaving=leaving)

    def lasting_wait(self, tenant: Tenant) -> float:
        """Return the seconds that each request of a new job of ``tenant`` would wait."""
        with self._lock:
            return self._queue.lasting_wait(tenant)

    def send_away(self, error: HapiError) -> None:
        """End all that wait with ``error``."""
        for ticket in [ticket for ticket in self._granted if ticket.state == "waiting"]:
            with self._lock:
                self._queue.leave(ticket)
            self._tell(ticket, error)

    def pressed(self) -> bool:
        """Return whether a request waits that would begin if a slot were free."""
        with self._lock:
            return self._queue.pressed(time.monotonic())

    def sent(self, tenant: Tenant, nbytes: int) -> None:
        """Note that ``nbytes`` of an answer to ``tenant`` are under way; less than 0: they were not sent
        after all.
        """
        with self._lock:
            self._queue.sent(tenant, nbytes)

    def check_place(self, tenant: Tenant) -> None:
        """Raise :class:`BusyError` when any request of ``tenant`` would be sent away.

        It is called before the request is read, as reading costs more than all the rest of sending it away.
        """
        with self._lock:
            if not self._queue.is_full_for(tenant):
                return
            error = queue_full(self._queue, tenant, self._queue.usual_cost(tenant), time.monotonic())
        self._shed(tenant, FULL)
        raise error

    @asynccontextmanager
    async def slot(
        self, tenant: Tenant, cost: float, max_wait: float, deadline: float | None = None
    ) -> AsyncIterator[Slot]:
        """Hold a slot inside the block.

        Args:
            tenant: of the request.
            cost: expected cost, in seconds.
            max_wait: longest wait, in seconds.
            deadline: the client's own limit, in seconds; None for none.

        Raises:
            BusyError: it cannot wait, or no slot came free within ``max_wait``.
            DeadlineError: no slot came free within ``deadline``.
        """
        asked = time.monotonic()
        if deadline is not None and deadline <= 0:
            raise self._sent_away(
                tenant, cost, EXPIRED, DeadlineError, "its deadline passed before it was read"
            )
        ticket = await self._wait_for_slot(tenant, cost, max_wait, deadline)
        slot = Slot(
            time.monotonic() - asked, time.monotonic(), lambda: self.expected_wait(tenant, leaving=True)
        )
        try:
            yield slot
        finally:
            held = time.monotonic() - slot.began
            self._finish(ticket, held / self._slots if slot.cost is None else slot.cost)

    async def _wait_for_slot(
        self, tenant: Tenant, cost: float, max_wait: float, deadline: float | None
    ) -> Ticket:
        """Wait in line; the ticket that runs."""
        limit = max_wait if deadline is None else min(max_wait, deadline)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            ticket = self._queue.enter(tenant, cost)
        self._granted[ticket] = granted
        try:
            self._move_on()
            self._check_in_time(ticket, limit)
            async with asyncio.timeout(limit):
                await granted
        except TimeoutError:
            self._give_up(ticket)
            if deadline is None or max_wait < deadline:
                text = f"no slot came free within {max_wait:g} s"
                raise self._sent_away(tenant, cost, EXPIRED, BusyError, text) from None
            text = f"it waited until its deadline of {deadline:g} s"
            raise self._sent_away(tenant, cost, EXPIRED, DeadlineError, text) from None
        except BaseException:
            self._give_up(ticket)
            raise
        finally:
            del self._granted[ticket]
            if granted.done() and not granted.cancelled():
                granted.exception()  # looked at, so that asyncio does not complain when its waiter was cancelled
        return ticket

    def _check_in_time(self, ticket: Ticket, limit: float) -> None:
        """Send a request away at once that would wait in vain; it may go to another server."""
        with self._lock:
            error = too_late(self._queue, ticket, limit, time.monotonic())
        if error is not None:
            self._shed(ticket.tenant, LATE)
            raise error

    def _move_on(self) -> None:
        """Begin what may begin, send away what is too much, and look again when time alone changes that."""
        with self._lock:
            now = time.monotonic()
            while (ticket := self._queue.next(now)) is not None:
                self._tell(ticket, None)
            while (ticket := self._queue.surplus()) is not None:
                self._shed(ticket.tenant, FULL)
                self._tell(ticket, queue_full(self._queue, ticket.tenant, ticket.cost, now))
            wake = self._queue.wake_at(now)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wake < math.inf:
            self._alarm = asyncio.get_running_loop().call_later(wake - now, self._move_on)

    def _tell(self, ticket: Ticket, error: HapiError | None) -> None:
        granted = self._granted[ticket]
        if (
            granted.done()
        ):  # its client went away in the same moment; its task has not run yet and gives the slot back
            return
        if error is None:
            granted.set_result(None)
        else:
            granted.set_exception(error)

    def _sent_away(
        self, tenant: Tenant, cost: float, reason: str, error: type[BusyError | DeadlineError], text: str
    ) -> BusyError | DeadlineError:
        """The error of a request that has left the queue."""
        self._shed(tenant, reason)
        with self._lock:
            now = time.monotonic()
            retry_after = self._queue.retry_after(tenant, cost, now)
            wait = self._queue.expected_wait(tenant, now)
        return error(text, retry_after=retry_after, expected_wait=wait)

    def _give_up(self, ticket: Ticket) -> None:
        """Leave the line, or give back a slot that came in the same moment."""
        if ticket.state == "waiting":
            with self._lock:
                self._queue.leave(ticket)
            self._move_on()
        elif ticket.state == "running":
            self._finish(ticket, 0.0)

    def _finish(self, ticket: Ticket, cost: float) -> None:
        with self._lock:
            self._queue.finish(ticket, cost, time.monotonic())
        self._move_on()
