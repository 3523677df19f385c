"""Links that answers share max-min fairly: no transfer could be faster without a slower one becoming slower.

Transfers are fluids: TCP's slow start, losses and the packets' headers are not in the model. Bertsekas and Gallager,
Data Networks (1992), section 6.5.2: the link that has least for each of its transfers is full first, and settles them.

Transfers over the same links have one rate, so that each such bundle advances as one, by virtual time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt
import simpy

UNLIMITED = 1e13
"""Bytes per second of a link that limits nothing."""
_ROUNDING = 1e-9
_SMALLEST_BYTES = 1e-3
_SMALLEST_SECONDS = 1e-9
"""Bytes and seconds that are rounding: a transfer of which less is left is over."""

Floats = npt.NDArray[np.float64]
Path = tuple[int, ...]


def fair_rates(paths: Sequence[Path], counts: Sequence[int], capacity: Sequence[float]) -> list[float]:
    """Return the max-min fair rate of a transfer of each bundle, in bytes per second.

    Args:
        paths: links of each bundle.
        counts: transfers of each bundle, above 0.
        capacity: bytes per second of each link.
    """
    users, members = dict[int, int](), dict[int, list[int]]()
    for number, path in enumerate(paths):
        for link in path:
            if link in users:
                users[link] += counts[number]
                members[link].append(number)
            else:
                users[link], members[link] = counts[number], [number]
    left = {link: capacity[link] for link in users}
    shares = [(left[link] / count, link) for link, count in users.items()]
    heapify(shares)
    rates, settled = [UNLIMITED] * len(paths), [False] * len(paths)
    while shares:
        share, link = heappop(shares)
        if not users[link]:
            continue
        rate = max(0.0, left[link]) / users[link]
        if rate > share * (1 + _ROUNDING):  # others have settled for less since
            heappush(shares, (rate, link))
            continue
        for number in members[link]:
            if not settled[number]:
                settled[number], rates[number] = True, rate
                for crossed in paths[number]:
                    users[crossed] -= counts[number]
                    left[crossed] -= rate * counts[number]
    return rates


@dataclass(eq=False, slots=True)
class Transfer:
    """Bytes on their way over some links."""

    bundle: Bundle
    nbytes: float
    done: simpy.Event
    """Comes when all have crossed; never when they are aborted."""
    begin: float = -1.0
    """Bytes of its bundle when it began; below 0 before that."""
    over: bool = False


@dataclass(eq=False, slots=True)
class Bundle:
    """Transfers over the same links."""

    path: Path
    count: int = 0
    """Transfers that have begun and are not over."""
    rate: float = 0.0
    """Bytes per second of each one."""
    reached: float = 0.0
    """Bytes that one has crossed which was there all the time."""
    carried: float = 0.0
    """Bytes of all transfers so far."""
    ends: list[tuple[float, int, Transfer]] = field(default_factory=list)
    """Heap of the ends, in bytes reached."""


class Network:
    """Links, and the transfers over them.

    Rates are found anew at each change, or with ``settle`` above 0 at most once in so many seconds: for large fleets.
    Then a transfer begins up to so much late, and what one leaves free is taken as late.
    """

    def __init__(self, env: simpy.Environment, settle: float = 0.0) -> None:
        """Begin without links."""
        self._env, self._settle = env, settle
        self._capacity = [UNLIMITED]
        self._bundles: dict[Path, Bundle] = {}
        self._bundle_of: dict[Path, Bundle] = {}
        self._active: dict[Bundle, None] = {}
        self._coming: list[Transfer] = []
        self._number = 0
        self._since = self._settled = 0.0
        self._timer, self._due_at = 0, float("inf")

    def add_link(self, bytes_per_second: float | None) -> int:
        """Return the number of a new link; None: it limits nothing."""
        self._capacity.append(bytes_per_second or UNLIMITED)
        return len(self._capacity) - 1

    @property
    def links(self) -> range:
        """All links."""
        return range(1, len(self._capacity))

    def capacity(self, link: int) -> float:
        """Return a link's bytes per second."""
        return self._capacity[link]

    def set_capacity(self, link: int, bytes_per_second: float) -> None:
        """Change a link that was limited from the beginning, also under transfers."""
        self._capacity[link] = bytes_per_second
        self._changed()

    @property
    def carried(self) -> Floats:
        """Bytes that crossed each limited link so far, by its number."""
        self._advance()
        found = np.zeros(len(self._capacity))
        for bundle in self._bundles.values():
            for link in bundle.path:
                found[link] += bundle.carried
        return found

    def send(self, path: Path, nbytes: float) -> Transfer:
        """Begin a transfer of ``nbytes`` over the links of ``path``."""
        bundle = self._bundle_of.get(path)
        if bundle is None:
            limited = tuple(link for link in path if self._capacity[link] < UNLIMITED)
            bundle = self._bundle_of[path] = self._bundles.setdefault(limited, Bundle(limited))
        transfer = Transfer(bundle, nbytes, self._env.event())
        self._coming.append(transfer)
        self._changed()
        return transfer

    def abort(self, transfer: Transfer) -> None:
        """End a transfer that is under way, without its event; nothing happens to one that is over."""
        if not transfer.over:
            self._advance()
            transfer.over = True
            if transfer.begin >= 0:
                transfer.bundle.count -= 1
            self._changed()

    def crossed(self, transfer: Transfer) -> float:
        """Return the bytes of a transfer, not aborted, that have crossed by now."""
        if transfer.over:
            return transfer.nbytes
        if transfer.begin < 0:
            return 0.0
        bundle = transfer.bundle
        reached = bundle.reached + bundle.rate * (self._env.now - self._since)
        return min(transfer.nbytes, reached - transfer.begin)

    def _advance(self) -> None:
        """Carry what the present rates have carried since the last time."""
        elapsed, self._since = self._env.now - self._since, self._env.now
        if elapsed > 0:
            for bundle in self._active:
                step = bundle.rate * elapsed
                bundle.reached += step
                bundle.carried += step * bundle.count

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
        for bundle in list(self._active):
            self._end(bundle)
        for transfer in self._coming:
            self._begin(transfer)
        self._coming.clear()
        self._settled = self._env.now
        if self._active:
            self._find_rates()

    def _end(self, bundle: Bundle) -> None:
        """End the transfers of a bundle of which nothing is left."""
        ends = bundle.ends
        smallest = max(_SMALLEST_BYTES, bundle.rate * _SMALLEST_SECONDS)
        while ends and (ends[0][2].over or ends[0][0] - bundle.reached <= smallest):
            end, _, transfer = heappop(ends)
            if not transfer.over:
                bundle.count -= 1
                bundle.carried += end - bundle.reached  # it was carried beyond its end, or nearly to it
                transfer.over = True
                transfer.done.succeed()
        if not bundle.count:
            bundle.reached = bundle.rate = 0.0
            ends.clear()
            del self._active[bundle]

    def _begin(self, transfer: Transfer) -> None:
        if transfer.over:
            return
        if transfer.nbytes <= _SMALLEST_BYTES:
            transfer.over = True
            transfer.done.succeed()
            return
        bundle = transfer.bundle
        self._number += 1
        transfer.begin = bundle.reached
        heappush(bundle.ends, (bundle.reached + transfer.nbytes, self._number, transfer))
        bundle.count += 1
        self._active[bundle] = None

    def _find_rates(self) -> None:
        bundles = list(self._active)
        rates = fair_rates([b.path for b in bundles], [b.count for b in bundles], self._capacity)
        first = float("inf")
        for bundle, rate in zip(bundles, rates, strict=True):
            bundle.rate = rate
            left = bundle.ends[0][0] - bundle.reached
            if left < first * rate:
                first = left / rate
        self._wake(self._env.now + max(first, self._settle))
