"""``benchmarks batching``: seconds per sample over the COS batch, and the choice of each batch adaptation
policy.

HAPI (later text, section 4.4) found no gain beyond a certain COS batch and fixes it at 16. Here the prefix of
each model runs as the server's device runs it, in COS batches of 1 to 256, in rounds that go to and fro so
that a slower moment of the machine meets all sizes. ``auto`` is not computed from that: after every other
round it searches its batch by itself (:mod:`hapi.server.batching.throughput_curve`), in passes of its own.
Its most frequent choice is compared with the rounds. As a disturbance only ever makes a pass slower, the
faster half of the rounds counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.serving.settings import StudySettings
from benchmarks.testbed.cells import Results
from hapi.models.devices import finish, resolve_device, set_arithmetic
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.freeze import choose_freeze
from hapi.profiler.timing import work_clock
from hapi.server.batching.policies import POLICIES, Request
from hapi.server.batching.throughput_curve import TimeCurves

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GOAL = 1.03
"""Seconds per sample at the default's choice over the best."""
_SAMPLES = 16
"""Fewest samples of each size in a round."""
_MOST_REQUESTS = 100
"""Requests until ``auto`` must have settled."""


@dataclass(frozen=True, kw_only=True)
class BatchingSettings(StudySettings):
    """Measurements to take; one round is not counted."""

    repeats: int = 5
    split: str | None = None
    """An index or a layer's name; None for the freeze."""
    request_size: int = 256
    """Samples of the requests with which ``auto`` looks, and the most that any policy may give."""
    threads: int = 1
    """Threads of a forward pass on a CPU."""


@dataclass(frozen=True, kw_only=True)
class BatchingRow:
    """One front."""

    model: str
    split: int
    seconds: Mapping[int, float]
    """Seconds per sample by COS batch, median of the faster half of the rounds."""
    chosen: Mapping[str, int]
    """Chosen batch by policy."""
    looks: Sequence[int]
    """Choices of ``auto``, look by look."""
    looked: int
    """Samples until it had settled, in the median."""

    @property
    def best(self) -> int:
        """The fastest COS batch."""
        return min(self.seconds, key=lambda batch: self.seconds[batch])

    def over_best(self, batch: int) -> float:
        """Seconds per sample over those of the best."""
        return self.seconds[batch] / self.seconds[self.best]


def measure_batching(settings: BatchingSettings, results: Results, tell: Callable[[str], None]) -> None:
    """Measure the models that ``results`` does not hold, in this process."""
    device = resolve_device(settings.device, "--device")
    set_arithmetic(device)
    if device.type == "cpu":
        torch.set_num_threads(settings.threads)
    done = {record["model"] for record in results.records if record["kind"] == "batching"}
    todo = [model for model in settings.models if model not in done]
    tell(f"{len(settings.models)} models, {len(todo)} to measure")
    for model in todo:
        results.add({"kind": "batching", "model": model, **_measure(model, settings, device)})
        tell(f"{model}: done")


