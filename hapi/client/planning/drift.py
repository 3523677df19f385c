"""The watch over a plan: whether the measured stages have left the estimate, and for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from hapi.client.planning.counts import CostMeter, Snapshot
from hapi.client.planning.observe import observed_between
from hapi.profiler.fit import (
    ENOUGH_BYTES,
    FAIR_SHARE,
    SMALLEST_SHARE,
    Arrivals,
    Observed,
    Tier,
    forward_seconds,
    link_rate,
)
from hapi.profiler.profile import Profile
from hapi.units import format_bandwidth

PARTS = {
    "forward": "the server's forward passes",
    "overhead": "the server's reading, decoding and sending",
    "suffix": "the client's frozen layers",
    "step": "the training step",
}
"""Parts of the tiers' seconds."""
STAGES = ("network", "share", *PARTS)


class Drift:
    """Detector for one stage: a two-sided cumulative sum (CUSUM; Page, Biometrika 1954) of log ratios.

    Deviations beyond :attr:`MARGIN` add up, smaller ones wear the sum off again. A stage that became twice or
    half of its estimate is told after :attr:`EVIDENCE` batches, a smaller change after more (one and a half
    times: after six), a change within the margin never. One wild batch tells nothing.
    """

    MARGIN = 0.25
    """Largest difference, as a share of the estimate, that counts as noise: one forward pass varies by 8%."""
    EVIDENCE = 2
    """Fewest batches that tell a change."""
    PLAIN = 2.0
    """A change by this factor is told after the fewest batches."""

    def __init__(self) -> None:
        self._sums = {1: 0.0, -1: 0.0}
        self._runs: dict[int, list[float]] = {1: [], -1: []}

    def add(self, ratio: float, batches: float = 1.0) -> float | None:
        """Add a batch's measured over estimated; return the change that it and earlier ones show, if they do.

        ``batches`` is the weight of the measurement, of which no more than the fewest count.
        """
        weight = min(max(1.0, batches), self.EVIDENCE)
        log = math.log(max(ratio, 1e-9))
        largest = math.log(self.PLAIN / (1 + self.MARGIN))
        # A batch adds its log ratio beyond the margin, at most as much as a change by PLAIN: one wild batch stays below
        # the threshold, and EVIDENCE such batches reach it.
        for sign, run in self._runs.items():
            self._sums[sign] += weight * min(largest, sign * log - math.log(1 + self.MARGIN))
            if self._sums[sign] <= 0:
                self._sums[sign] = 0.0
                run.clear()
                continue
            run.append(log)
            if self._sums[sign] > largest * (self.EVIDENCE - 1e-6):
                return math.exp(sum(run) / len(run))
        return None


