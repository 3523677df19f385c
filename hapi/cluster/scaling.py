"""Number of servers that a fleet should have, by what its trainers wait. Pure: it is told the time.

Trainers that stall for a share ``s`` of their time take a share ``1 - s`` of what they could take. If it is the
servers that they wait for, ``n / (1 - s)`` servers would let them take all. It is the servers when requests have to
wait there: stall times expected wait is above :attr:`ScalingRule.wait_seconds`. A slow link stalls trainers too, and
trainers that compute for long make long queues; neither alone is a reason for another server.

Trainers learn of a new server late, some never: only servers that they ask count as those that are too few.

Nothing is decided while servers start and for :attr:`ScalingRule.settle_seconds` after, since trainers' shares are
means over some seconds. More servers come when the wait has lasted ``up_seconds``, and up to as long again while the
stall still grows: a mean that rises asks for too few. Fewer come when slots were idle for
``down_seconds``, down to the largest number that was needed in them. A number that was too few is not tried again for
``regret_seconds``, unless there is less than half of the work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MOST_STALL = 0.9
"""Share above which it tells no more than that many servers are missing: at most ten times as many at once."""
LITTLE_STALL = 0.1
"""Share below which no server is missing."""
ROUNDING = 0.02
"""Part of a number of servers that is no reason for one more."""
AT_ONCE = 0.25
"""Part of the servers, but at least one, that are taken away at a time."""


@dataclass(frozen=True, kw_only=True)
class ScalingRule:
    """Bounds and delays, in servers and seconds."""

    lowest: int
    highest: int
    wait_seconds: float = 0.05
    """Stall times expected wait from which on the servers are the bottleneck: a request's own time on a GPU."""
    busy_share: float = 0.7
    """Share of slots in use that fewer servers may have."""
    up_seconds: float = 10.0
    down_seconds: float = 300.0
    settle_seconds: float = 15.0
    regret_seconds: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class FleetReading:
    """Means over the servers of a fleet that tell of themselves."""

    servers: int
    """Number of them."""
    asked: int
    """Number of those that trainers ask."""
    wait: float
    """Stall times expected wait (``hapi_trainer_wait_seconds``), in seconds."""
    stalled: float
    """Share of their time in which trainers wait, 0 to 1."""
    busy: float
    """Share of slots in use, 0 to 1."""

    @property
    def whole(self) -> bool:
        """True when all are numbers that can be."""
        numbers = (self.wait, self.stalled, self.busy)
        return self.servers > 0 and all(math.isfinite(n) and n >= 0 for n in numbers)


@dataclass(frozen=True, kw_only=True)
class ScalingState:
    """Memory from one decision to the next."""

    current: int = 0
    """Servers that there were to be then; 0 before the first decision."""
    settled_at: float = 0.0
    """Time from which on readings are of the present number."""
    short_since: float | None = None
    """Time since which trainers wait without a break."""
    short_needed: float = 0.0
    """Servers that were needed by the last reading then."""
    spare_since: float | None = None
    """Time since which fewer servers would do."""
    spare_needed: int = 0
    """Largest number that was needed since then."""
    too_few: int = 0
    """Number that was too few last; 0 for none."""
    too_few_until: float = 0.0


def wanted_servers(
    rule: ScalingRule, state: ScalingState, reading: FleetReading, current: int, now: float
) -> tuple[int, ScalingState]:
    """Return how many servers there should be, within the rule's bounds, and the state for the next decision.

    Args:
        rule: bounds and delays.
        state: from the last decision.
        reading: what the servers tell.
        current: servers that there are to be now, those that start included.
        now: time in seconds, of any clock.
    """
    state = _followed(rule, state, reading, current, now)
    if not rule.lowest <= current <= rule.highest:
        return min(max(current, rule.lowest), rule.highest), state
    if not reading.whole or now < state.settled_at:
        return current, replace(state, short_since=None, spare_since=None)
    short = reading.wait > rule.wait_seconds and reading.stalled > LITTLE_STALL
    spare = reading.wait <= rule.wait_seconds / 2 and _needed(rule, state, reading, current, now) < current
    if short:
        return _more(rule, state, reading, current, now)
    if spare:
        return _fewer(rule, state, reading, current, now)
    return current, replace(state, short_since=None, spare_since=None)


def _followed(
    rule: ScalingRule, state: ScalingState, reading: FleetReading, current: int, now: float
) -> ScalingState:
    """The state after a look at how many servers there are."""
    if current != state.current:
        grown = 0 < state.current < current
        return ScalingState(
            current=current,
            settled_at=now + rule.settle_seconds if state.current else now,
            too_few=state.current if grown else state.too_few,
            too_few_until=now + rule.regret_seconds if grown else state.too_few_until,
        )
    if reading.servers < current:
        return replace(state, settled_at=max(state.settled_at, now + rule.settle_seconds))
    return state


def _more(
    rule: ScalingRule, state: ScalingState, reading: FleetReading, current: int, now: float
) -> tuple[int, ScalingState]:
    since, before = (now, 0.0) if state.short_since is None else (state.short_since, state.short_needed)
    needed = min(current, reading.asked) / (1 - min(reading.stalled, MOST_STALL))
    state = replace(state, short_since=since, short_needed=needed, spare_since=None)
    grows = needed > before * (1 + ROUNDING)
    if now - since < rule.up_seconds * (1 + grows):
        return current, state
    return min(max(current, math.ceil(needed * (1 - ROUNDING))), rule.highest), state


def _fewer(
    rule: ScalingRule, state: ScalingState, reading: FleetReading, current: int, now: float
) -> tuple[int, ScalingState]:
    since = now if state.spare_since is None else state.spare_since
    before = 0 if state.spare_since is None else state.spare_needed
    needed = max(before, _needed(rule, state, reading, current, now))
    state = replace(state, short_since=None, spare_since=since, spare_needed=needed)
    if now - since < rule.down_seconds:
        return current, state
    return max(needed, current - max(1, int(current * AT_ONCE))), state


def _needed(rule: ScalingRule, state: ScalingState, reading: FleetReading, current: int, now: float) -> int:
    """Number of servers that the work of now needs."""
    work = current * min(1.0, reading.busy)
    needed = max(rule.lowest, math.ceil(work / rule.busy_share))
    if now < state.too_few_until and work >= state.too_few / 2:
        needed = max(needed, state.too_few + 1)
    return needed
