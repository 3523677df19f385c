"""``benchmarks layers``, ``reuse``, ``concurrency``, ``batching``: what a sweep cannot show is measured by itself."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.cli.bench_flags import known_models
from benchmarks.cli.bench_study import add_no_bed
from hapi.cli.shared.numbers import count, rate

_COUNT = count(1, 1 << 20)

MEASURED = ("layers", "reuse", "concurrency", "batching")
"""Sub-commands that this module runs."""
_HELP = {
    "layers": "output size, forward seconds and memory of every layer (HAPI, Figure 2)",
    "reuse": "what keeping models loaded between requests is worth (HAPI, Figure 12, Table 4)",
    "concurrency": "requests at once, and several clients, on one server (HAPI, Figure 14)",
    "batching": "seconds per sample over the COS batch, and what each batch adaptation chooses",
}


def configure_measured(benchmarks: Any) -> None:
    """Add them to ``benchmarks``."""
    for name in MEASURED:
        benchmark = benchmarks.add_parser(name, help=_HELP[name])
        benchmark.add_argument(
            "--model", action="append", metavar="NAME", help="may be repeated (default all 7)"
        )
        benchmark.add_argument(
            "--image-size",
            type=count(64, 512),
            default="64",
            metavar="N",
            help="side of the inputs (default 64)",
        )
        benchmark.add_argument(
            "--repeats", type=_COUNT, metavar="N", help="times that each figure is measured"
        )
        benchmark.add_argument("--device", default="cpu", help="of both tiers: auto, cpu, cuda (default cpu)")
        if name in ("layers", "reuse"):
            benchmark.add_argument(
                "--bs", type=_COUNT, default="128", metavar="N", help="batch size (default 128)"
            )
        if name == "batching":
            benchmark.add_argument("--split", metavar="SPLIT", help="index or layer's name (default: freeze)")
            benchmark.add_argument(
                "--threads",
                type=count(1, 1024),
                default="1",
                metavar="N",
                help="of a pass on a CPU (default 1)",
            )
        if name in ("reuse", "concurrency"):
            benchmark.add_argument("--bandwidth", type=rate(), metavar="RATE", help="of the link")
            add_no_bed(benchmark)
        if name != "layers":
            size, most = ("256", 256) if name == "batching" else ("16", 1 << 20)
            benchmark.add_argument(
                "--request-size",
                type=count(1, most),
                default=size,
                metavar="N",
                help=f"samples (default {size})",
            )
            path = f"bench-results/{name}.jsonl"
            benchmark.add_argument(
                "--results", default=path, metavar="FILE", help=f"goes on where it was (default {path})"
            )
        benchmark.add_argument("--figure", metavar="FILE", help="also draw it (.png, .svg or .pdf)")
        benchmark.add_argument("--csv", metavar="FILE", help="also write the figures as a table")
        benchmark.add_argument("--json", metavar="FILE", help="also write the figures and conditions")


def run_measured(args: argparse.Namespace) -> int:
    """Measure what is missing, and print it with its conditions."""
    from hapi.figures.canvas import check_suffix

    if args.figure:
        check_suffix(args.figure)
    programs = {"layers": _layers, "reuse": _reuse, "concurrency": _concurrency, "batching": _batching}
    return programs[args.benchmark](args)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _layers(args: argparse.Namespace) -> int:
    from benchmarks.serving.layers import LayersSettings, measure_layers
    from benchmarks.serving.plots_measured import draw_layers

    settings = _with(LayersSettings(bs=args.bs, image_size=args.image_size, device=args.device), args)
    result = measure_layers(settings, _tell)
    _write(args, result.table(), result.rows(), result.to_json(), result.conditions)
    if args.figure:
        draw_layers(result.layers, args.figure)
    return 0


def _reuse(args: argparse.Namespace) -> int:
    from benchmarks.serving.plots_measured import draw_reuse
    from benchmarks.serving.reuse import ReuseSettings, measure_reuse, reuse_rows, reuse_table
    from benchmarks.testbed.conditions import recorded_conditions

    settings = _with(ReuseSettings(bs=args.bs, **_common(args)), args)
    bed, results = _prepared(args, settings)
    measure_reuse(bed, settings, results, _tell)
    rows = reuse_rows(results.records)
    table = [asdict(row) | {"speedup": row.speedup} for row in rows]
    found = recorded_conditions(results.records)
    _write(args, reuse_table(rows, settings), table, {"benchmark": "reuse"}, found)
    if args.figure:
        draw_reuse(rows, args.figure)
    return 0


def _concurrency(args: argparse.Namespace) -> int:
    from benchmarks.serving.concurrency import (
        AT_ONCE,
        ConcurrencySettings,
        concurrency_table,
        measure_concurrency,
        request_rows,
        tenant_rows,
    )
    from benchmarks.serving.plots_measured import draw_concurrency
    from benchmarks.testbed.conditions import recorded_conditions

    settings = _with(ConcurrencySettings(**_common(args)), args)
    bed, results = _prepared(args, settings)
    measure_concurrency(bed, settings, results, _tell)
    rows, tenants = request_rows(results.records), tenant_rows(results.records)
    table = [
        {"model": r.model, "split": r.split, "request_bytes": r.request_bytes}
        | {f"seconds_{count}": r.seconds[count] for count in AT_ONCE}
        for r in rows
    ]
    document = {"benchmark": "concurrency", "tenants": [asdict(row) for row in tenants]}
    found = recorded_conditions(results.records)
    _write(args, concurrency_table(rows, tenants, settings), table, document, found)
    if args.figure:
        draw_concurrency(rows, tenants, args.figure)
    return 0


def _batching(args: argparse.Namespace) -> int:
    from benchmarks.serving.batching import BatchingSettings, batching_rows, batching_table, measure_batching
    from benchmarks.serving.plots_measured import draw_batching
    from benchmarks.testbed.cells import Results
    from benchmarks.testbed.conditions import conditions, recorded_conditions

    settings = BatchingSettings(
        split=args.split,
        image_size=args.image_size,
        device=args.device,
        request_size=args.request_size,
        threads=args.threads,
    )
    settings = _with(settings, args)
    results = Results(Path(args.results), {**conditions(), "grid": asdict(settings)})
    measure_batching(settings, results, _tell)
    rows = batching_rows(results.records, settings.request_size)
    table = [
        {"model": row.model, "split": row.split, "best": row.best, "looked_samples": row.looked}
        | dict(row.chosen)
        | {f"seconds_{batch}": seconds for batch, seconds in row.seconds.items()}
        for row in rows
    ]
    head = {"benchmark": "batching", "settings": asdict(settings)}
    _write(args, batching_table(rows, settings), table, head, recorded_conditions(results.records))
    if args.figure:
        draw_batching(rows, args.figure)
    return 0


def _with(settings: Any, args: argparse.Namespace) -> Any:
    """``settings`` with the models and the repetitions that were asked for."""
    if args.model:
        settings = replace(settings, models=known_models(args.model))
    if args.repeats is not None:
        settings = replace(settings, repeats=args.repeats)
    return settings


def _common(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"image_size": args.image_size, "device": args.device}
    found["request_size"] = args.request_size
    if args.bandwidth is not None:
        found["bandwidth"] = args.bandwidth
    return found


def _prepared(args: argparse.Namespace, settings: Any) -> tuple[Any, Any]:
    """(the bed, the results that are there already)."""
    from benchmarks.testbed.cells import Results
    from benchmarks.testbed.conditions import conditions
    from benchmarks.testbed.loose import LooseBed, choose_bed

    bed = choose_bed(args.no_bed)
    limited = isinstance(bed, LooseBed)
    found = {**conditions(), "grid": asdict(settings), "test_bed": bed.describe(), "limited": limited}
    return bed, Results(Path(args.results), found)


def _write(
    args: argparse.Namespace,
    table: list[str],
    rows: list[dict[str, Any]],
    document: dict[str, Any],
    conditions: dict[str, Any],
) -> None:
    from benchmarks.testbed.conditions import condition_lines, write_json
    from benchmarks.testbed.export import write_csv

    print("\n".join([*table, "", *condition_lines(conditions)]))
    if args.json:
        write_json(args.json, {**document, "table": table, "rows": rows, "conditions": conditions})
    if args.csv:
        write_csv(args.csv, rows)