class DriftDetector:
    """Compares each batch with the profile that the plan was made from; not thread-safe."""

    SIGNIFICANT = 0.2
    """Smallest share of a tier's seconds that a part of them must have to be compared: what is less is noise."""
    HYSTERESIS = 0.05
    """Share of an epoch's seconds that another split must gain before the split changes."""

    def __init__(
        self,
        meter: CostMeter,
        client: Tier,
        profile: Profile,
        batch_size: int,
        encoding: Callable[[int], float] = lambda split: 0.0,
    ) -> None:
        """Compare what ``meter`` counts with ``profile``.

        Args:
            meter: of the run.
            client: this side's resources.
            profile: the plan's.
            batch_size: samples of a training batch.
            encoding: seconds in which a server encodes a sample of a split for the wire; they are in no profile.
        """
        self._batch_size, self._encoding = batch_size, encoding
        self._meter = meter
        self._client = client
        self._profile = profile
        self._split: int | None = None
        self._before: Snapshot = {}
        self._drifts = {stage: Drift() for stage in STAGES}

    def restart(self) -> None:
        """Begin a pass, whose first batches only show how the pipeline fills."""
        self._split = None

    def batch_done(self, split: int, rates: Arrivals, bounds: Arrivals = ()) -> tuple[Profile, str] | None:
        """Return (the profile as it is now, reason) when a stage has left its estimate.

        ``rates`` has the arrivals since the last batch, ``bounds`` upper bounds of some arrivals' seconds.
        """
        now = self._meter.snapshot(split)
        before, self._before = self._before, now
        observed = None
        if split == self._split:  # else the sums since the last batch are of another split, or of none
            observed = observed_between(before, now, self._meter.servers, self._client).get(split)
        self._split = split
        ratios = self._ratios(observed)
        shown: dict[str, float | None] = {"network": self._network(split, rates, bounds)}
        shown |= {stage: self._drifts[stage].add(ratio) for stage, ratio in ratios.items()}
        changed = {stage: ratio for stage, ratio in shown.items() if ratio is not None}
        if not changed:
            return None
        self._drifts.update({stage: Drift() for stage in changed})
        why = ", ".join(_in_words(stage, ratio, self._profile) for stage, ratio in changed.items())
        self._profile = _scaled(self._profile, split, changed, self._estimated(split))
        return self._profile, why

    def _network(self, split: int, rates: Arrivals, bounds: Arrivals) -> float | None:
        """The change of the link that its arrivals tell, of which several batches' may have come at once."""
        expected = self._profile.link.bits_per_second
        bits, faster = shown_rate(rates, bounds, expected)
        if bits is None:
            return None
        nbytes = max(sum(n for n, _ in rates), faster)
        batches = nbytes / (self._batch_size * self._profile.sent_bytes(split))
        return self._drifts["network"].add(bits / expected, batches)

    def _ratios(self, observed: Observed | None) -> dict[str, float]:
        """Measured over estimated: the server's share, the tiers' seconds a sample."""
        found: dict[str, float] = {}
        if observed is None:
            return found
        if (share := self._share(observed)) is not None:
            found["share"] = share / self._profile.server.share
        estimated = self._estimated(observed.split)
        tiers = [_client_parts(observed)]
        if observed.crossed and observed.server.device == self._profile.server_tier.device:
            tiers.append(_server_parts(observed))
        for measured in tiers:
            both = [sum(measured.values()), sum(estimated[part] for part in measured)]
            for part, seconds in measured.items():
                shares = [_share_of(seconds, both[0]), _share_of(estimated[part], both[1])]
                if seconds > 0 and estimated[part] > 0 and max(shares) >= self.SIGNIFICANT:
                    found[part] = seconds / estimated[part]
        return found

    def _share(self, observed: Observed) -> float | None:
        """The part of the server that others leave, as a batch shows it; None: it shows nothing.

        A request that has little to do waits for one of others to end, whatever its share. And while others take
        half of the server and more, one for which nothing waits does not tell what they would leave to more work.
        """
        profile, known = self._profile, self._profile.server.share
        if not observed.crossed:
            return None
        if observed.slot_share < 1:
            own, whole = (self._server_seconds(s) for s in (observed.split, profile.last_split))
            small = own < self.SIGNIFICANT * whole
            return None if small else min(observed.share, observed.slot_share)
        return None if known < FAIR_SHARE >= observed.share else observed.share

    def _server_seconds(self, split: int) -> float:
        """The server's seconds for a sample, by the plan."""
        estimated = self._estimated(split)
        return estimated["forward"] + estimated["overhead"]

    def _estimated(self, split: int) -> dict[str, float]:
        """Seconds a sample of each part, whoever else is served."""
        profile, tier = self._profile, self._profile.server_tier
        decode = tier.decode_seconds if split else 0.0
        sent = (profile.sent_bytes(split) + profile.link.sample_bytes) * tier.codec_seconds_per_byte
        return {
            "forward": sum(layer.server_seconds for layer in profile.layers[:split]),
            "overhead": decode + sent + tier.overhead_seconds + self._encoding(split),
            "suffix": sum(layer.client_seconds for layer in profile.layers[split : profile.last_split]),
            "step": profile.step_seconds + profile.update_seconds / self._batch_size,
        }


