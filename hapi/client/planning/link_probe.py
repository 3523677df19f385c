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
    """When to leave, for a batch or two, a split that sends too little to show what the link is like.

    Without it a link that recovered would never be noticed at a split that was chosen since it was slow.
    Looks come ever more rarely, but at once when what little is sent comes much faster than before; where that can be
    told, only rarely from the beginning.
    """

    FIRST, LONGEST = 8, 64
    """Batches that show nothing after which a look is due: doubled each time, so that a link that stays slow costs
    little, up to the longest or to where a look takes its share."""
    SHARE = 0.02
    """Of all seconds that looks should take in the long run."""
    FASTER = 16.0
    """Times the link's rate that a look hopes for."""
    SHOWN_BYTES = 2 * ENOUGH_BYTES
    """Of a request's answer that shows a link: what of it was there before anybody looked does not count."""
    HINT, HINT_BYTES = 2.0, 16 << 10
    """Short stretches that come so many times as fast as any since the link was last seen are a reason to look now;
    they tell no rate, as a buffer on the way may have held them. What is shorter still comes in one piece always."""

    def __init__(self) -> None:
        self._after = self.FIRST
        self._unseen = 0
        self._bits, self._fastest, self._hints = 0.0, 0.0, 0

    def restart(self, after: int = FIRST) -> None:
        """The split has changed; the first look comes after so many batches."""
        self._after, self._unseen = max(self.FIRST, after), 0
        self._bits = 0.0

    def due(self, rates: Arrivals, bits: float) -> bool:
        """Whether it is time to look: too many batches have shown nothing, or the last ones hint at a faster link.

        ``rates``: the last batch's arrivals; ``bits``: the link's rate by the plan, in bits per second.
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
