"""Links that answers share max-min fairly: no transfer could be faster without a slower one becoming slower.

Transfers are fluids: TCP's slow start, losses and the packets' headers are not in the model. Bertsekas and Gallager,
Data Networks (1992), section 6.5.2, raises all rates together until a link is full; here all links that are the
narrowest for each of their transfers are filled at once, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import simpy

UNLIMITED = 1e13
"""Bytes per second of a link that limits nothing."""
PATH = 4
"""Links that a transfer may cross."""
_ROUNDING = 1e-9
_SMALLEST_BYTES = 1e-3
_SMALLEST_SECONDS = 1e-9
"""Bytes and seconds that are rounding: a transfer of which less is left is over."""

Floats = npt.NDArray[np.float64]


def fair_rates(paths: npt.NDArray[np.int64], capacity: Floats) -> Floats:
    """Return the max-min fair rate of each transfer, in bytes per second.

    Args:
        paths: int64 [transfers, PATH], links of each one; link 0 fills up.
        capacity: float64 [links], bytes per second.
    """
    rates = np.zeros(len(paths))
    left, open_ones = capacity.copy(), np.arange(len(paths))
    while len(open_ones):
        crossing = paths[open_ones]
        users = np.bincount(crossing.ravel(), minlength=len(left)).astype(np.float64)
        users[0] = 0.0
        share = np.divide(left, users, out=np.full(len(left), UNLIMITED), where=users > 0)
        narrowest = share[crossing].min(axis=1)
        lowest = np.full(len(left), np.inf)
        for column in crossing.T:
            np.minimum.at(lowest, column, narrowest)
        full = lowest >= share * (1 - _ROUNDING)
        full[0] = False
        settled = full[crossing].any(axis=1)
        if not settled.any():  # what is left is limited by nothing
            settled = narrowest <= narrowest.min()
        rates[open_ones[settled]] = narrowest[settled]
        taken = np.repeat(narrowest[settled], paths.shape[1])
        left = np.maximum(left - np.bincount(crossing[settled].ravel(), taken, minlength=len(left)), 0.0)
        open_ones = open_ones[~settled]
    return rates


class Network:
    """Links, and the transfers over them.

    Rates are found anew at each change, or with ``settle`` above 0 at most once in so many seconds: for large fleets.
    Then a transfer begins up to so much late, and what one leaves free is taken as late.
    """

    def __init__(self, env: simpy.Environment, settle: float = 0.0) -> None:
        """Begin without links."""
        self._env, self._settle = env, settle
        self._capacity = np.array([UNLIMITED])
        self.carried: Floats = np.zeros(1)
        """Bytes that crossed each link, by its number."""
        self._paths = np.zeros((16, PATH), dtype=np.int64)
        self._left, self._rate = np.zeros(16), np.zeros(16)
        self._active = np.zeros(16, dtype=np.bool_)
        self._done: list[simpy.Event | None] = [None] * 16
        self._free = list(range(15, -1, -1))
        self._since = self._settled = 0.0
        self._timer, self._due_at = 0, float("inf")

    def add_link(self, bytes_per_second: float | None) -> int:
        """Return the number of a new link; None: it limits nothing."""
        self._capacity = np.append(self._capacity, bytes_per_second or UNLIMITED)
        self.carried = np.append(self.carried, 0.0)
        return len(self._capacity) - 1

    def capacity(self, link: int) -> float:
        """Return a link's bytes per second."""
        return float(self._capacity[link])

    def set_capacity(self, link: int, bytes_per_second: float) -> None:
        """Change a link, also under transfers."""
        self._capacity[link] = bytes_per_second
        self._changed()

    def send(self, path: Sequence[int], nbytes: float) -> tuple[int, simpy.Event]:
        """Begin a transfer of ``nbytes`` over the links of ``path``; return its number, and an event for its end."""
        done = self._env.event()
        if not self._free:
            self._grow()
        number = self._free.pop()
        self._paths[number] = 0
        self._paths[number, : len(path)] = path
        self._left[number], self._rate[number] = nbytes, 0.0
        self._active[number], self._done[number] = True, done
        self._changed()
        return number, done

    def abort(self, number: int) -> None:
        """End a transfer that is under way, without its event; nothing happens to one that is over."""
        if self._active[number]:
            self._advance()
            self._remove(number)
            self._changed()

    def _grow(self) -> None:
        size = len(self._done)
        self._paths = np.vstack([self._paths, np.zeros_like(self._paths)])
        self._left, self._rate = (np.append(a, np.zeros(size)) for a in (self._left, self._rate))
        self._active = np.append(self._active, np.zeros(size, dtype=np.bool_))
        self._done += [None] * size
        self._free = list(range(2 * size - 1, size - 1, -1))

    def _remove(self, number: int) -> simpy.Event | None:
        done, self._done[number] = self._done[number], None
        self._active[number], self._rate[number] = False, 0.0
        self._free.append(number)
        return done

    def _advance(self) -> None:
        """Carry what the present rates have carried since the last time."""
        elapsed, self._since = self._env.now - self._since, self._env.now
        if elapsed > 0:
            now = np.flatnonzero(self._active)
            moved = np.minimum(self._left[now], self._rate[now] * elapsed)
            self._left[now] -= moved
            crossed = np.repeat(moved, PATH)
            self.carried += np.bincount(self._paths[now].ravel(), crossed, minlength=len(self.carried))

    def _changed(self) -> None:
        """Find the rates anew as soon as may be."""
        self._wake(max(self._env.now, self._settled + self._settle) if self._settle else self._env.now)

    def _wake(self, at: float) -> None:
        if at < self._due_at:
            self._timer += 1
            timer, self._due_at = self._timer, at
            self._env.timeout(max(0.0, at - self._env.now)).callbacks.append(lambda _: self._due(timer))

    def _due(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._due_at = float("inf")
        self._advance()
        over = self._left <= np.maximum(_SMALLEST_BYTES, self._rate * _SMALLEST_SECONDS)
        for number in np.flatnonzero(self._active & over):
            done = self._remove(int(number))
            if done is not None:
                done.succeed()
        now = np.flatnonzero(self._active)
        self._settled = self._env.now
        if len(now):
            self._rate[now] = fair_rates(self._paths[now], self._capacity)
            with np.errstate(divide="ignore"):
                first = float((self._left[now] / self._rate[now]).min())
            self._wake(self._env.now + max(first, self._settle))
