"""A look at a link that the split's own traffic does not show."""

from __future__ import annotations

from dataclasses import replace

from hapi.client.choices import allowed
from hapi.client.watch import Watch
from hapi.profiler.decide import plan
from hapi.profiler.observe import ENOUGH_BYTES, Arrivals, link_rate
from hapi.profiler.profile import Job, Profile


class Look:
    """When to leave, for a batch or two, a split that sends too little to show what the link is like.

    Without it a link that recovered would never be noticed at a split that was chosen since it was slow.
    """

    FIRST, LONGEST = 8, 64
    """Batches that show nothing after which a look is due: doubled each time, so that a link that stays slow costs
    little."""
    FASTER = 16.0
    """Times the link's rate that a look hopes for."""
    SHOWN_BYTES = 2 * ENOUGH_BYTES
    """Of a request's answer that shows a link: what of it was there before anybody looked does not count."""

    def __init__(self) -> None:
        self._after = self.FIRST
        self._unseen = 0

    def restart(self, after: int = FIRST) -> None:
        """The split has changed; the first look comes after so many batches."""
        self._after, self._unseen = max(self.FIRST, after), 0

    def due(self, rates: Arrivals) -> bool:
        """Whether too many batches have shown nothing, of which the last one's arrivals are ``rates``."""
        self._unseen = 0 if link_rate(rates, sound=True) else self._unseen + 1
        if self._unseen < self._after:
            return False
        self._unseen = 0
        return True

    def split(self, strategy: str, profile: Profile, job: Job, splits: range, split: int) -> int | None:
        """Which of ``splits`` to look from; None when a faster link would make no other better than ``split``.

        That is the split that sends least of those whose frames are large enough to show the link, or most of all.
        """
        link = replace(profile.link, bits_per_second=profile.link.bits_per_second * self.FASTER)
        found = plan(strategy, replace(profile, link=link), job)
        best, now = (found.candidates[s].estimate for s in (allowed(found, splits[0], splits[-1]), split))
        if best.epoch_seconds >= now.epoch_seconds * (1 - Watch.HYSTERESIS):
            return None
        self._after = min(self.LONGEST, 2 * self._after)
        samples = min(job.request_size, profile.server.cos_batch)
        sent = {s: samples * profile.sent_bytes(s) for s in splits}
        enough = [s for s in sent if sent[s] >= self.SHOWN_BYTES]
        return min(enough, key=lambda s: sent[s]) if enough else max(sent, key=lambda s: sent[s])
