"""Samples at a time for each request: every batch adaptation policy behind one name. Pure.

A policy gives the bounds of a request's COS batch. Admission and the division of memory are the same for all
(:func:`adapt`):

``fixed``
    16 samples (HAPI, later text, section 4.4).
``adaptive``
    Between the provider's smallest and the client's largest batch, as much memory used as possible (earlier text,
    section 4.5, equation 1).
``auto``
    Ours. At most the smallest batch on the flat part of the measured time curve, since more memory buys no time beyond
    it; at least the smallest batch that is not much slower, since another request may well wait instead.

Each device has its own queue and its own adaptation (earlier text, section 4.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hapi.errors import DeviceMemoryError, UsageError
from hapi.server.batching.memory_shares import Bounds, raise_batches

FIXED_BATCH = 16
"""Samples (HAPI, later text, section 4.4); also where nothing was measured yet."""
FLAT = 1.02
"""Seconds per sample over the best that still count as flat; of the 3% that the default may lose at most."""
SLOW = 1.25
"""Seconds per sample over the best from which on ``auto`` lets a request wait rather than run with less memory."""
GATHER_SECONDS = 0.005
"""Seconds that a caller should wait for more requests before it adapts (earlier text, section 4.5: "a small
amount of time"; a fifth of the 25 ms that its adaptation takes).
"""
MAX_REQUESTS = 4096
"""Queued requests in one adaptation."""
MAX_BYTES = 1 << 48
"""Largest number of bytes that is taken for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Frozen weights that are in memory once, however many requests use them: a whole prefix, or one layer of
    it.
    """

    key: str
    """Key of their content, such as a digest."""
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A queued request's demands on the device. Bytes as :mod:`hapi.server.batching.forward_memory` predicts
    them.
    """

    id: str
    samples: int
    sample_bytes: int
    """Bytes of each sample of a COS batch at the request's split: input and results between layers."""
    fixed_bytes: int = 0
    """Bytes of the request whatever its batch, beside weights."""
    weights: tuple[Weights, ...] = ()
    """Weights with distinct keys. Requests for the same prefix should share one tuple, which is then checked
    once.
    """
    smallest: int = 1
    """The provider's bound, in samples (25 in the earlier text); given up where it does not fit an empty device."""
    largest: int = 1000
    """The client's bound, in samples; lowered to what once ran out of memory."""
    curve: Mapping[int, float] | None = None
    """Measured seconds per sample by COS batch, if they are known."""

    def __post_init__(self) -> None:
        if not (1 <= self.samples <= MAX_BYTES and 1 <= self.smallest <= self.largest <= MAX_BYTES):
            raise UsageError(
                f"request {self.id!r:.60}: {self.samples} samples and batches of {self.smallest} to "
                f"{self.largest}; expected at least 1, in ascending order"
            )
        if not (1 <= self.sample_bytes <= MAX_BYTES and 0 <= self.fixed_bytes <= MAX_BYTES):
            raise UsageError(
                f"request {self.id!r:.60}: {self.sample_bytes} bytes a sample and {self.fixed_bytes} beside; "
                f"expected up to {MAX_BYTES}, a sample at least 1"
            )
        keys = {w.key for w in self.weights if 0 <= w.nbytes <= MAX_BYTES}
        if len(keys) != len(self.weights):
            raise UsageError(
                f"request {self.id!r:.60}: weights need distinct keys and 0 to {MAX_BYTES} bytes"
            )
        if self.curve is not None and not all(b >= 1 and s > 0 for b, s in self.curve.items()):
            raise UsageError(
                f"request {self.id!r:.60}: a time curve needs batches from 1 on and seconds above 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """One device's memory when the queue is looked at. Bytes."""

    budget_bytes: int
    held_bytes: int = 0
    """Bytes of running requests and resident weights, as they are now."""
    resident: frozenset[str] = frozenset()
    """Keys of weights that ``held_bytes`` counts."""

    def __post_init__(self) -> None:
        if not (0 <= self.budget_bytes <= MAX_BYTES and 0 <= self.held_bytes <= MAX_BYTES):
            raise UsageError(
                f"device memory: a budget of {self.budget_bytes} bytes, {self.held_bytes} held; "
                f"expected 0 to {MAX_BYTES}"
            )


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """The outcome for one queue on one device."""

    batches: Mapping[str, int]
    """COS batch of each admitted request, oldest first."""
    waiting: tuple[str, ...]
    """Requests for the next round, oldest first."""
    impossible: Mapping[str, int]
    """Requests that do not fit the empty device even with one sample, and the bytes that they would need."""
    predicted_bytes: int
    """Bytes that the admitted requests add to the held ones."""
    missing_bytes: int
    """Bytes that the first waiting request lacks to be admitted; 0 when none waits."""


Policy = Callable[[Request], tuple[int, int]]
"""The smallest and the largest COS batch to give, within the request's own bounds."""


def fixed(request: Request) -> tuple[int, int]:
    """16 samples for everyone (HAPI, later text, section 4.4)."""
    return _within(request, FIXED_BATCH, FIXED_BATCH)


def adaptive(request: Request) -> tuple[int, int]:
    """The request's own bounds (HAPI, earlier text, section 4.5, equation 1)."""
    return _within(request, request.smallest, request.largest)


def auto(request: Request) -> tuple[int, int]:
    """Return the range from where the measured curve is close to its lowest point to where it is flat; see
    :func:`flat_batch`.
    """
    if not request.curve:
        return fixed(request)
    best = min(request.curve.values())
    return _within(request, flat_batch(request.curve, SLOW), _first(request.curve, FLAT * best))


POLICIES: Mapping[str, Policy] = {"fixed": fixed, "adaptive": adaptive, "auto": auto}


def flat_batch(curve: Mapping[int, float], tolerance: float = FLAT) -> int:
    """The smallest measured batch whose seconds per sample are within ``tolerance`` times the lowest.

    :class:`UsageError` for an empty curve.
    """
    if not curve:
        raise UsageError("a time curve needs at least one measured batch")
    return _first(curve, tolerance * min(curve.values()))


def _first(curve: Mapping[int, float], seconds: float) -> int:
    return min(batch for batch, each in curve.items() if each <= seconds)


def _within(request: Request, low: int, high: int) -> tuple[int, int]:
    """Within the request's bounds; never more than it has samples."""
    upper = min(request.largest, request.samples)
    lower = min(request.smallest, upper)
    return min(max(low, lower), upper), min(max(high, lower), upper)


def adapt(policy: str, device: DeviceState, queue: Sequence[Request]) -> Adaptation:
    """Choose the requests of ``queue`` that are admitted to ``device`` now, and their COS batches.

    Admission: as many as fit with their smallest batches. When they do not all fit, the newest is removed,
    one at a time, until they do (the earlier text leaves this open; so no request is overtaken, and none
    starves). Weights count once, and not at all when they are resident. Then the batches are raised by the
    same part of their possible growth, and the rest of the memory goes to the largest samples first
    (:func:`hapi.server.batching.memory_shares.raise_batches`). The paper's equation 1 asks for the most
    memory that is possible; the difference is less than the bytes of one sample of a request that could have
    had one more. Requests whose samples take equally many bytes get equal batches where their bounds allow.

    With a larger budget never fewer are admitted. The memory used may be less by less than one sample's
    bytes.

    Args:
        policy: ``fixed``, ``adaptive`` or ``auto``.
        device: its memory.
        queue: requests, the oldest first.

    Raises:
        UsageError: the policy is unknown, requests share an id, or weights disagree on their bytes.
    """
    if policy not in POLICIES:
        raise UsageError(f"unknown batch adaptation {policy!r:.60}; known are {', '.join(POLICIES)}")
    if len(queue) > MAX_REQUESTS or len({r.id for r in queue}) != len(queue):
        raise UsageError(f"a queue holds up to {MAX_REQUESTS} requests with distinct ids, not {len(queue)}")
    _check_weights(queue)
    possible, impossible = _bounded(POLICIES[policy], queue, device.budget_bytes)
    free = device.budget_bytes - device.held_bytes
    count, needed, lacking = _admissible(possible, device.resident, free)
    admitted = possible[:count]
    bounds = [Bounds(b.request.sample_bytes, b.low, b.high) for b in admitted]
    batches = raise_batches(bounds, max(0, free - needed))
    raised = sum((batch - b.low) * b.sample_bytes for b, batch in zip(bounds, batches, strict=True))
    return Adaptation(
        batches={b.request.id: batch for b, batch in zip(admitted, batches, strict=True)},
        waiting=tuple(b.request.id for b in possible[count:]),
        impossible=impossible,
        predicted_bytes=needed + raised,
        missing_bytes=lacking,
    )


def alone_bytes(request: Request, batch: int = 1) -> int:
    """Bytes of ``request`` with ``batch`` samples on an empty device."""
    return sum(w.nbytes for w in request.weights) + request.fixed_bytes + batch * request.sample_bytes


def check_fits(request: Request, budget_bytes: int) -> None:
    """Raise :class:`DeviceMemoryError`, with the numbers, when not even one sample fits the empty device."""
    if alone_bytes(request) > budget_bytes:
        raise DeviceMemoryError(
            f"request {request.id!r:.60} needs {alone_bytes(request)} bytes for one sample "
            f"({sum(w.nbytes for w in request.weights)} of weights), the device's budget is "
            f"{budget_bytes}; choose an earlier split or a smaller input"
        )


class _Bounded(NamedTuple):
    """A request that fits the empty device with ``low`` samples."""

    request: Request
    low: int
    high: int


def _bounded(policy: Policy, queue: Sequence[Request], budget: int) -> tuple[list[_Bounded], dict[str, int]]:
    """Bounds lowered to what fits the empty device; and whom nothing fits, with the bytes for one sample."""
    possible: list[_Bounded] = []
    impossible: dict[str, int] = {}
    rooms: dict[int, int] = {}
    for request in queue:
        low, high = policy(request)
        shared = id(request.weights)
        if shared not in rooms:
            rooms[shared] = budget - sum(w.nbytes for w in request.weights)
        alone = (rooms[shared] - request.fixed_bytes) // request.sample_bytes
        if alone >= high:
            possible.append(_Bounded(request, low, high))
        elif alone >= 1:
            possible.append(_Bounded(request, min(low, alone), alone))
        else:
            impossible[request.id] = alone_bytes(request)
    return possible, impossible


def _check_weights(queue: Sequence[Request]) -> None:
    known: dict[str, int] = {}
    for weights in (w for shared in {id(r.weights): r.weights for r in queue}.values() for w in shared):
        if known.setdefault(weights.key, weights.nbytes) != weights.nbytes:
            raise UsageError(
                f"weights {weights.key!r:.60} are {known[weights.key]} bytes in one request and "
                f"{weights.nbytes} in another; key them by their content"
            )


def _admissible(requests: Sequence[_Bounded], resident: frozenset[str], free: int) -> tuple[int, int, int]:
    """Number of the oldest that fit with their smallest batches, their bytes, and the bytes that the next one
    lacks.

    Removing the newest until the rest fits, and adding the oldest as long as they do, are the same: each
    takes bytes.
    """
    loaded, settled, needed = set(resident), set[int](), 0
    for count, (request, low, _) in enumerate(requests):
        more = request.fixed_bytes + low * request.sample_bytes
        if id(request.weights) not in settled:
            more += sum(w.nbytes for w in request.weights if w.key not in loaded)
        if needed + more > free:
            return count, needed, needed + more - free
        needed += more
        if id(request.weights) not in settled:
            settled.add(id(request.weights))
            loaded.update(w.key for w in request.weights)
    return len(requests), needed, 0
