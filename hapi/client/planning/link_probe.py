"""A look at a link that the split's own traffic does not show."""

from __future__ import annotations

from dataclasses import replace

from hapi.client.planning.drift import Drift, DriftDetector
from hapi.client.planning.split_range import SplitRange
from hapi.profiler.cost import estimate
from hapi.profiler.fit import ENOUGH_BYTES, Arrivals, link_rate
from hapi.profiler.profile import Job, Profile
from hapi.profiler.strategies import plan


class LinkProbe:
    """Decides when to leave, for a batch or two, a split that sends too little to show the link.

    Without it a link that recovered would never be noticed at a split that was chosen since it was slow.
    Probes come ever more rarely, but at once when the little that is sent comes much faster than before;
    where that can be told, they are rare from the beginning.
    """

    FIRST, LONGEST = 8, 64
    """Batches that show nothing after which a look is due: doubled each time, so that a link that stays slow costs
    little, up to the longest or to where a look takes its share."""
    SHARE = 0.02
    """Share of all seconds that probes should take in the long run."""
    FASTER = 16.0
    """Times the link's rate that a look hopes for."""
    SHOWN_BYTES = 2 * ENOUGH_BYTES
    """Bytes of an answer that show a link; bytes that were there before the first look do not count."""
    HINT, HINT_BYTES = 2.0, 16 << 10
    """Factor by which short stretches must be faster than any since the link was last seen to cause a probe
    now, and their fewest bytes. They tell no rate, as a buffer on the way may have held them. Shorter ones
    always come in one piece.
    """

    def __init__(self) -> None:
        self._after = self.FIRST
        self._unseen = 0
        self._bits, self._fastest, self._hints = 0.0, 0.0, 0

    def restart(self, after: int = FIRST) -> None:
        """Note that the split has changed; the first probe comes after so many batches."""
        self._after, self._unseen = max(self.FIRST, after), 0
        self._bits = 0.0

    def due(self, rates: Arrivals, bits: float) -> bool:
        """Return whether a probe is due: too many batches have shown nothing, or the last hint at a faster
        link.

        ``rates`` are the last batch's arrivals, ``bits`` is the link's rate by the plan, in bits per second.
        """
        if link_rate(rates, sound=True):
            self._unseen = self._hints = 0
            return False
        self._unseen += 1
        hinted = self._hinted(rates, bits)
        if not hinted and self._unseen < (max(self._after, self.LONGEST) if self._fastest else self._after):
            return False
        self._unseen = 0
        return True

    def _hinted(self, rates: Arrivals, bits: float) -> bool:
        """Each hint must be so many times as fast as what the one before turned out to be nothing at."""
        if bits != self._bits:
            self._bits, self._fastest, self._hints = bits, 0.0, 0
        counted = [
            (nbytes, seconds) for nbytes, seconds in rates if nbytes >= self.HINT_BYTES and seconds > 0
        ]
        if not counted:
            return False
        pace = sum(nbytes for nbytes, _ in counted) / sum(seconds for _, seconds in counted)
        faster = 0 < self.HINT * self._fastest < pace
        self._hints = self._hints + 1 if faster else 0
        if faster and self._hints < Drift.EVIDENCE:
            return False  # one alone may be a chance, and is not what the others are compared with
        self._fastest = max(self._fastest, pace)
        self._hints = 0
        return faster

    def split(self, strategy: str, profile: Profile, job: Job, allowed: SplitRange, split: int) -> int | None:
        """The ``allowed`` split to look from; None when a faster link would make no other better than ``split``.

        That is the split that sends least of those whose frames are large enough to show the link, or most of all.
        """
        link = replace(profile.link, bits_per_second=profile.link.bits_per_second * self.FASTER)
        found = plan(strategy, replace(profile, link=link), job)
        best, now = (found.candidates[s].estimate for s in (allowed.best(found), split))
        if best.epoch_seconds >= now.epoch_seconds * (1 - DriftDetector.HYSTERESIS):
            return None
        samples = min(job.request_size, profile.server.cos_batch)
        sent = {s: samples * profile.sent_bytes(s) for s in allowed.splits}
        enough = [s for s in sent if sent[s] >= self.SHOWN_BYTES]
        looks = min(enough, key=lambda s: sent[s]) if enough else max(sent, key=lambda s: sent[s])
        there, here = (estimate(profile, job, s).epoch_seconds for s in (looks, split))
        longest = max(self.LONGEST, int((there / here - 1) / self.SHARE)) if here > 0 else self.LONGEST
        self._after = min(longest, 2 * self._after)
        return looks
