"""The watch over a plan: have the measured stages left the estimate, and for how long?"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hapi.client.measuring import Meter, Snapshot, observed_between
from hapi.profiler.observe import Observed, Tier, link_rate
from hapi.profiler.profile import Profile
from hapi.units import format_bandwidth

STAGES = ("network", "share", "server", "client")


class Watch:
    """Compares each batch with the profile that the plan was made from; not thread-safe.

    A stage has left its estimate when it differs by more than :attr:`MARGIN` in :attr:`EVIDENCE` batches after
    each other, in the same direction.
    """

    MARGIN = 0.25
    """Largest difference, as a share of the estimate, that counts as noise: one forward pass varies by 8%."""
    EVIDENCE = 2
    """Batches that must agree."""
    HYSTERESIS = 0.05
    """Share of an epoch's seconds that another split must gain before the split changes."""

    def __init__(self, meter: Meter, client: Tier, profile: Profile) -> None:
        self._meter = meter
        self._client = client
        self._profile = profile
        self._split: int | None = None
        self._before: Snapshot = {}
        self._seen: dict[str, deque[float]] = {}

    def restart(self) -> None:
        """A pass begins: its first batches show how the pipeline fills."""
        self._split = None

    def batch_done(self, split: int, rates: list[tuple[int, float]]) -> tuple[Profile, str] | None:
        """(the profile as it is now, why) when a stage has left its estimate; ``rates``: the link's since the last."""
        now = self._meter.snapshot()
        before, self._before = self._before, now
        observed = None
        if split == self._split:  # else the sums since the last batch are of another split, or of none
            observed = observed_between(before, now, self._meter.servers, self._client).get(split)
        self._split = split
        for stage, ratio in self._ratios(observed, rates).items():
            self._seen.setdefault(stage, deque(maxlen=self.EVIDENCE)).append(ratio)
        left = {stage: self._agreed(stage) for stage in STAGES}
        changed = {stage: ratio for stage, ratio in left.items() if ratio is not None}
        if not changed:
            return None
        for stage in changed:
            self._seen[stage].clear()
        why = ", ".join(_in_words(stage, ratio, self._profile) for stage, ratio in changed.items())
        self._profile = _scaled(self._profile, changed)
        return self._profile, why

    def _agreed(self, stage: str) -> float | None:
        """The mean of the last ratios if all of them are beyond the margin on the same side."""
        seen = self._seen.get(stage, deque())
        if len(seen) < self.EVIDENCE:
            return None
        high = all(ratio > 1 + self.MARGIN for ratio in seen)
        low = all(ratio < 1 / (1 + self.MARGIN) for ratio in seen)
        return sum(seen) / len(seen) if high or low else None

    def _ratios(self, observed: Observed | None, rates: list[tuple[int, float]]) -> dict[str, float]:
        """Measured over estimated: the link's bits per second, the server's share, the tiers' seconds a sample."""
        found: dict[str, float] = {}
        link = link_rate(rates, sound=True)
        if link is not None:
            found["network"] = link[0] / self._profile.link.bits_per_second
        if observed is None:
            return found
        found["share"] = observed.share / self._profile.server.share
        server = self._server_estimate(observed.split)
        cost = _server_cost(observed)
        if cost > 0 and server > 0 and observed.server.device == self._profile.server_tier.device:
            found["server"] = cost / server
        client = self._client_estimate(observed.split)
        if client > 0:
            found["client"] = (observed.rest_seconds + observed.step_seconds) / observed.samples / client
        return found

    def _server_estimate(self, split: int) -> float:
        """Seconds a sample of its own work there, whoever else is served."""
        profile, tier = self._profile, self._profile.server_tier
        forward = sum(layer.server_seconds for layer in profile.layers[:split])
        if tier.device != "cpu":
            return forward
        decode = tier.decode_seconds if split and profile.samples.encoded else 0.0
        sent = (profile.sent_bytes(split) + profile.link.sample_bytes) * tier.codec_seconds_per_byte
        return forward + decode + sent + tier.overhead_seconds

    def _client_estimate(self, split: int) -> float:
        layers = self._profile.layers[split : self._profile.last_split]
        return sum(layer.client_seconds for layer in layers) + self._profile.step_seconds


def _server_cost(observed: Observed) -> float:
    if observed.server.device != "cpu":
        return observed.server_wall.get("forward", 0.0) / observed.samples
    return sum(observed.server_cpu.values()) * observed.server_factor / observed.samples


def _scaled(profile: Profile, ratios: dict[str, float]) -> Profile:
    """``profile`` with the stages that have changed."""
    if "network" in ratios:
        link = replace(profile.link, bits_per_second=profile.link.bits_per_second * ratios["network"])
        profile = replace(profile, link=link)
    if "share" in ratios:
        share = min(1.0, max(1e-3, profile.server.share * ratios["share"]))
        profile = replace(profile, server=replace(profile.server, share=share))
    server, client = ratios.get("server", 1.0), ratios.get("client", 1.0)
    layers = tuple(
        replace(x, server_seconds=x.server_seconds * server, client_seconds=x.client_seconds * client)
        for x in profile.layers
    )
    tier = profile.server_tier
    if tier.device == "cpu":  # all of what _server_estimate adds up; else it would never agree again
        tier = replace(
            tier,
            decode_seconds=tier.decode_seconds * server,
            codec_seconds_per_byte=tier.codec_seconds_per_byte * server,
            overhead_seconds=tier.overhead_seconds * server,
        )
    return replace(profile, layers=layers, server_tier=tier, step_seconds=profile.step_seconds * client)


def _in_words(stage: str, ratio: float, before: Profile) -> str:
    if stage == "network":
        old = before.link.bits_per_second
        return f"bandwidth is {format_bandwidth(old * ratio)}, the plan had {format_bandwidth(old)}"
    if stage == "share":
        old = before.server.share
        return f"other jobs leave {old * ratio:.0%} of the server, in the plan {old:.0%}"
    return f"the {stage} needs {ratio:.2g} times the plan's seconds"
