"""Fitting a :class:`Profile` to the costs of real requests and batches. Pure.

HAPI, section 4.3: the job itself is measured at two splits, the freeze (the least that the client can do) and
the earliest one (the most), and everything between is modelled. Both tiers time their own layers where they
run them; a layer that one tier never ran is taken from the other, scaled by how the two compare on the layers
that both ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hapi.profiler.profile import (
    LayerProfile,
    LinkProfile,
    Profile,
    SampleProfile,
    ServerProfile,
    TierProfile,
)

ENOUGH_BYTES, ENOUGH_SECONDS = 96 << 10, 0.08
"""A shorter stretch of arrivals with fewer bytes may have come out of some buffer on the way at once."""
LARGEST_VARIATION = 0.9
FAIR_SHARE = 0.5
"""Share of a server's device that is taken to be left to us at least, when others take all they can get and nothing of
ours waits."""
SMALLEST_SHARE = 1e-3

Arrivals = Sequence[tuple[int, float]]
"""(bytes, seconds) of what arrived over a link."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Resources of one side."""

    device: str = "cpu"
    processors: int = 1
    threads: int = 1
    running: int = 4
    """Server: requests worked on at a time."""
    reuse: bool = True
    """Server: layers stay loaded between requests."""
    devices: int = 1
    """Server: devices that run forward passes at the same time."""
    count: int = 1
    """Servers, each on its own machine, that share the work and are taken for alike."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Sums of the costs of one split's batches."""

    split: int
    batches: int
    samples: int
    cached: int = 0
    """Samples among them that the client had on its disk, without work for servers and link."""
    bytes_received: int
    requests: int
    suffix_seconds: float
    """The client's seconds in the frozen layers after the split."""
    step_seconds: float
    """The client's seconds in what is trained."""
    request_seconds: float = 0.0
    """Shortest time of a request beside its bytes and the server's work for it."""
    client_layers: tuple[float, ...] = ()
    """Seconds in each of the layers split+1..last_split, of ``client_timed`` samples."""
    client_timed: int = 0
    receive_seconds: float = 0.0
    decode_seconds: float = 0.0
    client_other_seconds: float = 0.0
    """CPU seconds of the client beside all these."""
    server_cpu: Mapping[str, float]
    """CPU seconds of the stages that come with every request; where layers stay loaded, loading them is none.
    Several servers' seconds are scaled to one server that could do alone what they do together.
    """
    server_wall: Mapping[str, float]
    server_layers: tuple[float, ...] = ()
    """Seconds in each of the layers 1..split, of ``server_timed`` samples."""
    server_timed: int = 0
    server_factor: float = 1.0
    """CPU seconds of the whole server process, but for threads that help a forward pass, over those that its
    requests' stages account for."""
    share: float = 1.0
    """Share of the server's device that other tenants left, by what they used of it; :data:`FAIR_SHARE` at least."""
    slot_share: float = 1.0
    """Share of the server's slots that our requests got while they waited for one; 1 if they hardly waited."""
    cos_batch: int = 0
    server: Tier = Tier()

    @property
    def crossed(self) -> int:
        """Return the samples that the servers were asked for."""
        return self.samples - self.cached


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Facts of a job before it runs: layers with their sizes and operations, seconds all 0."""

    model: str
    freeze: int
    last_split: int
    layers: tuple[LayerProfile, ...]
    samples: SampleProfile
    client: Tier
    optimizer_bytes_per_parameter_byte: float = 1.0
    offloaded_bytes: int = 0
    one_machine: bool = False
    """True when the servers run on the client's machine."""
    ranks: int = 1
    """Processes of the training, which share the link and the servers."""
    local_ranks: int = 1
    """Those of them on this machine; :attr:`client` is the part of one."""


