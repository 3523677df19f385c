"""A server's measurements of seconds per sample over the COS batch, and the size that it tries next. Pure.

HAPI (later text, section 4.4) found nothing gained beyond a certain COS batch, and too small a one to be
waste. That point differs by layers, input and device, so it is searched: a *look* tries powers of two from
the present choice on, upwards and downwards, as long as they are not clearly slower, and settles on the
smallest of the flat part.

    look: start -> upwards -> downwards -> settled (choice) -> looks again, rarely, or soon when the speed has changed
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from hapi.errors import UsageError
from hapi.server.batching.policies import FIXED_BATCH, FLAT, SLOW, flat_batch

OBSERVATIONS = 4
"""Forward passes of each size in a look. The second fastest counts: the first pass of a size prepares kernels and
memory, and what else disturbs a pass makes it slower, not faster."""
LOWEST = 16
"""Smallest size that is tried by itself. Powers of two from 16 on gave the same bits for all seven families on a CPU,
with one thread and with two; smaller and odd ones take other kernels there
(docs/decisions/0009-same-numbers.md)."""
BEYOND = 1.05
"""Times the best so far from which on a look goes no further in its direction. More than ``FLAT``: curves have
bumps."""
RARELY, SOON = 50, 4
"""Samples at the choice, in multiples of those that the look before took, until the next look: usually, and when the
speed has changed. So a look costs at most that part of the samples."""
CHANGED = 1.25
"""Times faster or slower than when the choice was made that counts as changed."""
MAX_REFUSALS = 4
"""Requests in a row that were too small for the size that is looked at; then the look goes on without it."""
KEYS = 1024
"""Keys that are remembered, the last ones used: a client may ask for any number of them."""


@dataclass
class _BatchSizeSearch:
    """Sizes that are tried from ``start`` on; a chain of powers of two without gaps."""

    start: int
    lowest: int
    times: dict[int, deque[float]] = field(default_factory=dict)
    """Seconds per sample by size, of this look."""
    samples: int = 0
    """Samples of all its passes."""
    ended: set[int] = field(default_factory=set)
    """Directions (1 upwards, -1 downwards) in which it goes no further."""
    proposed: int = 0
    refused: int = 0
    """Requests in a row that could not have ``proposed``."""

    def medians(self) -> dict[int, float]:
        return {size: statistics.median_low(times) for size, times in self.times.items()}

    def add(self, size: int, each: float) -> None:
        """A pass of ``size`` samples took ``each`` seconds a sample."""
        if not self.enough(size):
            self.samples += size
        self.times.setdefault(size, deque(maxlen=OBSERVATIONS)).append(each)

    def enough(self, size: int) -> bool:
        """Return whether ``size`` was seen often enough; two passes are, when both were far slower than
        another size.
        """
        times = self.times.get(size, ())
        if len(times) < 2 or len(times) >= OBSERVATIONS:
            return len(times) >= OBSERVATIONS
        others = [min(t) for other, t in self.times.items() if other != size]
        return bool(others) and min(times) > SLOW * min(others)

    def next(self) -> int | None:
        """The size to try now; None when the look is over."""
        if not self.enough(self.start):
            return self.start
        medians = self.medians()
        limit = BEYOND * min(medians.values())
        for way, end in ((1, max(medians)), (-1, min(medians))):
            if way in self.ended:
                continue
            if not self.enough(end):
                return end
            following = end * 2 if way > 0 else end // 2
            if medians[end] <= limit and following >= self.lowest:
                return following
        return None

    def skip(self, size: int) -> None:
        """Go on without ``size``."""
        self.ended.add(1 if size > self.start else -1)


@dataclass
class _Known:
    """Knowledge of one key."""

    search: _BatchSizeSearch | None
    choice: int = FIXED_BATCH
    curve: Mapping[int, float] | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=OBSERVATIONS))
    """Seconds per sample at the choice, since it was made."""
    search_samples: int = 0
    since: int = 0
    """Samples since the last look."""

    def due(self) -> bool:
        """Return whether it is time for another look."""
        if self.since >= RARELY * self.search_samples:
            return True
        return self.since >= SOON * self.search_samples and self.changed()

    def changed(self) -> bool:
        """Return whether the choice takes far more or less time than when it was made."""
        if self.curve is None or len(self.recent) < OBSERVATIONS:
            return False
        ratio = statistics.median_low(self.recent) / self.curve[self.choice]
        return not 1 / CHANGED < ratio < CHANGED


class TimeCurves:
    """Seconds per sample by COS batch, for each key; not thread-safe.

    A key is whatever makes forward passes comparable: the front's identity and the shape of one sample. All is decided
    by the observations alone, so the same ones give the same proposals.

    Bounds. A look takes at most ``OBSERVATIONS`` passes of each power of two that it tries, which are fewer than
    ``2 * OBSERVATIONS * largest`` samples (passes that were under way beside them not counted), and two passes of a
    size that is more than ``SLOW`` times slower than another. It comes after ``RARELY`` times as many samples, or after
    ``SOON`` times as many when the speed has changed. With observations off by a part ``e`` at most, the choice is
    within ``FLAT * (1 + e) / (1 - e)`` of the fastest size tried.
    """

    def __init__(self, keys: int = KEYS, lowest: int = LOWEST) -> None:
        """Remember ``keys`` keys; ``lowest`` is the smallest size that is tried where a request may have it."""
        if keys < 1 or lowest < 1:
            raise UsageError(f"time curves of {keys} keys from size {lowest} on; expected at least 1")
        self._keys, self._lowest = keys, lowest
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()

    def propose(self, key: Hashable, largest: int) -> int:
        """Return the COS batch for the next request: the size being tried, else the choice; never above
        ``largest``.

        :class:`UsageError` for a ``largest`` below 1.
        """
        if largest < 1:
            raise UsageError(f"a COS batch of at most {largest} samples; expected at least 1")
        known = self._of(key)
        if known.search is None and largest >= known.choice and known.due():
            known.search = _BatchSizeSearch(
                known.choice, self._lowest, ended={1} if 2 * known.choice > largest else set()
            )
        return min(self._wanted(known, largest), largest)

    def observe(self, key: Hashable, batch: int, seconds: float) -> None:
        """Record the seconds of a forward pass.

        It counts for this size alone, and only where it is the choice or part of the search: a request's last
        COS batch, which may be of any size, tells nothing about another one.

        Args:
            key: makes passes comparable.
            batch: samples of the pass.
            seconds: by :func:`hapi.profiler.timing.work_clock`.

        Raises:
            UsageError: there is less than one sample, or no time.
        """
        if batch < 1 or not 0 < seconds < float("inf"):
            raise UsageError(
                f"a pass of {batch} samples took {seconds} seconds; expected at least 1, above 0"
            )
        known, each = self._of(key), seconds / batch
        search = known.search
        if search is None:
            known.since += batch
            if batch == known.choice:
                known.recent.append(each)
        elif batch in search.times or batch == search.next():
            search.add(batch, each)
            if search.next() is None:
                _settle(known, search)

    def curve(self, key: Hashable) -> Mapping[int, float] | None:
        """Seconds per sample by COS batch, as the last look found them, for
        :class:`hapi.server.batching.policies.Request`.

        None while a look is under way: then a request should have just what :meth:`propose` says.
        """
        known = self._known.get(key)
        return None if known is None or known.search is not None else known.curve

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._known)

    def _of(self, key: Hashable) -> _Known:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(_BatchSizeSearch(FIXED_BATCH, self._lowest))
            if len(self._known) > self._keys:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known

    def _wanted(self, known: _Known, largest: int) -> int:
        """Size that is being tried; a size that no request can have is given up after a while."""
        while (search := known.search) is not None:
            size = search.next()
            if size is None:
                _settle(known, search)
                break
            if size <= largest:
                search.proposed, search.refused = size, 0
                return size
            search.refused = search.refused + 1 if search.proposed == size else 1
            search.proposed = size
            if search.refused < MAX_REFUSALS:
                return flat_batch(search.medians()) if search.times else known.choice
            if not search.times:  # not even the first size: begin at one that they can have
                known.search = _BatchSizeSearch(_power(largest), self._lowest)
            elif size == search.start:  # seen, but not often enough
                _settle(known, search)
            else:
                search.skip(size)
        return known.choice


def _settle(known: _Known, search: _BatchSizeSearch) -> None:
    """The look is over: choose."""
    known.curve = search.medians()
    known.choice = flat_batch(known.curve, FLAT)
    known.search, known.search_samples, known.since = None, search.samples, 0
    known.recent.clear()


def _power(largest: int) -> int:
    """The largest power of two up to ``largest``."""
    return 1 << (largest.bit_length() - 1)