def _measure(name: str, settings: BatchingSettings, device: torch.device) -> dict[str, Any]:
    side = settings.image_size
    model = build(ModelSpec(architecture=name, weights="random:0", input_shape=(3, side, side)))
    split = choose_freeze(model, None) if settings.split is None else model.resolve(_which(settings.split))
    shape, dtype = model.output_shapes()[split], model.output_dtypes()[split]
    model.to(device)
    prefix = _Prefix(model.segment(0, split, frozen=True), device, (3, side, side), tuple(shape), dtype)
    times: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    looks = []
    for number in range(settings.repeats + 1):
        for batch in BATCHES if number % 2 else reversed(BATCHES):
            prefix.seconds(
                batch
            )  # what a change of the size costs, such as other memory, is not the size's own
            passes = [prefix.seconds(batch) / batch for _ in range(max(1, _SAMPLES // batch))]
            if number:  # the first prepares kernels and memory
                times[batch].append(statistics.median(passes))
        if number % 2:
            looks.append(_search(prefix, settings.request_size))
    return {"split": split, "seconds": times, "looks": looks}


def _which(split: str) -> int | str:
    return int(split) if split.isdecimal() else split


class _Prefix:
    """Frozen layers, run as :class:`hapi.server.device.device.Device` runs them: from host memory into host memory."""

    def __init__(
        self,
        layers: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        input_shape: tuple[int, ...],
        output_shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        pinned = device.type == "cuda"
        self._layers, self._device, self._clock = layers, device, work_clock(device)
        inputs = torch.rand((max(BATCHES), *input_shape), generator=torch.Generator().manual_seed(0))
        self._inputs = inputs.pin_memory() if pinned else inputs
        self._output = torch.empty((max(BATCHES), *output_shape), dtype=dtype, pin_memory=pinned)

    @torch.inference_mode()
    def seconds(self, batch: int) -> float:
        """Seconds of one forward pass."""
        began = self._clock()
        output = self._layers(self._inputs[:batch].to(self._device, non_blocking=True))
        self._output[:batch].copy_(output, non_blocking=True)
        finish(self._device)
        return self._clock() - began


def _search(prefix: _Prefix, request_size: int) -> tuple[int, int]:
    """Choice of ``auto``, and the samples until then."""
    curves, samples = TimeCurves(), 0
    for _ in range(_MOST_REQUESTS):
        batch = curves.propose(prefix, request_size)
        if curves.curve(prefix) is not None:
            break
        for begin in range(0, request_size, batch):
            count = min(batch, request_size - begin)
            curves.observe(prefix, count, prefix.seconds(count))
        samples += request_size
    request = Request(
        id=str(samples),
        samples=request_size,
        sample_bytes=1,
        largest=request_size,
        curve=curves.curve(prefix),
    )
    return POLICIES["auto"](request)[1], samples


def batching_rows(records: Sequence[Mapping[str, Any]], request_size: int) -> list[BatchingRow]:
    """Return the rows of a results file, the last of each model, with the policies' choices where memory does
    not bind.
    """
    rows = {}
    for r in records:
        if r["kind"] != "batching":
            continue
        request = Request(id="", samples=request_size, sample_bytes=1, largest=request_size)
        chosen = {name: POLICIES[name](request)[1] for name in ("fixed", "adaptive")}
        looks = [choice for choice, _ in r["looks"]]
        rows[r["model"]] = BatchingRow(
            model=r["model"],
            split=r["split"],
            seconds={int(batch): _undisturbed(times) for batch, times in r["seconds"].items()},
            chosen={**chosen, "auto": statistics.mode(looks)},
            looks=looks,
            looked=int(statistics.median(samples for _, samples in r["looks"])),
        )
    return list(rows.values())


def _undisturbed(times: Sequence[float]) -> float:
    return statistics.median(sorted(times)[: (len(times) + 1) // 2])


def batching_table(rows: Sequence[BatchingRow], settings: BatchingSettings) -> list[str]:
    """Milliseconds per sample by COS batch, then what policies choose and lose, as lines for a person."""
    lines = [
        "ms per sample of layers 1..split; * the best",
        f"{'model':<13}{'split':>6}" + "".join(f"{batch:>9}" for batch in BATCHES),
    ]
    for row in rows:
        cells = "".join(
            f"{row.seconds[batch] * 1e3:>8.3f}{'*' if batch == row.best else ' '}" for batch in BATCHES
        )
        lines.append(f"{row.model:<13}{row.split:>6}{cells}")
    policies = list(rows[0].chosen) if rows else []
    lines += [
        "",
        f"choice and what it takes over the best, requests of {settings.request_size}, memory not binding",
        f"{'model':<13}{'best':>6}"
        + "".join(f"{name:>16}" for name in policies)
        + f"{'looked at':>12}  looks",
    ]
    for row in rows:
        text = "".join(
            f"{batch:>8} {row.over_best(batch) - 1:>+6.1%} "
            for batch in map(row.chosen.__getitem__, policies)
        )
        lines.append(f"{row.model:<13}{row.best:>6}{text}{row.looked:>12}  {' '.join(map(str, row.looks))}")
    for name in policies:
        over = [row.over_best(row.chosen[name]) for row in rows]
        within = sum(each <= GOAL for each in over)
        lines.append(f"{name}: within 3% of the best for {within} of {len(rows)}, worst {max(over) - 1:+.1%}")
    lines.append("the paper (later text, section 4.4): nothing is gained beyond a certain batch; it takes 16")
    return lines
