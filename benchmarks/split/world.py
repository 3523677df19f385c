"""A world whose costs are known: a meter that shows what batches would cost if a profile were the truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hapi.client.loading.link_stats import Forward
from hapi.client.planning.counts import ClientCounts, Snapshot, SplitCounts, TrafficCounts, Work
from hapi.profiler.fit import Sizes, Tier
from hapi.profiler.profile import Profile


def sizes_in(profile: Profile) -> Sizes:
    """Return the facts of the profile's job before it runs."""
    return Sizes(
        model=profile.model,
        freeze=profile.freeze,
        last_split=profile.last_split,
        layers=tuple(replace(x, server_seconds=0.0, client_seconds=0.0) for x in profile.layers),
        samples=profile.samples,
        client=Tier(device=profile.client_tier.device),
    )


class World:
    """Stands in for a :class:`hapi.client.planning.meter.Meter`; :meth:`batch` is a batch that was done."""

    def __init__(self, true: Profile) -> None:
        self.true = true
        self.noise: Callable[[], float] = lambda: 1.0
        """Factor of each cost."""
        self.slower = 1.0
        """Times as long as in truth that the client takes for its layers."""
        self.pages = 0
        """New pages that the client touches for a batch."""
        self.server_slower, self.server_pages = 1.0, 0
        """As much of the server for each request, which alone shows it in what it reports of single requests."""
        self.servers: dict[int, Tier] = {}
        self.share = 1.0
        """Share of the server that other jobs leave."""
        self.slot_share: Callable[[int], float] = lambda split: 1.0
        """Share of its slots that requests of a split get, as they wait for one."""
        self.count = 1
        """Servers that share the work."""
        self.counts: dict[int, SplitCounts] = {}
        self._forwards: list[Forward] = []

    def snapshot(self, split: int | None = None) -> Snapshot:
        """All sums so far, by split; or those of ``split`` alone."""
        return {s: counts for s, counts in self.counts.items() if split in (None, s)}

    def take_forwards(self) -> list[Forward]:
        """The forward passes of the requests since last asked."""
        taken, self._forwards = self._forwards, []
        return taken

    def batch(self, split: int, samples: int = 10, timed: bool = False) -> list[tuple[int, float]]:
        """Count a batch; what the link showed meanwhile."""
        true, noise = self.true, self.noise
        server, client, nbytes = true.server_tier, true.client_tier, round(samples * true.sent_bytes(split))
        server_side = [self.server_slower * x.server_seconds * samples for x in true.layers[:split]]
        client_side = [self.slower * x.client_seconds * samples for x in true.layers[split : true.last_split]]
        stages = {
            "decode": samples * server.decode_seconds * noise() if split else 0.0,
            "send": nbytes * server.codec_seconds_per_byte * noise(),
            "read": samples * server.overhead_seconds * noise(),
            "forward": sum(server_side) * noise(),
        }
        work = sum(stages.values())
        traffic = TrafficCounts(
            requests=2, samples=samples, bytes_received=nbytes, cos_batch=5,
            receive_cpu=nbytes * client.codec_seconds_per_byte * noise(),
            decode_cpu=0.0 if split else samples * client.decode_seconds * noise(),
            server_cpu=stages, server_wall=stages | {"queue": 1 / self.slot_share(split) - 1}, work=work,
            process_cpu=work, clock=1.0, others=1.0 - self.share,
        )  # fmt: skip
        step = Work(samples, self.slower * samples * true.step_seconds * noise(), self.pages)
        suffix = Work(0 if split == true.last_split else samples, sum(client_side) * noise(), self.pages)
        main = step.seconds + suffix.seconds
        others = traffic.receive_cpu + traffic.decode_cpu + samples * client.overhead_seconds
        own = ClientCounts(
            batches=1, samples=samples, main_cpu=main, process_cpu=main + others, step=step,
            suffix=Work() if timed else suffix,
            timed=replace(suffix, samples=samples, layers=tuple(client_side)) if timed else Work(),
        )  # fmt: skip
        self.counts[split] = self.counts.get(split, SplitCounts()) + SplitCounts(client=own, traffic=traffic)
        if split:
            each, half = stages["forward"] / 2, tuple(seconds / 2 for seconds in server_side)
            layers = half if timed else ()
            forward = Forward(split, samples // 2, each, each, self.server_pages, layers)
            self._forwards += [forward, forward]
        self.servers[split] = Tier(device=server.device, running=true.server.concurrency, count=self.count)
        return [(nbytes, nbytes * 8 / (true.link.bits_per_second * self.noise()))]
