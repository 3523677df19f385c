"""Order of waiting requests, choice of those sent away, and the others' expected wait. Pure: it is told the
time.

Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996) with several requests at a time, SFQ(D) (Jin,
Chase, Kaur: SIGMETRICS 2004). A tenant's first waiting request has a start tag: the later of the virtual time
at which the tenant began to wait and of the finish tag of its last request. The smallest start tag is next
and becomes the virtual time; the finish tag is the start tag plus cost over weight. So two tenants that both
wait get work in proportion to their weights, to within one request of each, whatever the speed of the server,
and one that asks rarely comes next. The cost is an estimate when a request begins, and is corrected when it
is over.

A slot comes free when a request is over. For a request that takes milliseconds that is long. So there is one
slot more, for the next request alone, when its tenant has nothing that runs and is not ahead of its share:
still the order of the tags, with ``slots + 1`` at a time now and then.

When too many wait, the newest request of the longest line (by weight) goes, as in longest queue drop (Suter,
Lakshman, Stiliadis, Choudhury: INFOCOM 1998): a tenant that fills the queue makes room, and one alone may
have all of it.

    enter -> waiting -> next -> running -> finish -> over
                |
                +--- leave (client gone, sent away, deadline) -> over
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from hapi.server.scheduling.service_rate import ServiceRate
from hapi.server.tenants.access import EVERYTHING, Access

LEAST_COST = 0.001
"""Seconds that every request is taken to cost at least, so that none is free."""
LONGEST_RETRY = 60.0
"""Longest time for which a request is sent away, in seconds; the client's own longest wait."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Source of requests. Tenants of one name are one."""

    name: str
    weight: float = 1.0
    """Share of the work beside that of others who also wait; above 0."""
    in_flight: int | None = None
    """Most requests that are worked on at a time; more of them wait."""
    bytes_per_second: int | None = None
    """Most bytes of answers per second, on average; its next request waits until what was sent is paid off."""
    access: Access = EVERYTHING

    def may_see(self, other: Tenant) -> bool:
        """Return whether it may know of ``other`` and its requests."""
        return self.access.whole or other.name == self.name


ANONYMOUS = Tenant(name="")
"""Stands for the tenant where nobody is told from anybody else."""


@dataclass(eq=False)
class Ticket:
    """One request's place."""

    tenant: Tenant
    cost: float
    """Estimated seconds of the server's scarcest resource, see :mod:`hapi.server.scheduling.costs`."""
    number: int
    """Number in the order of arrival."""
    state: Literal["waiting", "running", "over"] = "waiting"


@dataclass(eq=False)
class _Line:
    """One tenant's queue and account."""

    tenant: Tenant
    balance: float = 0.0
    """Bytes that may be sent before the next request has to wait."""
    paid_until: float | None = None
    waiting: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)
    work: float = 0.0
    """Estimated cost of all that waits."""
    running: int = 0
    floor: float = 0.0
    """Virtual time at which the line began to wait."""
    seldom: bool = False
    """True when the tenant had taken less than its share then."""
    finish: float = 0.0
    """Finish tag of the last request that began."""
    held_back: bool = False
    """True if a limit of its own held it back when a slot was free."""
    promised: float = -math.inf
    """Time at which the last of those that were sent away is to come back."""

    @property
    def tag(self) -> float:
        """Start tag of the first that waits."""
        return max(self.floor, self.finish)

    @property
    def limited(self) -> bool:
        """True if the tenant has limits of its own."""
        return self.tenant.in_flight is not None or self.tenant.bytes_per_second is not None

    @property
    def may_use_extra_slot(self) -> bool:
        """True when the first that waits is a request of a tenant that asks rarely."""
        return self.seldom and not self.running

    def may_run(self, now: float) -> bool:
        """Return whether the tenant's own limits let it begin another request."""
        limit, rate = self.tenant.in_flight, self.tenant.bytes_per_second
        if rate is not None:
            # What was not sent in the last second is lost: a rate, not a savings account.
            elapsed = 0.0 if self.paid_until is None else max(0.0, now - self.paid_until)
            self.balance = min(rate, self.balance + rate * elapsed)
            self.paid_until = now
        paid = rate is None or self.balance > -1  # less than a byte is rounding
        return paid and (limit is None or self.running < limit)


