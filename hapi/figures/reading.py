"""Careful reading of a run's JSON report, which may be old, cut short, edited or no report at all.

Fields that a report lacks are left out of the page; fields of a wrong type are refused in one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from hapi.errors import ConfigError
from hapi.figures.fields import Fields, as_text
from hapi.figures.findings import Details
from hapi.figures.kept import Kept
from hapi.figures.offload import OffloadPart
from hapi.figures.reuse import ReusePart
from hapi.profiler.change import Change
from hapi.profiler.cost import Estimate, Memory, Stages
from hapi.profiler.profile import PROFILE_VERSION, Job, Profile
from hapi.profiler.reading import load_document, read_strictly
from hapi.profiler.strategies import Candidate

MAX_REPORT_BYTES = 64 << 20
_MAX_SECONDS = 1e18
"""Seconds; what is no number is not below it either."""
STAGES = ("server", "network", "client")


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One element of ``epochs``; None stands for unknown values."""

    number: int
    split: int
    splits: tuple[tuple[int, int], ...]
    """Pairs of split and batches."""
    samples: int
    seconds: float
    server: float
    network: float
    client: float
    stall: float
    received: int
    estimated: float | None
    loss: float | None
    accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    metrics: tuple[tuple[str, float | None], ...]
    """Other metrics of the validation samples, by name."""


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """The report's part about the choice of the split."""

    strategy: str
    split: int
    job: Job
    profile: Profile | None
    """None while profiling, and where :attr:`other_version` is set; :attr:`candidates` is empty then."""
    other_version: int | None
    """The profile's version, if another version of Hapi wrote it in a form that this one cannot read."""
    candidates: tuple[Candidate, ...]
    strategies: tuple[tuple[str, int | None], ...]
    changes: tuple[Change, ...]
    predicted_memory: int | None
    observed_memory: int | None
    reuse: ReusePart | None
    """The choice of what is kept; None where nothing could be."""


@dataclass(frozen=True, kw_only=True)
class StageSpan:
    """One piece of work in :attr:`Run.timeline`, in seconds since the batch's first request."""

    stage: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """A report. ``facts`` and ``settings`` are only shown, as text."""

    model: str
    dataset: str
    split: int
    split_name: str
    freeze: int
    freeze_name: str
    layers: int
    strategy: str | None
    batch_size: int
    seconds: float
    peak_memory: int
    retries: int
    facts: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]
    epochs: tuple[Epoch, ...]
    epochs_asked: int | None
    ended: str
    """Kind of the run's end ("diverged"); empty when the report does not say."""
    ended_why: str
    plan: PlanPart | None
    details: Details | None
    """Details of the last validation."""
    kept: Kept
    offload: OffloadPart | None
    """The optimiser's states elsewhere; None where all was in memory."""
    timeline: tuple[StageSpan, ...]
    timeline_batch: int | None

    @classmethod
    def from_json(cls, document: Any) -> Run:
        """Parse ``document``; :class:`ConfigError` names the first field that is wrong."""
        return _run(Fields(document, "report"))


def load_run(path: str) -> Run:
    """Read a saved report; :class:`UsageError` or :class:`ConfigError` in one line."""
    document = load_document(path, MAX_REPORT_BYTES, "make a report with 'hapi-train --report FILE'")
    try:
        return Run.from_json(document)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; this is no report of a run") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; expected what 'hapi-train --report FILE' writes") from None


_METRICS = ("top5", "f1", "precision", "recall", "auroc", "average_precision", "mae", "rmse", "r2")
_FACTS = ("hapi", "weights", "device", "servers", "classes", "request_size")


def _run(f: Fields) -> Run:
    timeline = f.inner("timeline") if f.has("timeline") else None
    settings = f.shown("settings")
    asked = f.inner("settings").whole("epochs") if settings else None
    ended = f.inner("ended") if f.has("ended") else None
    return Run(
        model=f.text("model"),
        dataset=f.inner("dataset").text("name"),
        split=f.integer("split"),
        split_name=f.text("split_name"),
        freeze=f.integer("freeze"),
        freeze_name=f.text("freeze_name"),
        layers=f.integer("layers"),
        strategy=f.text("strategy") if f.has("strategy") else None,
        batch_size=f.integer("batch_size"),
        seconds=f.seconds("seconds"),
        peak_memory=f.integer("peak_memory_bytes"),
        retries=f.integer("retries"),
        facts=(*((name, as_text(f.raw(name))) for name in _FACTS if f.has(name)), *f.shown("versions")),
        settings=settings,
        epochs=tuple(_epoch(e) for e in f.objects("epochs")),
        epochs_asked=asked,
        ended="" if ended is None else ended.text("how"),
        ended_why="" if ended is None else ended.text("detail"),
        plan=_plan(f.inner("plan")) if f.has("plan") else None,
        details=_details(f.objects("epochs")),
        kept=Kept.of(f),
        offload=OffloadPart.of(f),
        timeline=() if timeline is None else tuple(_stage_span(s) for s in timeline.objects("spans")),
        timeline_batch=None if timeline is None else timeline.whole("batch"),
    )


