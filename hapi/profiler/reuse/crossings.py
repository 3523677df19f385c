"""The best splits for samples that are not kept, by the share that is: one, or two that alternate. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hapi.profiler.profile import Profile
from hapi.profiler.reuse.choice import Crossing
from hapi.profiler.reuse.facts import CodecCost, Prices, ReuseFacts
from hapi.profiler.reuse.job_cost import JobPricer
from hapi.profiler.stages.alternation import best_alternation
from hapi.profiler.stages.pipeline import Pipeline


class Crossings:
    """Finds the best crossing of an epoch. What is kept serves any of them."""

    def __init__(self, profile: Profile, facts: ReuseFacts, splits: Sequence[int], prices: Prices) -> None:
        """Choose among ``splits``, with the codecs that ``facts`` tells of.

        Args:
            profile: the measurements.
            facts: codecs on the wire.
            splits: those that may be taken.
            prices: of what an epoch takes.
        """
        self._bits, self._prices = profile.link.bits_per_second, prices
        self._ways = [(split, wire) for split in splits for wire in facts.wire_at(split)]
        self._rounded = facts.rounded
        self._later: dict[tuple[int, CodecCost, float], Crossing] = {}

    def _pipelines(self, pricer: JobPricer, share: float) -> list[tuple[CodecCost, Pipeline]]:
        cut = pricer.choice.cut
        return [
            (wire, pricer.at_split(split, wire, share))
            for split, wire in self._ways
            if not cut or split <= cut
        ]

    def _price(self, epoch: Pipeline) -> float:
        received, seconds = epoch.job.samples * epoch.sent_bytes, epoch.epoch(self._bits)
        return self._prices.of(received, epoch.server_epoch(), seconds)

    def later(self, pricer: JobPricer) -> Crossing | None:
        """Return the best crossing of one split once nothing more comes into a cache without room for all samples.

        None where there is no such time, or no other crossing then.
        """
        if not self.change(pricer):
            return None
        at = pricer.choice.cut, pricer.choice.codec, pricer.room
        if at not in self._later:
            wire, best = min(self._pipelines(pricer, pricer.room), key=lambda one: self._price(one[1]))
            self._later[at] = Crossing(split=best.split, wire=wire)
        return self._later[at]

    def change(self, pricer: JobPricer) -> bool:
        """Return whether the cache fills, has no room for all samples, and serves any split."""
        keeps = pricer.choice.mode == "keep here" and not self._rounded
        return keeps and not pricer.full and 0 < pricer.room < 1

    def two(self, pricer: JobPricer, share: float) -> Crossing | None:
        """Return the two splits that alternate best in epochs of which ``share`` is kept; None where one is as good."""
        ways = self._pipelines(pricer, share)
        found = best_alternation([pipeline for _, pipeline in ways], self._bits, self._prices)
        if found is None:
            return None
        wire, other_wire = (
            next(wire for wire, pipeline in ways if pipeline is one) for one in (found.one, found.other)
        )
        return Crossing(
            split=found.one.split, wire=wire, alternation=found.alternation, other_wire=other_wire
        )
