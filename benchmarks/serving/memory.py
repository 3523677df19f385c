"""Predicted against observed memory of a client on a CPU, for several splits and batches of each model.

The prediction is the planner's (:func:`hapi.profiler.cost.memory`), without what prefetching holds. Each case runs
in fresh processes, twice: once with an allocator that gives memory back at once, which shows what is really needed
at the same time, and once as `hapi-train` sets it, which keeps what was freed for later.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.testbed.conditions import conditions, write_json
from hapi.errors import HapiError, UsageError
from hapi.models.zoo.build import ModelSpec, structure
from hapi.models.zoo.freeze import choose_freeze
from hapi.models.zoo.names import ALIASES
from hapi.profiler.cost import CLIENT_BYTES, memory
from hapi.profiler.machine import constants
from hapi.profiler.measure import Conditions, measure
from hapi.profiler.profile import Job, Profile

MODELS = ("alexnet", "resnet18", "resnet50", "densenet121", "vgg11", "vgg19", "vit_b_16")
BATCHES = (16, 64, 256)
PAPER_ERRORS = {
    "resnet18": 0.0005,
    "resnet50": 6.4,
    "vgg11": 11.7,
    "vgg19": 0.00025,
    "alexnet": 5.3,
    "densenet121": 1.11,
}
"""Percent, on a GPU (earlier HAPI text, section 4.3)."""
_TIMEOUT_SECONDS = 600
_AT_ONCE = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"), "65536")
"""glibc: every block from 64 KiB on is a mapping of its own, which is given back when it is freed."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Measurements to take."""

    models: tuple[str, ...] = MODELS
    batches: tuple[int, ...] = BATCHES
    image_size: int = 64
    micro_batch: int = 64


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One split and batch of a model. Bytes that the process grows by, torch's own left out."""

    model: str
    split: int
    bs: int
    predicted: int
    needed: int
    """Alive at the same time."""
    resident: int
    """Bytes with an allocator that keeps freed memory, as ``hapi-train`` sets it."""
    code: int
    """Bytes of libraries' code that was read meanwhile, not counted in the others."""

    @property
    def error(self) -> float:
        """Percent of what is needed; positive for an over-estimation."""
        return 100 * (self.predicted - self.needed) / self.needed

    def row(self) -> str:
        """One line of the table."""
        mib = [f"{n / 2**20:9.1f}" for n in (self.predicted, self.needed, self.resident)]
        return f"{self.model:12} {self.split:5} {self.bs:5} {' '.join(mib)} {self.error:+8.1f}%"


