"""Requests that are sent away: whether, and when they should come back. Pure: it is told the time."""

from __future__ import annotations

from hapi.errors import BusyError
from hapi.server.scheduling.fair_queue import LONGEST_RETRY, FairQueue, Tenant, Ticket
from hapi.server.scheduling.service_rate import ENOUGH_COMPLETED


def queue_full(queue: FairQueue, tenant: Tenant, cost: float, now: float) -> BusyError:
    """Return the error of a request for which the queue has no room.

    Args:
        queue: that has none.
        tenant: of the request.
        cost: expected, in seconds.
        now: present time.
    """
    pause = queue.retry_after(tenant, cost, now)
    return BusyError(
        f"{queue.running} requests run and {queue.queued} wait; come back in {pause:.0f} s",
        retry_after=pause,
        expected_wait=queue.expected_wait(tenant, now),
    )


def too_late(queue: FairQueue, ticket: Ticket, limit: float, now: float) -> BusyError | None:
    """Return the error of a request that would wait in vain; it may go to another server at once.

    Args:
        queue: in which it waits.
        ticket: of the request.
        limit: the longest that it waits, in seconds.
        now: present time.

    Returns:
        The error; None when its slot is expected in time, has come, or nothing is known of the queue's speed.
    """
    if ticket.state != "waiting" or queue.rate.completed < ENOUGH_COMPLETED:
        return None
    wait = queue.expected_wait(ticket.tenant, now, last=ticket)
    if wait <= limit:
        return None
    return BusyError(
        f"its turn would come in {wait:.1f} s, it waits at most {limit:g} s; "
        "come back later, or ask another server",
        retry_after=min(LONGEST_RETRY, max(1.0, wait - limit)),
        expected_wait=wait,
    )