def link_rate(rates: Arrivals, *, sound: bool = False) -> tuple[float, float] | None:
    """(bits per second, standard deviation over mean) of a link from (bytes, seconds) of arrivals; None without any.

    The upper quartile by bytes: an arrival may be slowed down by a busy sender or reader, never hurried. Stretches
    that are too short for that count only when there are no others, and with ``sound`` never.
    """
    known = [(nbytes, seconds) for nbytes, seconds in rates if nbytes > 0 and seconds > 0]
    long = [(n, s) for n, s in known if n >= ENOUGH_BYTES or s >= ENOUGH_SECONDS]
    counted = long if long or sound else known
    chosen = sorted(((n, n * 8 / s) for n, s in counted), key=lambda pair: pair[1])
    if not chosen:
        return None
    total = sum(nbytes for nbytes, _ in chosen)
    passed, bits = 0, chosen[-1][1]
    for nbytes, rate in chosen:
        passed += nbytes
        if passed >= 0.75 * total:
            bits = rate
            break
    mean = sum(nbytes * rate for nbytes, rate in chosen) / total
    spread = (sum(nbytes * (rate - mean) ** 2 for nbytes, rate in chosen) / total) ** 0.5
    return bits, min(LARGEST_VARIATION, spread / mean)


def profile_of(
    sizes: Sizes,
    observed: Mapping[int, Observed],
    link: tuple[float, float],
    notes: tuple[str, ...] = (),
) -> Profile:
    """Return the profile that fits the observations.

    With no observation all seconds are 0: such a profile still has bytes and memory.

    Args:
        sizes: facts of the job.
        observed: costs of batches, by split.
        link: bits per second, and their variation.
        notes: origin of the figures.
    """
    observed = observed or {sizes.freeze: _nothing(sizes.freeze)}
    late = max(observed.values(), key=lambda o: o.split)
    early = min(observed.values(), key=lambda o: o.split)
    server, client = _layer_seconds(sizes, observed)
    tier = late.server
    return Profile(
        model=sizes.model,
        freeze=sizes.freeze,
        last_split=sizes.last_split,
        layers=tuple(
            replace(layer, server_seconds=s, client_seconds=c)
            for layer, s, c in zip(sizes.layers, server, client, strict=True)
        ),
        samples=sizes.samples,
        server=ServerProfile(
            read_seconds=_mean(
                observed,
                lambda o: o.server_wall.get("read", 0.0) - o.server_cpu.get("read", 0.0),
                crossed=True,
            ),
            model_load_seconds=0.0
            if tier.reuse
            else _ratio(late.server_wall.get("model", 0.0), late.requests),
            concurrency=tier.running * tier.count,
            waiting_seconds=_ratio(early.server_wall.get("queue", 0.0), early.requests),
            cos_batch=max(1, late.cos_batch),
            servers=tier.count,
            share=max(SMALLEST_SHARE, min(late.share, late.slot_share)),
        ),
        server_tier=_server_tier(sizes, observed, tier),
        client_tier=_client_tier(sizes, observed),
        link=LinkProfile(
            bits_per_second=link[0],
            variation=link[1],
            request_seconds=min((o.request_seconds for o in observed.values() if o.requests), default=0.0),
            sample_bytes=_sample_bytes(sizes, observed),
        ),
        step_seconds=_mean(observed, lambda o: o.step_seconds),
        update_seconds=0.0,
        optimizer_bytes_per_parameter_byte=sizes.optimizer_bytes_per_parameter_byte,
        offloaded_bytes=sizes.offloaded_bytes,
        one_machine=sizes.one_machine,
        ranks=sizes.ranks,
        local_ranks=sizes.local_ranks,
        notes=notes,
    )


def _nothing(split: int) -> Observed:
    return Observed(
        split=split,
        batches=0,
        samples=0,
        bytes_received=0,
        requests=0,
        suffix_seconds=0.0,
        step_seconds=0.0,
        server_cpu={},
        server_wall={},
    )


def _ratio(total: float, count: float) -> float:
    return max(0.0, total) / count if count else 0.0


def _mean(
    observed: Mapping[int, Observed], cost: Callable[[Observed], float], crossed: bool = False
) -> float:
    """Seconds a sample over all splits together; ``crossed``: of those that the servers were asked for."""
    samples = sum(o.crossed if crossed else o.samples for o in observed.values())
    return _ratio(sum(cost(o) for o in observed.values()), samples)


def _sample_bytes(sizes: Sizes, observed: Mapping[int, Observed]) -> float:
    """Bytes on the wire beyond the content, per sample."""
    outputs = (sizes.samples.stored_bytes, *(layer.output_bytes for layer in sizes.layers))
    smallest = min(observed.values(), key=lambda o: outputs[o.split])
    return max(0.0, _ratio(smallest.bytes_received, smallest.crossed) - outputs[smallest.split])


