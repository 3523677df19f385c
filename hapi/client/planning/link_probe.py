"""A look at a link that the split's own traffic does not show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hapi.client.planning.drift import Drift, DriftDetector, shown_rate
from hapi.client.planning.split_range import SplitRange
from hapi.profiler.fit import ENOUGH_BYTES, Arrivals, link_rate
from hapi.profiler.profile import Job, Profile
from hapi.profiler.stages.alternation import Alternation
from hapi.profiler.strategies import plan, seconds_at


class LinkProbe:
    """Decides when to leave, for a batch or two, a split that sends too little to show the link.

    Without it a link that recovered would never be noticed at a split that was chosen since it was slow.
    The more a probe takes, the rarer they are.
    """

    WAIT = 64
    """Fewest batches that show nothing before a probe."""
    SHARE = 0.02
    """Share of all seconds that probes should take in the long run."""
    FASTER = 16.0
    """Times the link's rate that a look hopes for."""
    SHOWN_BYTES = 2 * ENOUGH_BYTES
    """Bytes of an answer that show a link; bytes that were there before the first look do not count."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Note that the split has changed."""
        self._wait, self._unseen = self.WAIT, 0
        self._probing: int | None = None
        """The split of a batch that shows the link, until what it showed is known."""

    def batch_done(
        self, split: int, rates: Arrivals, bounds: Arrivals, bits: float, choose: Callable[[], int | None]
    ) -> int | None:
        """Return the split at which the next batch should show the link; None for no such batch.

        That is when it was not seen for long and ``choose`` returns a split, or once more after a batch whose arrivals
        showed a faster link than ``bits``: they are known at the latest when it is done.
        """
        probe = None
        seen, _ = shown_rate(rates, bounds, bits)
        if seen is not None and seen > (1 + Drift.MARGIN) * bits:
            probe, self._probing = self._probing, None
        elif split == self._probing:
            self._probing = None
        if probe is None and self.due(rates):
            probe = self._probing = choose()
        return probe

    def due(self, rates: Arrivals) -> bool:
        """Return whether too many batches have shown nothing; ``rates`` are the last batch's arrivals."""
        self._unseen = 0 if link_rate(rates, sound=True) else self._unseen + 1
        if self._unseen < self._wait:
            return False
        self._unseen = 0
        return True

    def split(
        self, strategy: str, profile: Profile, job: Job, allowed: SplitRange, present: Alternation
    ) -> int | None:
        """Return the split to probe from: the one that sends least of those whose frames show the link, or
        most of all.

        Args:
            strategy: that would choose another split.
            profile: the present measurements.
            job: the training.
            allowed: splits that fit.
            present: what batches run at.

        Returns:
            The split; None when a faster link would make no other one better than the present.
        """
        link = replace(profile.link, bits_per_second=profile.link.bits_per_second * self.FASTER)
        faster = replace(profile, link=link)
        found = plan(strategy, faster, job)
        then = allowed.allowed(found.alternation or Alternation.only(allowed.best(found)))
        best, now = (seconds_at(faster, job, at) for at in (then, present))
        if best >= now * (1 - DriftDetector.HYSTERESIS):
            return None
        samples = min(job.request_size, profile.server.cos_batch)
        sent = {s: samples * profile.sent_bytes(s) for s in allowed.splits}
        enough = [s for s in sent if sent[s] >= self.SHOWN_BYTES]
        probe = min(enough, key=lambda s: sent[s]) if enough else max(sent, key=lambda s: sent[s])
        probing, staying = (seconds_at(profile, job, at) for at in (Alternation.only(probe), present))
        rare = int((probing / staying - 1) / self.SHARE) if staying > 0 else 0
        self._wait = max(self.WAIT, rare)
        return probe
