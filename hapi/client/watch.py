"""The watch over a plan: have the measured stages left the estimate, and for how long?"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hapi.client.measuring import Meter, Snapshot, observed_between
from hapi.profiler.observe import Observed, Tier, link_rate
from hapi.profiler.profile import Job, Profile


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

    def __init__(self, meter: Meter, client: Tier, profile: Profile, job: Job) -> None:
        self._meter = meter
        self._client = client
        self._profile = profile
        self._job = job
        self._split: int | None = None
        self._before: Snapshot = {}
        self._seen: dict[str, deque[float]] = {}

    def restart(self) -> None:
        """What comes next is not the continuation of what was."""
        self._split = None
        self._seen.clear()

    def batch_done(
        self, split: int, seconds: float, rates: list[tuple[int, float]]
    ) -> tuple[Profile, str] | None:
        """(the profile as it is now, why) when a stage has left its estimate."""
        now = self._meter.snapshot()
        before, self._before = self._before, now
        if split != self._split:  # the first batch at a split shows the change, not the split
            self._split = split
            self._seen.clear()
            return None
        observed = observed_between(before, now, self._meter.servers, self._client).get(split)
        ratios = self._ratios(observed, rates)
        for stage in ("network", "server", "client"):
            if stage not in ratios:
                self._seen.pop(stage, None)
            else:
                self._seen.setdefault(stage, deque(maxlen=self.EVIDENCE)).append(ratios[stage])
        left = {stage: self._agreed(stage) for stage in ratios}
        changed = {stage: ratio for stage, ratio in left.items() if ratio is not None}
        if not changed:
            return None
        self._profile = _scaled(self._profile, changed)
        self._seen.clear()
        return self._profile, ", ".join(
            _in_words(stage, ratio, self._profile) for stage, ratio in changed.items()
        )

    def _agreed(self, stage: str) -> float | None:
        """The mean of the last ratios if all of them are beyond the margin on the same side."""
        seen = self._seen.get(stage, deque())
        if len(seen) < self.EVIDENCE:
            return None
        high = all(ratio > 1 + self.MARGIN for ratio in seen)
        low = all(ratio < 1 / (1 + self.MARGIN) for ratio in seen)
        return sum(seen) / len(seen) if high or low else None

    def _ratios(self, observed: Observed | None, rates: list[tuple[int, float]]) -> dict[str, float]:
        """Measured over estimated: the link's bits per second, the tiers' seconds a sample."""
        found: dict[str, float] = {}
        link = link_rate(rates)
        if link is not None:
            found["network"] = link[0] / self._profile.link.bits_per_second
        if observed is None:
            return found
        server = self._server_estimate(observed.split)
        if observed.server_cpu and server > 0:
            cost = sum(observed.server_cpu.values()) * observed.server_factor
            if observed.server.device != "cpu":
                cost = observed.server_wall.get("forward", 0.0)
            found["server"] = cost / observed.samples / observed.share / server
        client = self._client_estimate(observed.split)
        if client > 0:
            found["client"] = (observed.rest_seconds + observed.step_seconds) / observed.samples / client
        return found

    def _server_estimate(self, split: int) -> float:
        profile = self._profile
        forward = sum(layer.server_seconds for layer in profile.layers[:split])
        if profile.server_tier.device != "cpu":
            return forward / profile.server.share
        tier = profile.server_tier
        decode = tier.decode_seconds if split and profile.samples.encoded else 0.0
        sent = (profile.sent_bytes(split) + profile.link.sample_bytes) * tier.codec_seconds_per_byte
        return (forward + decode + sent + tier.overhead_seconds) / profile.server.share

    def _client_estimate(self, split: int) -> float:
        layers = self._profile.layers[split : self._profile.last_split]
        return sum(layer.client_seconds for layer in layers) + self._profile.step_seconds


def _scaled(profile: Profile, ratios: dict[str, float]) -> Profile:
    """``profile`` with the stages that have changed."""
    if "network" in ratios:
        link = replace(profile.link, bits_per_second=profile.link.bits_per_second * ratios["network"])
        profile = replace(profile, link=link)
    if "server" in ratios:
        share = min(1.0, max(1e-3, profile.server.share / ratios["server"]))
        profile = replace(profile, server=replace(profile.server, share=share))
    if "client" in ratios:
        k = ratios["client"]
        layers = tuple(replace(layer, client_seconds=layer.client_seconds * k) for layer in profile.layers)
        profile = replace(profile, layers=layers, step_seconds=profile.step_seconds * k)
    return profile


def _in_words(stage: str, ratio: float, profile: Profile) -> str:
    if stage == "network":
        return f"bandwidth is {profile.link.bits_per_second / 1e6:.4g} Mbit/s, {ratio:.2g} times the plan's"
    return f"the {stage} needs {ratio:.2g} times the plan's seconds"
