"""Memory of a COS batch on the server's device: from the layers' sizes, corrected by observed peaks. Pure.

HAPI (earlier text, section 4.3): weights, plus the most expensive layer's input and output times the batch,
compared with a measured peak; better too much than too little.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hapi.errors import UsageError

UNIT_BYTES = 512
"""Bytes a sample are rounded up to this, which CUDA's allocator rounds every tensor to; common divisors keep the
adaptation quick."""
WINDOW = 16
"""Peaks that are remembered per batch size. An unusual one is forgotten after as many others."""
BATCH_SIZES = 16
"""Batch sizes that are remembered per key."""
KEYS = 4096
"""(model, split, shape) that are remembered, the last ones used: a client may ask for any number of them."""
HEALTHY_PASSES, MOST_PASSES = 64, 4096
"""Forward passes at a halved batch after which a larger one is tried again: memory that was short once may have
been another tenant's. Twice as many after each time that it ran out, up to the second figure."""

Key = tuple[str, int, tuple[int, ...]]
"""Model (by content), split, shape of one sample."""


class LayerMemory(Protocol):
    """Sizes of one layer: :class:`~hapi.profiler.work.LayerWork`,
    :class:`~hapi.profiler.profile.LayerProfile`.
    """

    @property
    def working_bytes(self) -> int:
        """Most bytes of one sample alive at once inside it, its input included."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes whatever the batch."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes for a range of batches, ``fixed_bytes + batch * sample_bytes``, as the adaptation takes them."""

    fixed_bytes: int
    sample_bytes: int

    def of(self, batch: int) -> int:
        """Return the bytes of a COS batch."""
        return self.fixed_bytes + batch * self.sample_bytes


@dataclass(frozen=True, kw_only=True)
class ForwardMemory:
    """A forward pass through layers 1..split, beside weights. The peak is convex in the batch."""

    layers: tuple[tuple[int, int], ...]
    """(bytes whatever the batch, bytes a sample) of each layer while it runs."""

    def of(self, batch: int) -> int:
        """Return the peak bytes of a COS batch."""
        return max(fixed + batch * each for fixed, each in self.layers)

    def line(self, smallest: int, largest: int) -> Line:
        """Return a line that is nowhere below the peak from ``smallest`` to ``largest``."""
        return _line(smallest, self.of(smallest), largest, self.of(largest))


def forward_memory(
    layers: Sequence[LayerMemory], input_bytes: int, output_bytes: int, device: str
) -> ForwardMemory:
    """Return the memory of layers 1..split.

    On ``cuda`` a COS batch's input stays until its pass has ended, and the last results may still be on their
    way to the host. On a ``cpu`` inputs are read ahead and the frame before is being sent meanwhile, all of
    it in host memory: two of each.

    Args:
        layers: their sizes.
        input_bytes: of one sample before them.
        output_bytes: of one sample after them.
        device: ``cpu`` or ``cuda``.

    Raises:
        UsageError: there are no layers, or it is another device.
    """
    if not layers or device not in ("cpu", "cuda"):
        raise UsageError(
            f"memory of {len(layers)} layers on {device!r:.20}: expected a layer, and cpu or cuda"
        )
    passed_on = output_bytes if device == "cuda" else input_bytes + 2 * output_bytes
    first, *others = layers
    needs = [(first.workspace_bytes, first.working_bytes + passed_on)]
    needs += [(layer.workspace_bytes, layer.working_bytes + input_bytes + passed_on) for layer in others]
    return ForwardMemory(layers=tuple(dict.fromkeys(needs)))


