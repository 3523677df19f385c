"""Admission of requests in simulated time: the server's own queue, and its own reasons for sending one away."""

from __future__ import annotations

import math

import simpy

from hapi.server.scheduling.fair_queue import FairQueue, Tenant, Ticket
from hapi.server.scheduling.refusals import queue_full, too_late


class SimulatedAdmission:
    """:class:`hapi.server.scheduling.admission.Admission`, told a simulated time."""

    def __init__(self, env: simpy.Environment, slots: int, max_queued: int, max_wait: float) -> None:
        """Let ``slots`` requests run and ``max_queued`` wait, none longer than ``max_wait`` seconds."""
        self.slots = slots
        self.queue = FairQueue(slots, max_queued)
        self._env, self._max_wait = env, max_wait
        self._granted: dict[Ticket, simpy.Event] = {}
        self._alarm = 0

    def enter(self, tenant: Tenant, cost: float) -> tuple[Ticket, simpy.Event]:
        """Join the tenant's line; return the ticket, and an event that comes with its slot, or fails.

        Args:
            tenant: of the request.
            cost: expected, in seconds.

        Raises:
            BusyError: there is no room, or it would be its turn too late.
        """
        now = self._env.now
        if self.queue.is_full_for(tenant):
            raise queue_full(self.queue, tenant, self.queue.usual_cost(tenant), now)
        ticket, granted = self.queue.enter(tenant, cost), self._env.event()
        self._granted[ticket] = granted
        self._move_on()
        late = too_late(self.queue, ticket, self._max_wait, now)
        if late is not None:
            self.leave(ticket)
            raise late
        return ticket, granted

    def leave(self, ticket: Ticket) -> None:
        """Leave the line, or give back a slot that came in the same moment."""
        self._granted.pop(ticket, None)
        if ticket.state == "waiting":
            self.queue.leave(ticket)
            self._move_on()
        elif ticket.state == "running":
            self.finish(ticket, 0.0)

    def finish(self, ticket: Ticket, cost: float) -> None:
        """Give a slot back after a request of this cost."""
        self.queue.finish(ticket, cost, self._env.now)
        self._move_on()

    def _move_on(self) -> None:
        now, queue = self._env.now, self.queue
        while (ticket := queue.next(now)) is not None:
            self._granted.pop(ticket).succeed()
        while (ticket := queue.surplus()) is not None:
            self._granted.pop(ticket).fail(queue_full(queue, ticket.tenant, ticket.cost, now))
        wake = queue.wake_at(now)
        self._alarm += 1
        if wake < math.inf:
            alarm = self._alarm
            self._env.timeout(wake - now).callbacks.append(lambda _: self._look_again(alarm))

    def _look_again(self, alarm: int) -> None:
        if alarm == self._alarm:
            self._move_on()