def _layer_seconds(sizes: Sizes, observed: Mapping[int, Observed]) -> tuple[list[float], list[float]]:
    """Seconds a sample of every layer on the server and on the client."""
    count = len(sizes.layers)
    server: list[float | None] = [None] * count
    client: list[float | None] = [None] * count
    for o in sorted(observed.values(), key=lambda o: o.split):  # the server's most complete comes last
        _fill(server, 0, o.server_layers, o.server_timed, _ratio(forward_seconds(o), o.samples))
    for o in sorted(observed.values(), key=lambda o: -o.split):  # and the client's
        _fill(client, o.split, o.client_layers, o.client_timed, _ratio(o.suffix_seconds, o.samples))
    return _completed(sizes, server, client), _completed(sizes, client, server)


def forward_seconds(o: Observed) -> float:
    """Return the seconds of the server's forward passes: CPU seconds if one thread runs them, else wall
    seconds.
    """
    cpu = o.server_cpu.get("forward", 0.0) if o.server.device == "cpu" and o.server.threads == 1 else 0.0
    return cpu * o.server_factor or o.server_wall.get("forward", 0.0)


def _fill(into: list[float | None], start: int, timed: Sequence[float], samples: int, whole: float) -> None:
    """Layers from ``start`` on as timed one by one, scaled to what they take together."""
    total = sum(timed)
    if not samples or total <= 0:
        return
    scale = whole * samples / total if whole > 0 else 1.0
    for i, seconds in enumerate(timed[: len(into) - start]):
        into[start + i] = max(0.0, seconds) * scale / samples


def _completed(sizes: Sizes, own: list[float | None], other: list[float | None]) -> list[float]:
    """``own`` with its gaps filled from the ``other`` tier, and those of both by operations."""
    both = [(a, b) for a, b in zip(own, other, strict=True) if a is not None and b is not None]
    scale = _ratio(sum(a for a, _ in both), sum(b for _, b in both)) or 1.0
    filled = [
        a if a is not None else (None if b is None else b * scale) for a, b in zip(own, other, strict=True)
    ]
    flops = [layer.flops for layer in sizes.layers]
    known = [(s, f) for s, f in zip(filled, flops, strict=True) if s is not None]
    per_flop = _ratio(sum(s for s, _ in known), sum(f for _, f in known))
    return [s if s is not None else f * per_flop for s, f in zip(filled, flops, strict=True)]


def _server_tier(sizes: Sizes, observed: Mapping[int, Observed], tier: Tier) -> TierProfile:
    decoding = {s: o for s, o in observed.items() if s}
    return TierProfile(
        device=tier.device,
        processors=tier.processors,
        threads=min(tier.threads, tier.processors),
        devices=tier.devices,
        decode_seconds=_mean(decoding, lambda o: o.server_cpu.get("decode", 0.0) * o.server_factor),
        codec_seconds_per_byte=_ratio(
            sum(o.server_cpu.get("send", 0.0) * o.server_factor for o in observed.values()),
            sum(o.bytes_received for o in observed.values()),
        ),
        overhead_seconds=_mean(
            observed, lambda o: o.server_cpu.get("read", 0.0) * o.server_factor, crossed=True
        ),
        to_device_seconds_per_byte=0.0,  # a part of the forward stage, as the server measures it
        from_device_seconds_per_byte=_ratio(
            sum(o.server_wall.get("copy_out", 0.0) for o in observed.values()),
            sum(o.bytes_received for o in observed.values()),
        ),
    )


def _client_tier(sizes: Sizes, observed: Mapping[int, Observed]) -> TierProfile:
    at_zero = {s: o for s, o in observed.items() if s == 0}
    decode = _mean(at_zero, lambda o: o.decode_seconds)
    if not at_zero:  # never done here: as on the server
        decode = _mean({s: o for s, o in observed.items() if s}, lambda o: o.server_cpu.get("decode", 0.0))
    return TierProfile(
        device=sizes.client.device,
        processors=sizes.client.processors,
        threads=min(sizes.client.threads, sizes.client.processors),
        decode_seconds=decode,
        codec_seconds_per_byte=_ratio(
            sum(o.receive_seconds for o in observed.values()),
            sum(o.bytes_received for o in observed.values()),
        ),
        overhead_seconds=_mean(observed, lambda o: o.client_other_seconds),
        to_device_seconds_per_byte=0.0,  # a part of the frozen layers' and the step's seconds
        from_device_seconds_per_byte=0.0,
    )
