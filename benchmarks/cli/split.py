"""The benchmarks of ``benchmarks/split``: the sweep and the tables that are views of it, and what it cannot show."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cli.benchmark import Benchmark, Outcome, bed_and_results, outcome_of, tell, with_given
from benchmarks.cli.options import (
    CSV,
    FIGURE,
    NO_BED,
    bandwidths,
    batch,
    batches,
    epochs,
    known_models,
    model,
    models,
    number,
    option,
    repeated,
    results,
    samples,
    switch,
)  # fmt: skip
from hapi.cli.shared.numbers import DAY, count, seconds, size
from hapi.errors import UsageError
from hapi.units import parse_bandwidth

RESULTS = "bench-results/sweep.jsonl"
_VIEWS = {
    "optimality": "share of optimal, within 5%, 10%, 15% for every strategy (HAPI, Table 3)",
    "estimates": "estimated against measured epoch seconds (HAPI, Figure 11)",
    "competitors": "every strategy's epoch beside auto's (HAPI, Figures 7 to 10)",
    "splits": "epoch seconds at every split (HAPI, Figure 3)",
    "bandwidth": "the chosen split by bandwidth (HAPI, Figure 13)",
    "traffic": "bytes over the wire by strategy (earlier HAPI text, Figures 10 and 12)",
    "cpu-client": "auto beside not splitting on a client without a GPU (earlier HAPI text, Figure 9)",
}


def _sweep(args: argparse.Namespace) -> None:
    from benchmarks.split.sweep import sweep, sweep_conditions
    from benchmarks.testbed.cells import PAPER, QUICK, Grid

    if args.paper and args.quick:
        raise UsageError("--paper: not with --quick")
    grid = with_given(
        PAPER if args.paper else QUICK if args.quick else Grid(), args, models="model", batches="bs",
        bandwidths="bandwidth", memory="memory", enough="enough", profile_parts="profiles",
    )  # fmt: skip
    bed, found = bed_and_results(args, grid, sweep_conditions(grid))
    sweep(bed, grid, found, tell, seconds=args.seconds)
    print(f"measured into {args.results}; look at it with python -m benchmarks {'|'.join(_VIEWS)}")


def _view(name: str, args: argparse.Namespace) -> Outcome:
    from benchmarks.split.plots import draw
    from benchmarks.split.replay import replayed
    from benchmarks.split.study import measured_cells, rows, unfit_cells
    from benchmarks.split.views import VIEWS
    from benchmarks.testbed.cells import read
    from benchmarks.testbed.conditions import recorded_conditions

    records: list[dict[str, Any]] = list(read(Path(args.results)))
    if args.replay:
        records = list(replayed(records))
    cells = measured_cells(records)
    table = VIEWS[name](cells)
    counted = f"{len(cells)} cells, {unfit_cells(records)} that fitted no memory"
    if args.replay:
        counted += "; choices and estimates made anew from their profiles"
    heads = [r for r in records if r["kind"] == "conditions"]
    found = rows(cells)
    return Outcome(
        table=[*table, "", counted],
        conditions=recorded_conditions(records),
        document={"benchmark": name, "table": table, "rows": found, "conditions": heads},
        rows=found,
        draw=lambda path: draw(name, cells, path),
    )


def _overlap(args: argparse.Namespace) -> Outcome:
    from benchmarks.split.overlap import BANDWIDTHS, MODELS, OverlapSettings, measure_overlap

    settings = OverlapSettings(
        models=known_models(args.model or MODELS),
        bandwidths=tuple(args.bandwidth or map(parse_bandwidth, BANDWIDTHS)),
        samples=args.samples,
        batch=args.bs,
        epochs=args.epochs,
        split=args.split,
    )
    return outcome_of(measure_overlap(settings, tell))


def _steps(args: argparse.Namespace) -> Outcome:
    from benchmarks.split.steps import StepsSettings, measure_steps
    from benchmarks.split.without import SWITCHES

    for name in args.off or ():
        if name not in SWITCHES:
            raise UsageError(f"--off {name}: unknown mechanism; known are {', '.join(SWITCHES)}")
    settings = with_given(
        StepsSettings(), args, model="model", epochs="epochs", samples="samples", batch="bs", repeats="repeats",
        bandwidths="bandwidth", off="off",
    )  # fmt: skip
    return outcome_of(measure_steps(settings, tell))


def _ablate(args: argparse.Namespace) -> Outcome:
    from benchmarks.split.ablate import ablate
    from benchmarks.testbed.cells import read

    return outcome_of(ablate(list(read(Path(args.results))), tell))


def _alternate(args: argparse.Namespace) -> Outcome:
    from benchmarks.split.alternate import alternate
    from benchmarks.testbed.cells import read

    return outcome_of(alternate(list(read(Path(args.results)))))


def _plan(args: argparse.Namespace) -> Outcome:
    from benchmarks.split.plan_seconds import measure_plan
    from hapi.models.zoo.architectures import torchvision_names

    names = known_models(args.model) if args.model else torchvision_names()
    return outcome_of(measure_plan(names, tell))


BENCHMARKS = (
    Benchmark(
        name="sweep",
        help="measure every split of every model, batch and bandwidth (root; hours, goes on where it was)",
        options=(
            switch("--quick", "2 models, 2 batches, 2 bandwidths: minutes"),
            switch("--paper", "the papers' sizes, for a GPU on each side"),
            models("may be repeated"),
            batches("training batch; may be repeated"),
            bandwidths("may be repeated"),
            number("--seconds", seconds(0), "stop after the cell that is under way then", metavar="TIME"),
            results(RESULTS, "JSON lines"),
            number(
                "--enough",
                seconds(1e-3, DAY),
                "of epochs at each split that decides, unless they tell before (default 20 s; more goes on with "
                "cells that are done)",
                metavar="TIME",
            ),
            number(
                "--profiles",
                count(1, 100),
                "of each cell, of which the mean counts (default 2; more goes on with cells that are done)",
            ),
            number(
                "--memory", size(1 << 20), "bytes that the client may use (default: the free memory)", metavar="SIZE"
            ),
            NO_BED,
        ),
        run=_sweep,
        tells=False,
    ),
    *(
        Benchmark(
            name=name,
            help=f"from a sweep: {text}",
            options=(
                results(RESULTS, "of python -m benchmarks sweep"),
                switch(
                    "--replay",
                    "let the strategies choose anew from the profiles in FILE, with the cost model as it is now",
                ),
                FIGURE,
                CSV,
            ),
            run=partial(_view, name),
        )
        for name, text in _VIEWS.items()
    ),
    Benchmark(
        name="overlap",
        help="epoch seconds over the slowest of server, network and client (needs root)",
        options=(
            models("may be repeated (default resnet18, alexnet)"),
            bandwidths("may be repeated (default 8Mbps, 20Mbps, 100Mbps)"),
            samples("1024"),
            batch("32"),
            epochs("3", "measured epochs each"),
            option("--split", "as for hapi-train (default freeze)", default="freeze"),
        ),
        run=_overlap,
    ),
    Benchmark(
        name="steps",
        help="a link that changes under a run, beside runs that knew its bandwidth (needs root)",
        options=(
            model("resnet18"),
            bandwidths("of one stretch after the other (default 100Mbps, 10Mbps, 100Mbps)"),
            epochs("4", "of each stretch"),
            samples("640"),
            batch("64"),
            number("--repeats", count(1, 1000), "times that all is measured", "3"),
            repeated("--off", "mechanism of planning that is off in a further run; may be repeated", metavar="NAME"),
        ),
        run=_steps,
    ),
    Benchmark(
        name="ablate",
        help="planning with each of its mechanisms off in turn, on the profiles of a sweep",
        options=(results(RESULTS, "of python -m benchmarks sweep"),),
        run=_ablate,
    ),
    Benchmark(
        name="alternate",
        help="batches that alternate between two splits beside the best one split, on the profiles of a sweep",
        options=(results(RESULTS, "of python -m benchmarks sweep"),),
        run=_alternate,
    ),
    Benchmark(
        name="plan",
        help="seconds until hapi plan answers, for torchvision's models",
        options=(models("may be repeated (default: torchvision's, all 80)"),),
        run=_plan,
    ),
)  # fmt: skip
