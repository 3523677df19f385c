"""The benchmarks of ``benchmarks/serving``: layers, batches and requests, memory, the wire, a GPU."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from benchmarks.cli.benchmark import (
    Benchmark,
    Outcome,
    bed_and_results,
    outcome_of,
    recorded_outcome,
    tell,
    with_given,
)  # fmt: skip
from benchmarks.cli.options import (
    BANDWIDTH,
    CSV,
    DEVICE,
    FIGURE,
    NO_BED,
    batch,
    batches,
    epochs,
    image_size,
    models,
    number,
    option,
    request_size,
    results,
    switch,
)  # fmt: skip
from hapi.cli.shared.numbers import count, size
from hapi.errors import UsageError


def _layers(args: argparse.Namespace) -> Outcome:
    from benchmarks.serving.layers import LayersSettings, measure_layers
    from benchmarks.serving.plots_measured import draw_layers

    settings = with_given(
        LayersSettings(), args,
        models="model", repeats="repeats", bs="bs", image_size="image_size", device="device",
    )  # fmt: skip
    result = measure_layers(settings, tell)
    table, rows = result.table(), result.rows()
    found = {**result.to_json(), "table": table, "rows": rows, "conditions": result.conditions}
    return Outcome(
        table=table,
        conditions=result.conditions,
        document=found,
        rows=rows,
        draw=lambda path: draw_layers(result.layers, path),
    )


def _reuse(args: argparse.Namespace) -> Outcome:
    from benchmarks.serving.plots_measured import draw_reuse
    from benchmarks.serving.reuse import ReuseSettings, change_table, measure_reuse, reuse_rows, reuse_table
    from benchmarks.testbed.cells import read

    settings = with_given(
        ReuseSettings(), args, models="model", repeats="repeats", bs="bs", image_size="image_size",
        device="device", request_size="request_size", bandwidth="bandwidth",
    )  # fmt: skip
    before = reuse_rows(list(read(Path(args.before)))) if args.before else []
    bed, found = bed_and_results(args, settings)
    measure_reuse(bed, settings, found, tell)
    rows = reuse_rows(found.records)
    changes = ["", *change_table(before, rows)] if before else []
    return recorded_outcome(
        found.records,
        [*reuse_table(rows, settings), *changes],
        [asdict(row) | {"speedup": row.speedup} for row in rows],
        lambda path: draw_reuse(rows, path),
        benchmark="reuse",
        before=[asdict(row) for row in before],
    )


def _concurrency(args: argparse.Namespace) -> Outcome:
    from benchmarks.serving.concurrency import (
        AT_ONCE,
        ConcurrencySettings,
        concurrency_table,
        measure_concurrency,
        request_rows,
        tenant_rows,
    )  # fmt: skip
    from benchmarks.serving.plots_measured import draw_concurrency

    settings = with_given(
        ConcurrencySettings(), args, models="model", repeats="repeats", image_size="image_size",
        device="device", request_size="request_size", bandwidth="bandwidth",
    )  # fmt: skip
    bed, found = bed_and_results(args, settings)
    measure_concurrency(bed, settings, found, tell)
    rows, tenants = request_rows(found.records), tenant_rows(found.records)
    return recorded_outcome(
        found.records,
        concurrency_table(rows, tenants, settings),
        [
            {"model": r.model, "split": r.split, "request_bytes": r.request_bytes}
            | {f"seconds_{count}": r.seconds[count] for count in AT_ONCE}
            for r in rows
        ],
        lambda path: draw_concurrency(rows, tenants, path),
        benchmark="concurrency",
        tenants=[asdict(row) for row in tenants],
    )


def _batching(args: argparse.Namespace) -> Outcome:
    from benchmarks.serving.batching import BatchingSettings, batching_rows, batching_table, measure_batching
    from benchmarks.serving.plots_measured import draw_batching
    from benchmarks.testbed.cells import Results
    from benchmarks.testbed.conditions import conditions

    settings = with_given(
        BatchingSettings(), args, models="model", repeats="repeats", split="split", image_size="image_size",
        device="device", request_size="request_size", threads="threads",
    )  # fmt: skip
    found = Results(Path(args.results), {**conditions(), "grid": asdict(settings)})
    measure_batching(settings, found, tell)
    rows = batching_rows(found.records, settings.request_size)
    return recorded_outcome(
        found.records,
        batching_table(rows, settings),
        [
            {"model": row.model, "split": row.split, "best": row.best, "looked_samples": row.looked}
            | dict(row.chosen)
            | {f"seconds_{batch}": seconds for batch, seconds in row.seconds.items()}
            for row in rows
        ],
        lambda path: draw_batching(rows, path),
        benchmark="batching",
        settings=asdict(settings),
    )


def _wire(args: argparse.Namespace) -> Outcome:
    from benchmarks.serving.wire import measure_wire

    return outcome_of(measure_wire(args.body, args.rounds))


def _codecs(args: argparse.Namespace) -> Outcome:
    from benchmarks.cli.options import known_models
    from benchmarks.codecs.engine import measure_codecs
    from benchmarks.codecs.settings import CodecsSettings
    from benchmarks.epochs.settings import REAL_JOB
    from benchmarks.testbed.cells import Results
    from benchmarks.testbed.conditions import conditions

    known_models([name for name in args.model or () if name != REAL_JOB])
    names = tuple(dict.fromkeys(args.model or CodecsSettings().models))
    settings = CodecsSettings(
        models=names, image_size=args.image_size, steps=args.steps, repeats=args.repeats, accuracy=args.accuracy,
        seeds=args.seeds, epochs=args.epochs,
    )  # fmt: skip
    found = Results(Path(args.results), {**conditions(), "threads": 1, "grid": settings.measuring()})
    return outcome_of(measure_codecs(settings, found, tell))


def _memory(args: argparse.Namespace) -> Outcome:
    from benchmarks.serving.memory import MemorySettings, measure_memory

    settings = with_given(MemorySettings(), args, models="model", batches="bs", image_size="image_size")
    return outcome_of(measure_memory(settings, Path(args.json) if args.json else None, tell))


def _residency(args: argparse.Namespace) -> Outcome:
    from benchmarks.serving.residency import ResidencySettings, measure_residency

    settings = with_given(ResidencySettings(), args, models="model", jobs="jobs", image_size="image_size")
    return outcome_of(measure_residency(settings, tell))


def _gpu(args: argparse.Namespace) -> Outcome:
    from benchmarks.serving.gpu import MODELS, GpuSettings, measure_gpu

    unknown = [m for m in args.model or () if m not in MODELS]
    if unknown:
        raise UsageError(f"--model {unknown[0]}: expected one of {', '.join(MODELS)}")
    if args.image_size % 32:
        raise UsageError("--image-size: expected a multiple of 32 from 32 to 512")
    settings = with_given(
        GpuSettings(), args, models="model", image_size="image_size", seconds="seconds", device="device"
    )
    return outcome_of(measure_gpu(settings, tell))


_MEASURED = (
    models(),
    image_size(),
    number("--repeats", count(1, 1 << 20), "times that each figure is measured"),
    DEVICE,
    FIGURE,
    CSV,
)

BENCHMARKS = (
    Benchmark(
        name="layers",
        help="output size, forward seconds and memory of every layer (HAPI, Figure 2)",
        options=(*_MEASURED, batch("128", "batch size")),
        run=_layers,
    ),
    Benchmark(
        name="reuse",
        help="the gain of keeping models loaded between requests (HAPI, Figure 12, Table 4)",
        options=(
            *_MEASURED,
            batch("128", "batch size"),
            BANDWIDTH,
            NO_BED,
            request_size("16"),
            option("--before", "results of other code, whose loading is shown beside", metavar="FILE"),
            results("bench-results/reuse.jsonl"),
        ),
        run=_reuse,
    ),
    Benchmark(
        name="concurrency",
        help="requests at once, and several clients, on one server (HAPI, Figure 14)",
        options=(*_MEASURED, BANDWIDTH, NO_BED, request_size("16"), results("bench-results/concurrency.jsonl")),
        run=_concurrency,
    ),
    Benchmark(
        name="batching",
        help="seconds per sample over the COS batch, and the choice of each batch adaptation",
        options=(
            *_MEASURED,
            option("--split", "index or layer's name (default: freeze)", metavar="SPLIT"),
            number("--threads", count(1, 1024), "of a pass on a CPU", "1"),
            request_size("256", 256),
            results("bench-results/batching.jsonl"),
        ),
        run=_batching,
    ),
    Benchmark(
        name="wire",
        help="GB/s of features from server to client, beside a plain socket",
        options=(
            number("--body", size(1 << 20, 1 << 32), "bytes per transfer", "64MiB", "SIZE"),
            number("--rounds", count(1, 10_000), "transfers each way", "15"),
        ),
        run=_wire,
    ),
    Benchmark(
        name="codecs",
        help="ratio and GB/s of each codec on trained features of every cut, and the link rates at which it pays",
        options=(
            models(
                "may be repeated (default all 7 and solar: a pre-trained EfficientNet-Lite0 on solar cells)"
            ),
            image_size(),
            number("--steps", count(1, 1 << 20), "most steps of training the 7", "300"),
            number("--repeats", count(1, 1 << 10), "times that each cut is encoded; the fastest counts", "3"),
            switch("--accuracy", "measure what rounding costs the real job's held-out accuracy, too"),
            number("--seeds", count(1, 100), "of --accuracy", "5"),
            epochs("3", "of --accuracy"),
            results("bench-results/codecs.jsonl"),
        ),
        run=_codecs,
    ),
    Benchmark(
        name="memory",
        help="predicted against observed memory of the client's part, on a CPU (Linux)",
        options=(
            models("may be repeated (default: the paper's 7)"),
            batches("may be repeated (default 16, 64, 256)"),
            image_size("64", 1, 1024),
        ),
        run=_memory,
    ),
    Benchmark(
        name="residency",
        help="memory of several jobs on one backbone, as threads and as processes, and a second one's wait (Linux)",
        options=(
            models("may be repeated (default resnet50, vit_b_16)"),
            number("--jobs", count(2, 64), "on each backbone", "8"),
            image_size("224", 32, 1024),
        ),
        run=_residency,
    ),
    Benchmark(
        name="gpu",
        help="samples/s of frozen fronts and rests on a GPU, beside its copies and the wire",
        options=(
            models("one of the paper's; may be repeated"),
            number("--seconds", count(1, 86_400), "about how long to measure", "60"),
            image_size("224", 32),
            option("--device", "cuda, cuda:N, or cpu for comparison (default cuda)", default="cuda"),
        ),
        run=_gpu,
    ),
)  # fmt: skip