def _line(smallest: int, low: float, largest: int, high: float) -> Line:
    """Through ``low`` and ``high`` bytes at the ends, above them where it would need less than nothing at 0."""
    if not 1 <= smallest <= largest:
        raise UsageError(f"batches of {smallest} to {largest}: expected at least 1, in ascending order")
    slope = max(0.0, (high - low) / (largest - smallest)) if largest > smallest else low / smallest
    fixed = max(0.0, low - slope * smallest)
    slope = max((low - fixed) / smallest, (high - fixed) / largest)
    sample_bytes = max(1, -int(-slope // UNIT_BYTES)) * UNIT_BYTES
    return Line(fixed_bytes=-int(-fixed // 1), sample_bytes=sample_bytes)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Comparison of predictions with the peaks observed afterwards."""

    observations: int
    under: int
    """Predictions below what was needed."""
    worst_under: float
    """Largest part of what was needed by which one fell short."""
    mean_over: float
    """Predicted over observed bytes, less 1, of all the others together."""
    worst_over: float
    out_of_memory: int


@dataclass
class _Seen:
    """Observations of one key."""

    peaks: OrderedDict[int, deque[tuple[float, float]]]
    """(Observed bytes, bytes by the sizes) by batch size."""
    factor: float = 1.0
    excess: float = 0.0
    ceiling: int | None = None
    healthy: int = 0
    passes_until_growth: int = HEALTHY_PASSES // 2

    def learn(self) -> None:
        """The factor and the excess of the remembered peaks."""
        half = max(self.peaks) / 2
        self.factor = max(o / s for batch, window in self.peaks.items() for o, s in window if batch >= half)
        self.excess = max(0.0, *(o - self.factor * s for window in self.peaks.values() for o, s in window))

    def passed(self, batch: int) -> None:
        """``batch`` samples did not run out of memory."""
        if self.ceiling is None or batch < self.ceiling:
            return
        self.healthy += 1
        if self.healthy >= self.passes_until_growth:
            self.ceiling, self.healthy = 2 * self.ceiling, 0


class ObservedMemory:
    """Corrects predictions by the peaks that forward passes really had; lives on one thread.

    Per (model, split, shape) it learns two figures: a *factor*, the largest of observed over predicted peak among
    the larger batches (those from half of the largest one seen on), and an *excess*, what smaller batches needed
    beyond that. So no remembered peak is above the correction. If peaks are a multiple of the prediction and a
    constant, the correction exceeds the largest batch's by at most twice that constant.

    Batches that ran out of memory are halved, as the device does it, until enough passes went well.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[Key, _Seen] = OrderedDict()
        self._observations = self._under = self._out_of_memory = 0
        self._worst_under = self._worst_over = 0.0
        self._over_predicted = self._over_observed = 0.0

    def predict(self, key: Key, forward: ForwardMemory, batch: int) -> float:
        """Peak bytes of a COS batch, beside weights."""
        factor, excess = self.correction(key)
        return factor * forward.of(batch) + excess

    def line(self, key: Key, forward: ForwardMemory, smallest: int, largest: int) -> Line:
        """A line that is nowhere below the prediction from ``smallest`` to ``largest``."""
        ends = (self.predict(key, forward, batch) for batch in (smallest, largest))
        return _line(smallest, next(ends), largest, next(ends))

    def correction(self, key: Key) -> tuple[float, float]:
        """Return (factor, bytes): the prediction by sizes is multiplied by the one, and the other is added."""
        seen = self._seen.get(key)
        return (1.0, 0.0) if seen is None else (seen.factor, seen.excess)

    def observe(self, key: Key, forward: ForwardMemory, batch: int, peak_bytes: int) -> None:
        """Record the peak of a forward pass.

        Args:
            key: of model, split and shape.
            forward: the prediction by sizes.
            batch: samples of the pass.
            peak_bytes: beside weights and other requests.
        """
        if peak_bytes < 1 or batch < 1:
            raise UsageError(f"a peak of {peak_bytes} bytes with {batch} samples; both must be at least 1")
        self._compare(self.predict(key, forward, batch), peak_bytes)
        seen = self._of(key)
        window = seen.peaks.setdefault(batch, deque(maxlen=WINDOW))
        window.append((float(peak_bytes), float(forward.of(batch))))
        seen.peaks.move_to_end(batch)
        if len(seen.peaks) > BATCH_SIZES:
            seen.peaks.popitem(last=False)
        seen.learn()
        seen.passed(batch)

    def passed(self, key: Key, batch: int) -> None:
        """Record that ``batch`` samples went well, with an unknown peak."""
        seen = self._seen.get(key)
        if seen is not None:
            seen.passed(batch)

    def out_of_memory(self, key: Key, batch: int) -> int:
        """Record that a COS batch ran out of memory; return the next one to try, half as large and at least
        1.
        """
        if batch < 1:
            raise UsageError(f"a batch of {batch} samples cannot run out of memory; expected at least 1")
        self._out_of_memory += 1
        seen = self._of(key)
        seen.ceiling = max(1, min(batch, seen.ceiling or batch) // 2)
        seen.healthy, seen.passes_until_growth = 0, min(2 * seen.passes_until_growth, MOST_PASSES)
        return seen.ceiling

    def ceiling(self, key: Key, batch: int) -> int:
        """Return ``batch``, or less if as many once ran out of memory."""
        seen = self._seen.get(key)
        return batch if seen is None or seen.ceiling is None else min(batch, seen.ceiling)

    def report(self) -> MemoryReport:
        """Return all observations so far, each compared with its prediction just before."""
        return MemoryReport(
            observations=self._observations,
            under=self._under,
            worst_under=self._worst_under,
            mean_over=self._over_predicted / self._over_observed - 1 if self._over_observed else 0.0,
            worst_over=self._worst_over,
            out_of_memory=self._out_of_memory,
        )

    def _of(self, key: Key) -> _Seen:
        seen = self._seen.setdefault(key, _Seen(OrderedDict()))
        self._seen.move_to_end(key)
        if len(self._seen) > KEYS:
            self._seen.popitem(last=False)
        return seen

    def _compare(self, predicted: float, observed: int) -> None:
        self._observations += 1
        if predicted < observed:
            self._under += 1
            self._worst_under = max(self._worst_under, 1 - predicted / observed)
            return
        self._over_predicted += predicted
        self._over_observed += observed
        self._worst_over = max(self._worst_over, predicted / observed - 1)