@dataclass(frozen=True, kw_only=True)
class MemoryResult:
    """All cases."""

    cases: tuple[MemoryCase, ...]
    conditions: dict[str, Any]

    def table(self) -> list[str]:
        """A line for each case, then for each model, then for all."""
        lines = [
            f"{'model':12} {'split':>5} {'bs':>5} {'predicted':>9} {'needed':>9} {'resident':>9} {'error':>9}   (MiB)"
        ]
        lines += [case.row() for case in self.cases]
        lines += ["", f"{'model':12} {'median':>9} {'worst':>9}   absolute error; the paper's, on a GPU"]
        for model in dict.fromkeys(case.model for case in self.cases):
            errors = [abs(case.error) for case in self.cases if case.model == model]
            paper = f"{PAPER_ERRORS[model]}%" if model in PAPER_ERRORS else "not given"
            lines.append(f"{model:12} {statistics.median(errors):8.1f}% {max(errors):8.1f}%   {paper}")
        errors = [case.error for case in self.cases]
        more = [case.resident / case.needed for case in self.cases]
        low, high = min(errors), max(errors)
        lines.append("")
        lines.append(
            f"all {len(errors)}: median {statistics.median(map(abs, errors)):.1f}%, from {low:+.1f}% to {high:+.1f}%; "
            f"under-estimated: {sum(e < 0 for e in errors)}"
        )
        lines.append(
            f"the allocator keeps resident {statistics.median(more):.2f} times what is needed (up to {max(more):.2f})"
        )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Everything, by name; :func:`measure_memory` goes on from it."""
        return {"conditions": self.conditions, "cases": [{**vars(c), "error": c.error} for c in self.cases]}


def measure_memory(
    settings: MemorySettings, results: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> MemoryResult:
    """Run all cases, one after the other; with ``results`` those that are in that file already are not run again.

    Raises :class:`UsageError` where the system does not tell a process's memory, or for a file of something else.
    """
    if not Path("/proc/self/clear_refs").exists():
        raise UsageError(
            "this system does not tell the peak memory of a process; python -m benchmarks memory needs Linux"
        )
    found = {} if results is None else _read(results, settings)
    recorded = {**conditions(), "image_size": settings.image_size, "micro_batch": settings.micro_batch}
    for model in settings.models:
        profile = _profile(model, settings.image_size)
        for split, bs in _cases(profile, settings.batches):
            key = (profile.model, split, bs)
            if key not in found:
                found[key] = _observed(profile, split, bs, settings)
                say(found[key].row())
                if results is not None:
                    partial = MemoryResult(cases=tuple(found.values()), conditions=recorded)
                    write_json(results, partial.to_json())
    return MemoryResult(cases=tuple(found.values()), conditions=recorded)


def _profile(model: str, side: int) -> Profile:
    name = ALIASES.get(model, model)
    layered = structure(ModelSpec(architecture=name, weights="random:0", input_shape=(3, side, side)))
    freeze = choose_freeze(layered, None)
    return measure(
        layered, name, freeze, Conditions(stored_bytes=None), machine=constants("cpu", side), budget=0.0
    )


def _cases(profile: Profile, batches: Sequence[int]) -> Iterator[tuple[int, int]]:
    last = profile.last_split
    for split in sorted({0, last // 3, 2 * last // 3, last}):
        for bs in batches:
            yield split, bs


def predicted_bytes(profile: Profile, split: int, bs: int, micro_batch: int) -> int:
    """The planner's peak with one training batch on the host, which came as tensors; the client's own objects, which
    these processes do not have, left out."""
    estimate = memory(profile, Job(bs=bs, samples=bs, micro_batch=micro_batch), split)
    return estimate.parameters + estimate.compute - CLIENT_BYTES + bs * profile.output_bytes()[split]


def _observed(profile: Profile, split: int, bs: int, settings: MemorySettings) -> MemoryCase:
    case = {
        "model": profile.model,
        "split": split,
        "bs": bs,
        "image_size": settings.image_size,
        "micro_batch": settings.micro_batch,
    }
    needed, resident = _run(case, _AT_ONCE), _run(case, {})
    return MemoryCase(
        model=profile.model,
        split=split,
        bs=bs,
        predicted=predicted_bytes(profile, split, bs, settings.micro_batch),
        needed=needed["grown"],
        resident=resident["grown"],
        code=resident["code"],
    )


def _run(case: dict[str, Any], environment: dict[str, str]) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.serving.memory_client", json.dumps(case)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
            env=os.environ | environment,
        )
    except subprocess.TimeoutExpired:
        raise HapiError(f"{case}: no answer after {_TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise HapiError(f"{case['model']}, split {case['split']}, {case['bs']} samples: {lines[-1]}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def _read(path: Path, settings: MemorySettings) -> dict[tuple[str, int, int], MemoryCase]:
    """Cases measured before in the same way."""
    if not path.exists():
        return {}
    fields = ("model", "split", "bs", "predicted", "needed", "resident", "code")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        recorded = document["conditions"]
        cases = [MemoryCase(**{name: case[name] for name in fields}) for case in document["cases"]]
        merge_key = (recorded["image_size"], recorded["micro_batch"]) == (
            settings.image_size,
            settings.micro_batch,
        )
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path}: not a result of python -m benchmarks memory; name another file") from None
    if not merge_key:
        raise UsageError(f"{path}: measured with another image size or micro-batch; name another file")
    return {(c.model, c.split, c.bs): c for c in cases}
