"""Requests that straggle, and the servers that are asked for the same: hedged requests (Dean and Barroso, The Tail at
Scale, CACM 2013).

A request straggles when it has waited longer than nearly all others did lately, or at once where its server is known to
need that long: it was sent there to find out whether it has become quick. Seconds in which any answer arrives
do not count: this side's link delays all servers' answers, and a second one would only delay them more. Another server
is asked when its answer is expected well before, and as long as few are asked in all.

Pure: it is told the time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hapi.client.transport.server_choice import Asked, ServerLoad

EXTRA_SHARE, FIRST_EXTRA = 0.02, 1
"""Requests that may be sent twice, as a share of all, and at the beginning: from the fiftieth request on, no more than
the share."""
QUANTILE = 0.95
"""Share of the last answers that waited less than a straggler: that of The Tail at Scale."""
ANSWERS_KEPT, ENOUGH_ANSWERS = 256, 16
"""Answers of a kind that tell how long one waits, at most and at least."""
SOONER = 0.4
"""Largest share of the seconds that a straggler is still expected to take in which the other server must answer."""

Load = TypeVar("Load", bound=ServerLoad)


@dataclass(frozen=True)
class Outstanding:
    """A request that a server has not answered whole."""

    asked: Asked
    missing: int
    """Samples that have not come."""
    waited: float
    """Seconds since it was sent in which no answer was arriving."""

    def seconds_left(self, server: ServerLoad, now: float) -> float:
        """Return the seconds that ``server`` is expected to take yet.

        An answer of which nothing has come takes as long again as it has taken, or what the server took before.
        """
        asked, elapsed = self.asked, now - self.asked.at
        left, known = elapsed * self.missing / max(1, asked.samples), server.sample_seconds(asked.kind)
        if known is not None and self.missing == asked.samples:
            left = max(left, known * asked.samples * asked.in_flight - elapsed)
        return left


@dataclass(eq=False)
class Stragglers:
    """Waiting times of the last answers by kind of request, and the requests that were sent twice."""

    sent: int = 0
    extra: int = 0
    """Requests that were sent to a second server."""
    _waits: dict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=ANSWERS_KEPT))
    )
    """Seconds for each sample."""
    _usual: dict[int, float] = field(default_factory=dict)
    """The quantile of these, where it is known since the last answer."""

    def answered(self, asked: Asked, waited: float) -> None:
        """Note a whole answer, and the seconds since it was asked for in which no answer was arriving."""
        if asked.samples > 0:
            self._waits[asked.kind].append(waited / asked.samples)
            self._usual.pop(asked.kind, None)

    def straggles_from(self, asked: Asked, server: ServerLoad) -> float | None:
        """Return the seconds of waiting from which on a request straggles at ``server``; None: not known yet."""
        usual, known = self.longest_usual(asked), server.sample_seconds(asked.kind)
        if usual is not None and known is not None and known * asked.samples * asked.in_flight > usual:
            return 0.0
        return usual

    def longest_usual(self, asked: Asked) -> float | None:
        """Return the seconds that nearly all requests waited at most; None: not known yet."""
        waits = self._waits[asked.kind]
        if len(waits) < ENOUGH_ANSWERS:
            return None
        if asked.kind not in self._usual:
            self._usual[asked.kind] = sorted(waits)[int(QUANTILE * (len(waits) - 1))]
        return self._usual[asked.kind] * asked.samples

    def rescuer(
        self, request: Outstanding, server: ServerLoad, others: Sequence[Load], now: float
    ) -> Load | None:
        """Return the server to send a request to as well; None when it should only be waited for.

        Args:
            request: not answered yet.
            server: which it was sent to.
            others: servers that could answer it.
            now: monotonic time.
        """
        begins, kind = self.straggles_from(request.asked, server), request.asked.kind
        if begins is None or request.waited < begins or not request.missing:
            return None
        if self.extra + 1 > max(FIRST_EXTRA, EXTRA_SHARE * self.sent):
            return None
        expected = {
            id(other): max(known, other.overdue_seconds(kind, now)) * request.missing * (other.in_flight + 1)
            for other in others
            if (known := other.sample_seconds(kind)) is not None
        }
        found = min(
            (other for other in others if id(other) in expected), key=lambda o: expected[id(o)], default=None
        )
        if found is None or expected[id(found)] > SOONER * request.seconds_left(server, now):
            return None
        return found
