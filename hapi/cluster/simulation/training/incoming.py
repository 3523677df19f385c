"""A trainer's side of its links in simulated time: the client's own meter and pacer, told the bytes that have come."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from hapi.client.loading.pacing import Learned, RequestPacer
from hapi.client.transport.hedging import ArrivingSeconds
from hapi.client.transport.joint_rates import JointRates
from hapi.client.transport.link_meter import LinkMeter
from hapi.cluster.simulation.network import Network, Transfer

SHORTEST_WAIT = 1e-3
"""Seconds after which a request that is held back is considered anew at the earliest."""


class IncomingLink:
    """Arrivals of one trainer, and the time of its next request."""

    def __init__(
        self, env: simpy.Environment, network: Network, servers: int, wake: Callable[[], None]
    ) -> None:
        """Begin the first pass.

        Args:
            env: simulated time.
            network: of the fleet.
            servers: number of those that the trainer knows.
            wake: called when a request that was held back is to be considered anew.
        """
        self._env, self._network, self._servers, self._wake = env, network, servers, wake
        self._crossing: dict[Transfer, str] = {}
        """Server of each one."""
        self._whole = 0.0
        self._busy = self._busy_since = 0.0
        self.arriving_seconds = ArrivingSeconds(self._busy_seconds, self._arrived)
        """Returns the seconds so far in which any answer was arriving."""
        self._learned, self._joint = Learned(), JointRates()
        self._due_at, self._timer = float("inf"), 0
        self.begin_pass()

    def begin_pass(self) -> None:
        """Begin to measure anew; what was learned of the link stays."""
        env = self._env
        self.meter = LinkMeter(self._arrived, lambda: env.now, self._joint)
        self.pacer = RequestPacer(
            self._arrived, self.meter, self._learned, lambda: self._servers, lambda: env.now
        )
        self._reported = 0.0

    def begins(self, transfer: Transfer, server: str) -> None:
        """Note that a frame of ``server`` begins to cross."""
        if not self._crossing:
            self._busy_since = self._env.now
        self._crossing[transfer] = server
        self.meter.begin(server)

    def ends(self, transfer: Transfer) -> float:
        """Note that a frame has crossed, or breaks off; return its bytes that have come."""
        nbytes = self._network.crossed(transfer)
        server = self._crossing.pop(transfer)
        if not self._crossing:
            self._busy += self._env.now - self._busy_since
        self._whole += nbytes
        self.meter.end(round(nbytes), server)
        return nbytes

    def held_back(self, split: int) -> bool:
        """Return whether the next request, at ``split``, has to wait; :attr:`wake` is called later then."""
        delay = self.pacer.delay(split)
        if not delay or self._learned.rate is None:
            return delay > 0  # an answer comes before the link is known
        at = self._env.now + max(delay, SHORTEST_WAIT)
        if at < self._due_at:
            self._timer += 1
            timer, self._due_at = self._timer, at
            self._env.timeout(at - self._env.now).callbacks.append(lambda _: self._due(timer))
        return True

    def news(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return what the meter has measured since the last call: arrivals, and bounds on others."""
        since, self._reported = self._reported, self._env.now
        return self.meter.rates(since), self.meter.bounds(since)

    def _arrived(self) -> int:
        """Bytes that have come so far."""
        crossed = self._network.crossed
        return int(self._whole + sum(crossed(transfer) for transfer in self._crossing))

    def _busy_seconds(self) -> float:
        """Seconds so far in which any frame was crossing."""
        return self._busy + (self._env.now - self._busy_since if self._crossing else 0.0)

    def _due(self, timer: int) -> None:
        if timer == self._timer:
            self._due_at = float("inf")
            self._wake()
