"""The benchmarks of ``benchmarks/load``: more than a server can do, many tenants, a siege."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.cli.benchmark import Benchmark, Outcome, bed_and_results, outcome_of, tell, with_given
from benchmarks.cli.options import (
    CSV,
    FIGURE,
    NO_BED,
    batch,
    model,
    models,
    number,
    repeated,
    request_size,
    results,
    samples,
    switch,
)  # fmt: skip
from hapi.cli.shared.numbers import DAY, count, seconds, size
from hapi.errors import UsageError

_MOST_TENANTS = 64


def _overload(args: argparse.Namespace) -> Outcome:
    from benchmarks.load.overload import QUICK, OverloadSettings, measure_overload

    settings = with_given(
        QUICK if args.quick else OverloadSettings(), args,
        clients="clients", model="model", request_size="request_size", seconds="seconds",
    )  # fmt: skip
    return outcome_of(measure_overload(settings, tell))


def _stragglers(args: argparse.Namespace) -> Outcome:
    from benchmarks.fleet.slow_server import REQUESTS, simulate_slow_server
    from benchmarks.load.stragglers import StragglersSettings, measure_stragglers
    from benchmarks.testbed.conditions import conditions

    settings = with_given(StragglersSettings(), args, servers="servers", pairs="pairs", requests="requests")
    if args.simulated:
        found = simulate_slow_server(settings.servers, args.requests or REQUESTS, settings.pairs, tell)
        known = conditions()
        return Outcome(
            table=found.table(), conditions=known, document={**found.to_json(), "conditions": known}
        )
    return outcome_of(measure_stragglers(settings, tell))


def _siege(args: argparse.Namespace) -> Outcome:
    from benchmarks.load.siege import SiegeSettings, measure_siege

    return outcome_of(measure_siege(SiegeSettings(seconds=args.seconds), tell))


def _jobs(args: argparse.Namespace) -> Outcome:
    from benchmarks.load.jobs import JobsSettings, head, measure_jobs
    from benchmarks.testbed.cells import Results

    settings = with_given(
        JobsSettings(), args,
        jobs="jobs", epochs="epochs", model="model", freeze="freeze", samples="samples", image_size="image_size",
        bs="bs", repeats="repeats", step="step",
    )  # fmt: skip
    return outcome_of(measure_jobs(settings, Results(Path(args.results), head(settings)), tell))


def _tenants(args: argparse.Namespace) -> Outcome:
    """Measure what is missing, and show all of it."""
    from benchmarks.load.tenants import MODES, TenantsSettings, measure_tenants
    from benchmarks.load.tenants_view import draw_tenants, tenants_rows, tenants_table
    from benchmarks.testbed.conditions import recorded_conditions

    unknown = [mode for mode in args.mode or () if mode not in MODES]
    if unknown:
        raise UsageError(f"--mode {unknown[0]}: expected one of {', '.join(MODES)}")
    settings = TenantsSettings(train=args.train)
    if args.quick:
        settings = replace(
            settings, models=("alexnet", "resnet18"), samples=64, request_size=32, counts=(1, 4)
        )
    settings = with_given(
        settings, args, models="model", modes="mode", counts="tenants", samples="samples",
        request_size="request_size", image_size="image_size", device_memory="device_memory",
    )  # fmt: skip
    settings = replace(
        settings, counts=tuple(sorted(set(settings.counts))), modes=tuple(dict.fromkeys(settings.modes))
    )
    bed, records = bed_and_results(args, settings)
    measure_tenants(bed, settings, records, tell)
    rows = tenants_rows(records.records, settings.samples)
    table = tenants_table(rows, records.records)
    found = recorded_conditions(records.records)
    measured = [r for r in records.records if r["kind"] != "conditions"]
    document = {"benchmark": "tenants", "settings": asdict(settings), "table": table, "records": measured}
    return Outcome(
        table=table,
        conditions=found,
        document={**document, "conditions": found},
        rows=[row.to_json() for row in rows],
        draw=lambda path: draw_tenants(rows, path),
    )


BENCHMARKS = (
    Benchmark(
        name="overload",
        help="a server under ten times its peak load (two cores, Linux)",
        options=(
            switch("--quick", "a minute and a half instead of six"),
            number("--seconds", seconds(1, DAY), "of each of the two overloads (default 120)", metavar="TIME"),
            number("--clients", count(1, 1000), "", "50"),
            model("resnet18"),
            request_size("32", 65_536),
        ),
        run=_overload,
    ),
    Benchmark(
        name="stragglers",
        help="seconds of requests to several servers, of which one is ten times as slow (two cores, Linux)",
        options=(
            number("--servers", count(2, 16), "", "4"),
            number("--pairs", count(1, 1000), "of runs of each way, with and without the slow one", "5"),
            number("--requests", count(100, 1 << 20), "of each run (default 400, simulated 2000)"),
            switch("--simulated", "in simulated time, by the client's and the scheduler's own code: without noise"),
        ),
        run=_stragglers,
    ),
    Benchmark(
        name="siege",
        help="floods, hung reads, kills, full disks and more beside three training jobs (two cores, Linux)",
        options=(number("--seconds", seconds(1, DAY), "of the siege", "600", "TIME"),),
        run=_siege,
    ),
    Benchmark(
        name="jobs",
        help="several jobs of one frozen prefix over one server, against one alone; and jobs of three speeds",
        options=(
            number("--jobs", count(1, 64), "at once", "8"),
            number("--epochs", count(1, 1000), "of each job", "30"),
            model("resnet18"),
            number("--freeze", count(1, 1000), "the last frozen layer", "11"),
            samples("2048"),
            number("--image-size", count(8, 4096), "in pixels", "64"),
            batch("64"),
            number("--step", seconds(0.001, 60), "pause that is a step; slower jobs 2, 4 times that", "0.05", "TIME"),
            number("--repeats", count(1, 1000), "turns, each with all runs", "1"),
            results("bench-results/jobs.jsonl", "JSON lines; goes on where it was"),
        ),
        run=_jobs,
    ),
    Benchmark(
        name="tenants",
        help="1 to 10 tenants at once: makespan, mean job, memory, against all in the store (HAPI, Figure 11)",
        options=(
            repeated("--tenants", "may be repeated (default 1,2,4,6,8,10)", count(1, _MOST_TENANTS)),
            repeated(
                "--mode",
                "auto, adaptive, fixed, whole (no adaptation), store (all in the store); may be repeated "
                "(default all but fixed)",
                metavar="MODE",
            ),
            models("may be repeated (default all 7, in turn)"),
            samples(None, "of each job (default 256)", 1 << 16),
            number("--request-size", count(1, 1 << 16), "also the training batch (default 128)"),
            number("--image-size", count(64, 512), "side of the inputs (default 64)"),
            number(
                "--device-memory",
                size(1),
                "budget of the storage device (default: the need of the largest whole job)",
                metavar="SIZE",
            ),
            switch("--train", "clients train, instead of only receiving"),
            switch("--quick", "a small run: two models, 1 and 4 tenants, 64 samples"),
            results("bench-results/tenants.jsonl"),
            FIGURE,
            CSV,
            NO_BED,
        ),
        run=_tenants,
    ),
)  # fmt: skip