def shown_rate(rates: Arrivals, bounds: Arrivals, expected: float) -> tuple[float | None, int]:
    """Return the link's rate that arrivals show, and the bytes that came faster than expected.

    Args:
        rates: (bytes, seconds) of arrivals.
        bounds: (bytes, upper bound of their seconds) of others, which can only show that a link is faster.
        expected: bits per second.

    Returns:
        Bits per second, None if nothing is shown; and bytes.
    """
    link = link_rate(rates, sound=True)
    faster = [(n, n * 8 / s) for n, s in bounds if n >= ENOUGH_BYTES and s > 0 and n * 8 / s > expected]
    found = [rate for _, rate in faster] + ([] if link is None else [link[0]])
    return max(found, default=None), sum(n for n, _ in faster)


def _share_of(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _client_parts(observed: Observed) -> dict[str, float]:
    return {
        "suffix": observed.suffix_seconds / observed.samples,
        "step": observed.step_seconds / observed.samples,
    }


def _server_parts(observed: Observed) -> dict[str, float]:
    """On a CPU all CPU seconds of the server, on a GPU its own wall seconds."""
    parts = {"forward": forward_seconds(observed) / observed.crossed}
    if observed.server.device == "cpu":
        overhead = sum(v for stage, v in observed.server_cpu.items() if stage not in ("forward", "model"))
        parts["overhead"] = overhead * observed.server_factor / observed.crossed
    return parts


def _scaled(
    profile: Profile, split: int, ratios: Mapping[str, float], estimated: Mapping[str, float]
) -> Profile:
    """``profile`` with the changed stages, as measured at ``split``.

    Layers that a tier did not run at that split change as the rest of its work did, if that was a good part
    beside them: nothing else is known of them. A few microseconds say nothing about them. Overestimated costs
    are never corrected, because the split that would measure them never runs; underestimated ones are tried
    and measured.
    """
    if "network" in ratios:
        link = replace(profile.link, bits_per_second=profile.link.bits_per_second * ratios["network"])
        profile = replace(profile, link=link)
    if "share" in ratios:
        before, waiting = profile.server.share, profile.server.waiting_seconds
        share = min(1.0, max(SMALLEST_SHARE, before * ratios["share"]))
        if before < 1:  # a request waits for as long as what others get is more than its own
            waiting *= (1 / share - 1) / (1 / before - 1)
        profile = replace(profile, server=replace(profile.server, share=share, waiting_seconds=waiting))
    overhead, step = ratios.get("overhead", 1.0), ratios.get("step", 1.0)
    server_factor, client_factor = ratios.get("forward", 1.0), ratios.get("suffix", 1.0)
    decode = overhead
    if split == 0:  # where a server reads and sends
        unmeasured = profile.server_tier.decode_seconds + sum(
            x.server_seconds for x in profile.layers[: profile.last_split]
        )
        decode = server_factor = (
            overhead if estimated["overhead"] >= DriftDetector.SIGNIFICANT * unmeasured else 1.0
        )
    if split == profile.last_split:
        unmeasured = sum(x.client_seconds for x in profile.layers[: profile.last_split])
        client_factor = step if estimated["step"] >= DriftDetector.SIGNIFICANT * unmeasured else 1.0
    layers = tuple(
        replace(
            x,
            server_seconds=x.server_seconds * server_factor,
            client_seconds=x.client_seconds * client_factor,
        )
        for x in profile.layers
    )
    tier = replace(
        profile.server_tier,
        decode_seconds=profile.server_tier.decode_seconds * decode,
        codec_seconds_per_byte=profile.server_tier.codec_seconds_per_byte * overhead,
        overhead_seconds=profile.server_tier.overhead_seconds * overhead,
    )
    return replace(
        profile,
        layers=layers,
        server_tier=tier,
        step_seconds=profile.step_seconds * step,
        update_seconds=profile.update_seconds * step,
    )


def _in_words(stage: str, ratio: float, before: Profile) -> str:
    if stage == "network":
        old = before.link.bits_per_second
        return f"bandwidth is {format_bandwidth(old * ratio)}, the plan had {format_bandwidth(old)}"
    if stage == "share":
        old = before.server.share
        return f"other jobs leave {old * ratio:.0%} of the server, in the plan {old:.0%}"
    return f"{PARTS[stage]}: {ratio:.2g} times the plan's seconds"