class FairQueue:
    """The lines of all tenants before ``slots`` slots. Not thread-safe; ``now`` never runs backwards.

    After every change call :meth:`next` until it gives None, then :meth:`surplus` until it gives None.
    """

    def __init__(self, slots: int, max_queued: int) -> None:
        self._slots = slots
        self._max_queued = max_queued
        self._lines: dict[str, _Line] = {}
        """By the tenant's name."""
        self._waiting: dict[str, _Line] = {}
        """Lines in which somebody waits."""
        self._virtual = 0.0
        self._last_finish = 0.0
        """Largest finish tag so far."""
        self._running_cost = 0.0
        self._entered = 0
        self.rate = ServiceRate()
        self.running = 0
        self.queued = 0

    def change_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Take the weights and limits of ``tenants``, by their names; forget others without a request."""
        known = {tenant.name: tenant for tenant in tenants}
        for name, line in list(self._lines.items()):
            if name in known:
                line.tenant = known[name]
            elif not line.waiting and not line.running:
                del self._lines[name]

    def enter(self, tenant: Tenant, cost: float) -> Ticket:
        """Add a request at the end of the tenant's line."""
        line = self._line(tenant)
        self._entered += 1
        ticket = Ticket(tenant, max(cost, LEAST_COST), self._entered)
        if not line.waiting:
            line.floor = max(line.floor, self._virtual)
            line.seldom = line.finish < self._virtual
            self._waiting[tenant.name] = line
        line.waiting[ticket] = None
        line.work += ticket.cost
        self.queued += 1
        return ticket

    def next(self, now: float) -> Ticket | None:
        """Return the request that begins now; None without a free slot or a request that may have it."""
        if self.running > self._slots:
            return None
        first: _Line | None = None
        smallest, number = math.inf, 0
        # A plain loop: it is done twice for each request, over all tenants that wait.
        for line in self._waiting.values():
            if line.limited and not line.may_run(now):
                line.held_back = True
                continue
            if line.held_back:  # while it had to stay away others went ahead; it does not get that back
                line.held_back, line.floor = False, max(line.floor, self._virtual)
            tag = line.floor if line.floor > line.finish else line.finish
            if tag > smallest:
                continue
            arrived = next(iter(line.waiting)).number
            if tag < smallest or arrived < number:
                first, smallest, number = line, tag, arrived
        if first is None or (self.running == self._slots and not first.may_use_extra_slot):
            return None
        return self._begin(first, now)

    def _begin(self, line: _Line, now: float) -> Ticket:
        ticket, start = next(iter(line.waiting)), line.tag
        self._remove(line, ticket)
        line.seldom = False
        self._virtual = max(self._virtual, start)
        line.finish = start + ticket.cost / line.tenant.weight
        self._last_finish = max(self._last_finish, line.finish)
        line.running += 1
        self.running += 1
        self._running_cost += ticket.cost
        ticket.state = "running"
        if self.running == self._slots:
            self.rate.full(now)
        return ticket

    def finish(self, ticket: Ticket, cost: float, now: float) -> None:
        """Note that a running request is over, with its real cost."""
        line, cost = self._lines[ticket.tenant.name], max(cost, LEAST_COST)
        full = self.running >= self._slots
        if full:
            self.rate.done(cost, now)
        self.running -= 1
        if full and self.running >= self._slots:
            self.rate.full(now)
        self._running_cost -= ticket.cost
        line.running -= 1
        # The tag was advanced by the estimate at the start; now by the rest of the real cost, which may be negative.
        line.finish += (cost - ticket.cost) / line.tenant.weight
        self._last_finish = max(self._last_finish, line.finish)
        ticket.state = "over"
        if not self.running and not self.queued:
            self._virtual = (
                self._last_finish
            )  # a busy period is over: whoever comes next, all are equal again

    def leave(self, ticket: Ticket) -> None:
        """Remove a waiting request. It has cost nothing."""
        self._remove(self._lines[ticket.tenant.name], ticket)
        ticket.state = "over"

    def surplus(self) -> Ticket | None:
        """Remove and return a request when more wait than may; None otherwise."""
        if self.queued <= self._max_queued:
            return None
        longest = max(
            self._waiting.values(),
            key=lambda line: (len(line.waiting) / line.tenant.weight, next(reversed(line.waiting)).number),
        )
        ticket = next(reversed(longest.waiting))
        self.leave(ticket)
        return ticket

    def is_full_for(self, tenant: Tenant) -> bool:
        """Return whether a request of ``tenant``, whatever it is, would be the surplus if it came now.

        Not of a tenant that has nothing in the queue: its request might begin at once.
        """
        line = self._waiting.get(tenant.name)
        if line is None or self.queued < self._max_queued:
            return False
        length = (len(line.waiting) + 1) / tenant.weight
        return all(len(other.waiting) / other.tenant.weight <= length for other in self._waiting.values())

    def usual_cost(self, tenant: Tenant) -> float:
        """Return the mean estimated cost of the tenant's waiting requests; 0 when none waits."""
        line = self._line(tenant)
        return line.work / len(line.waiting) if line.waiting else 0.0

    def sent(self, tenant: Tenant, nbytes: int) -> None:
        """Note that ``nbytes`` of an answer are on their way; less than 0: they did not go after all."""
        if tenant.bytes_per_second is not None:
            # A token bucket of bytes, filled at the tenant's rate; an answer may take it below zero.
            self._line(tenant).balance -= nbytes

    def wake_at(self, now: float) -> float:
        """Return the time at which :meth:`next` may have an answer without any change: a tenant may send
        again.
        """
        if self.running >= self._slots:
            return math.inf
        owed = (_seconds_owed(line) for line in self._waiting.values())
        return min((now + seconds for seconds in owed if seconds), default=math.inf)

    def pressed(self, now: float) -> bool:
        """Return whether somebody waits for nothing but a slot."""
        return self.running >= self._slots and any(line.may_run(now) for line in self._waiting.values())

    def of(self, tenant: Tenant) -> tuple[int, int]:
        """Return how many of the tenant's requests wait, and how many run."""
        line = self._line(tenant)
        return len(line.waiting), line.running

    # -- how long --------------------------------------------------------------------------------------

    def expected_wait(
        self, tenant: Tenant, now: float, *, last: Ticket | None = None, leaving: bool = False
    ) -> float:
        """Return the seconds until a new request of the tenant would begin, if no other came.

        Args:
            tenant: of the request.
            now: present time.
            last: the last request in its line, instead of a new one.
            leaving: the new one comes when a running request of the tenant is over, which is soon.
        """
        line = self._line(tenant)
        own = line.work - (last.cost if last is not None else 0.0)
        mine = max(line.tag, self._virtual) + own / tenant.weight
        others = self._work_before(mine, line)
        half = self._running_cost / max(1, self.running) / 2  # what is left of the one that ends next
        running, own_running = self.running - leaving, line.running - leaving
        wait = 0.0
        rare = line.seldom if own else line.finish < self._virtual
        if running >= self._slots + (rare and not own_running) or own or others:
            wait = (own + others + half) / self.rate.per_second
        limit = tenant.in_flight
        if limit is not None and own_running + (own > 0) >= limit:
            wait = max(wait, (own + half) / self.rate.per_second * max(1.0, self._slots / limit))
        line.may_run(now)  # brings the balance up to date
        return max(wait, _seconds_owed(line))

    def lasting_wait(self, tenant: Tenant) -> float:
        """Return the seconds that each request of a new job of the tenant would wait; 0 while a slot is free.

        Such a job keeps as many requests here as there are slots. Those of its tenant that are here go first; and
        each of its own lets the other tenants that are here go first as well, by their weights.
        """
        if self.running < self._slots:
            return 0.0
        usual, own = self._running_cost / self.running, self._line(tenant)
        before = own.work + own.running * usual
        for line in self._lines.values():
            if line is not own and (count := len(line.waiting) + line.running):
                between = self._slots * line.tenant.weight / tenant.weight
                before += (line.work + line.running * usual) * min(1.0, between / count)
        return before / self.rate.per_second

    def retry_after(self, tenant: Tenant, cost: float, now: float) -> float:
        """Return the seconds after which a request that is sent away should come back.

        Each one gets the next place of a line that goes on outside the server, at the speed of the tenant's
        share. So they come back as fast as they can be taken, and not all at the same moment.

        Args:
            tenant: of the request.
            cost: expected cost, in seconds.
            now: present time.
        """
        line = self._line(tenant)
        weights = sum(other.tenant.weight for other in self._waiting.values() if other is not line)
        share = self.rate.per_second * tenant.weight / (weights + tenant.weight)
        # A place in its own line comes free at the speed of the share; without one, a slot has to.
        first = _seconds_owed(line) if line.waiting else self.expected_wait(tenant, now)
        due = max(line.promised, now + first) + max(cost, LEAST_COST) / share
        line.promised = min(due, now + LONGEST_RETRY)
        return min(max(due - now, 1.0), LONGEST_RETRY)

    # -- lines -------------------------------------------------------------------------------------------

    def _line(self, tenant: Tenant) -> _Line:
        line = self._lines.get(tenant.name)
        if line is None:
            line = self._lines[tenant.name] = _Line(tenant, float(tenant.bytes_per_second or 0))
        return line

    def _work_before(self, tag: float, own: _Line) -> float:
        """Estimated cost of what waits in other lines than ``own`` with a start tag below ``tag``, to within one
        request of each. A plain loop: it is done for each request that is sent away, over all tenants."""
        total = 0.0
        for line in self._waiting.values():
            first = line.floor if line.floor > line.finish else line.finish  # its tag
            if first > tag or line is own or line.held_back:
                continue
            work = line.work
            before = (tag - first) * line.tenant.weight + work / len(line.waiting)
            total += before if before < work else work
        return total

    def _remove(self, line: _Line, ticket: Ticket) -> None:
        del line.waiting[ticket]
        self.queued -= 1
        line.work -= ticket.cost
        if not line.waiting:
            line.work = 0.0  # no dust from adding and subtracting
            line.held_back = False
            del self._waiting[line.tenant.name]


def _seconds_owed(line: _Line) -> float:
    rate = line.tenant.bytes_per_second
    return 0.0 if rate is None or line.balance > -1 else -line.balance / rate