def _epoch(f: Fields) -> Epoch:
    return Epoch(
        number=f.integer("epoch"),
        split=f.integer("split"),
        splits=tuple(_pair(f, p) for p in f.items("splits")) if f.has("splits") else (),
        samples=f.integer("samples"),
        seconds=f.seconds("seconds"),
        server=f.seconds("server_seconds"),
        network=f.seconds("network_seconds"),
        client=f.seconds("client_seconds"),
        stall=f.seconds("stall_seconds"),
        received=f.integer("bytes_received"),
        estimated=f.optional("estimated_seconds"),
        loss=f.optional("loss"),
        accuracy=f.optional("accuracy"),
        validation_loss=f.optional("validation_loss"),
        validation_accuracy=f.optional("validation_accuracy"),
        metrics=tuple(
            (name, f.optional(f"validation_{name}")) for name in _METRICS if f.named(f"validation_{name}")
        ),
    )


def _details(epochs: Sequence[Fields]) -> Details | None:
    if not epochs or not epochs[-1].has("validation_details"):
        return None
    return Details.of(epochs[-1].inner("validation_details"))


def _pair(f: Fields, value: Any) -> tuple[int, int]:
    if not (
        isinstance(value, list | tuple) and len(value) == 2 and all(type(v) is int and v >= 0 for v in value)
    ):
        raise ConfigError(f"{f.where}.splits: expected pairs of split and batches")
    return value[0], value[1]


def _stage_span(f: Fields) -> StageSpan:
    stage_span = StageSpan(
        stage=f.text("stage"), name=f.text("name"), start=f.number("start"), end=f.number("end")
    )
    if stage_span.stage not in STAGES:
        raise ConfigError(f"{f.where}.stage: expected one of {', '.join(STAGES)}")
    if stage_span.end < stage_span.start:
        raise ConfigError(f"{f.where}: ends before it starts")
    return stage_span


def _plan(f: Fields) -> PlanPart:
    memory = f.inner("memory") if f.has("memory") else None
    version = f.inner("profile").whole("version") if f.has("profile") else None
    if version in (None, PROFILE_VERSION):
        profile = Profile.from_json(f.raw("profile")) if f.has("profile") else None
        candidates = tuple(_candidate(c, split) for split, c in enumerate(f.objects("candidates")))
        version = None
    else:
        profile, candidates = None, ()
    expected = 0 if profile is None else profile.last_split + 1
    if len(candidates) != expected:
        raise ConfigError(
            f"{f.where}.candidates: expected {expected} by its profile, found {len(candidates)}"
        )
    strategies = f.inner("strategies") if f.has("strategies") else None
    split = f.integer("split")
    if profile is not None and split > profile.last_split:
        raise ConfigError(f"{f.where}.split: {split} is beyond the last one, {profile.last_split}")
    return PlanPart(
        strategy=f.text("strategy"),
        split=split,
        job=_job(f),
        profile=profile,
        other_version=version,
        candidates=candidates,
        strategies=()
        if strategies is None
        else tuple((name, strategies.whole(name)) for name, _ in f.shown("strategies")),
        changes=tuple(_change(c) for c in f.objects("changes")),
        predicted_memory=None if memory is None else memory.whole("predicted"),
        observed_memory=None if memory is None else memory.whole("observed"),
        reuse=ReusePart.of(f.inner("reuse")) if f.has("reuse") else None,
    )


def _job(plan: Fields) -> Job:
    """The job of a plan; facts that an earlier version does not report have today's defaults."""
    where = plan.inner("job").where
    return cast(Job, read_strictly(Job, {**asdict(Job()), **plan.raw("job")}, where))


def _change(f: Fields) -> Change:
    return Change(
        epoch=f.integer("epoch"),
        batch=f.integer("batch"),
        before=f.integer("from"),
        after=f.integer("to"),
        why=f.text("why"),
    )


def _candidate(f: Fields, split: int) -> Candidate:
    e = f.inner("estimate")
    if e.integer("split") != split:
        raise ConfigError(f"{e.where}.split: expected {split}, candidates ascend from 0")
    if type(f.raw("fits")) is not bool:
        raise ConfigError(f"{f.where}.fits: expected true or false")
    low_high = e.items("epoch_range")
    if len(low_high) != 2 or not all(type(v) in (int, float) and abs(v) < _MAX_SECONDS for v in low_high):
        raise ConfigError(f"{e.where}.epoch_range: expected two numbers")
    return Candidate(
        name=f.text("name"),
        fits=f.raw("fits"),
        rejected=f.text("rejected"),
        estimate=Estimate(
            split=split,
            sent="stored",
            stages=read_strictly(Stages, e.raw("stages"), f"{e.where}.stages"),
            memory=read_strictly(Memory, e.raw("memory"), f"{e.where}.memory"),
            wire_bytes=e.integer("wire_bytes"),
            epoch_wire_bytes=e.integer("epoch_wire_bytes"),
            paper_epoch_seconds=e.seconds("paper_epoch_seconds"),
            epoch_seconds=e.seconds("epoch_seconds"),
            epoch_range=(float(low_high[0]), float(low_high[1])),
        ),
    )
