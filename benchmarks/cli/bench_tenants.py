"""``benchmarks tenants``: many tenants at once, against no batch adaptation and all-in-the-store."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.cli.bench_flags import known_models
from benchmarks.cli.bench_study import add_no_bed
from hapi.cli.shared.numbers import count, size
from hapi.errors import UsageError

NAME = "tenants"
_RESULTS = "bench-results/tenants.jsonl"
_MOST_TENANTS = 64


def configure_tenants(benchmarks: Any) -> None:
    """Add it to ``benchmarks``."""
    p = benchmarks.add_parser(
        NAME,
        help="1 to 10 tenants at once: makespan, mean job, memory, against all in the store (HAPI, Figure 11)",
    )
    p.add_argument(
        "--tenants",
        type=count(1, _MOST_TENANTS),
        action="append",
        metavar="N",
        help="may be repeated (default 1,2,4,6,8,10)",
    )
    p.add_argument(
        "--mode",
        action="append",
        metavar="MODE",
        help="auto, adaptive, fixed, whole (no adaptation), store (all in the store); may be repeated "
        "(default all but fixed)",
    )
    p.add_argument(
        "--model", action="append", metavar="NAME", help="may be repeated (default all 7, in turn)"
    )
    p.add_argument("--samples", type=count(1, 1 << 16), metavar="N", help="of each job (default 256)")
    p.add_argument(
        "--request-size", type=count(1, 1 << 16), metavar="N", help="also the training batch (default 128)"
    )
    p.add_argument("--image-size", type=count(64, 512), metavar="N", help="side of the inputs (default 64)")
    p.add_argument(
        "--device-memory",
        type=size(1),
        metavar="SIZE",
        help="budget of the storage device (default what the largest whole job takes)",
    )
    p.add_argument("--train", action="store_true", help="clients train, instead of only receiving")
    p.add_argument(
        "--quick", action="store_true", help="a small run: two models, 1 and 4 tenants, 64 samples"
    )
    p.add_argument(
        "--results", default=_RESULTS, metavar="FILE", help=f"goes on where it was (default {_RESULTS})"
    )
    p.add_argument("--figure", metavar="FILE", help="also draw it (.png, .svg or .pdf)")
    p.add_argument("--csv", metavar="FILE", help="also write the figures as a table")
    p.add_argument("--json", metavar="FILE", help="also write the figures and conditions")
    add_no_bed(p)


def run_tenants(args: argparse.Namespace) -> int:
    """Measure what is missing, and print it with its conditions."""
    from benchmarks.load.tenants import measure_tenants
    from benchmarks.load.tenants_view import draw_tenants, tenants_rows, tenants_table
    from benchmarks.testbed.cells import Results
    from benchmarks.testbed.conditions import condition_lines, conditions, recorded_conditions, write_json
    from benchmarks.testbed.export import write_csv
    from benchmarks.testbed.loose import LooseBed, choose_bed
    from hapi.figures.canvas import check_suffix

    if args.figure:
        check_suffix(args.figure)
    settings = _settings(args)
    bed = choose_bed(args.no_bed)
    head = {**conditions(), "grid": asdict(settings), "test_bed": bed.describe()}
    results = Results(Path(args.results), {**head, "limited": isinstance(bed, LooseBed)})
    measure_tenants(bed, settings, results, lambda line: print(line, file=sys.stderr, flush=True))
    rows = tenants_rows(results.records, settings.samples)
    table = tenants_table(rows, results.records)
    found = recorded_conditions(results.records)
    print("\n".join([*table, "", *condition_lines(found)]))
    if args.json:
        document = {"benchmark": NAME, "settings": asdict(settings), "table": table}
        rest = [r for r in results.records if r["kind"] != "conditions"]
        write_json(args.json, {**document, "records": rest, "conditions": found})
    if args.csv:
        write_csv(args.csv, [row.to_json() for row in rows])
    if args.figure:
        draw_tenants(rows, args.figure)
    return 0


def _settings(args: argparse.Namespace) -> Any:
    from benchmarks.load.tenants import MODES, TenantsSettings

    settings = TenantsSettings(train=args.train)
    if args.quick:
        small: dict[str, Any] = {"samples": 64, "request_size": 32, "counts": (1, 4)}
        settings = replace(settings, models=("alexnet", "resnet18"), **small)
    given: dict[str, Any] = {}
    for name in ("samples", "request_size", "image_size", "device_memory"):
        if (value := getattr(args, name)) is not None:
            given[name] = value
    if args.tenants:
        given["counts"] = tuple(sorted(set(args.tenants)))
    if args.model:
        given["models"] = known_models(args.model)
    if args.mode:
        unknown = [mode for mode in args.mode if mode not in MODES]
        if unknown:
            raise UsageError(f"--mode {unknown[0]}: expected one of {', '.join(MODES)}")
        given["modes"] = tuple(dict.fromkeys(args.mode))
    return replace(settings, **given)
