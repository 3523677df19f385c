"""The benchmarks of whole jobs: what several epochs cost with and without kept features."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.cli.benchmark import (
    Benchmark,
    Outcome,
    outcome_of,
    recorded_outcome,
    tell,
    with_given,
)  # fmt: skip
from benchmarks.cli.options import (
    CSV,
    FIGURE,
    bandwidths,
    batch,
    image_size,
    known_models,
    number,
    option,
    repeated,
    results,
    samples,
    switch,
)  # fmt: skip
from hapi.cli.shared.numbers import count, real
from hapi.errors import UsageError

RESULTS = "bench-results/epochs.jsonl"
_PRICE = real(0, 1e6)


def _epochs(args: argparse.Namespace) -> Outcome:
    from benchmarks.epochs.settings import EpochsSettings, Prices, way_of
    from benchmarks.testbed.cells import Results, read
    from benchmarks.testbed.conditions import conditions

    settings = with_given(
        EpochsSettings(), args, bandwidths="bandwidth", counts="epochs", ways="way", measured="measured",
        repeats="repeats", samples="samples", image_size="image_size", real_samples="real_samples", bs="bs",
        folder="folder",
    )  # fmt: skip
    settings = replace(settings, models=_models(args.model or settings.models))
    if args.full:
        settings = replace(settings, measured=None)
    for way in settings.ways:
        way_of(way)
    if settings.bs > min(settings.samples, settings.real_samples or settings.bs):
        raise UsageError(f"--bs {settings.bs}: there are fewer samples, and an incomplete batch is left out")
    prices = Prices(egress=args.egress, server=args.server_price, trainer=args.trainer_price)
    path = Path(args.results)
    if args.view:
        return _outcome(list(read(path)), settings.counts, prices)
    from benchmarks.epochs.engine import measure
    from benchmarks.testbed.testbed import TestBed

    bed = TestBed()
    head = {"grid": settings.measuring(), "test_bed": bed.describe(), "threads": "1 on each side"}
    recorded = Results(path, {**conditions(), **head})
    measure(bed, settings, recorded, tell)
    return _outcome(recorded.records, settings.counts, prices)


def _outcome(records: list[dict[str, Any]], counts: tuple[int, ...], prices: Any) -> Outcome:
    from benchmarks.epochs.figure import draw
    from benchmarks.epochs.rows import codec_goals, goals_of, rows_of, table

    rows = rows_of(records, counts, prices)
    jobs = {record["cell"]: record["job"] for record in records if record["kind"] == "run"}
    disks = [record["write_bytes_per_second"] for record in records if record["kind"] == "disk"]
    outcome = recorded_outcome(
        records,
        table(records, rows, prices),
        [row.to_json() for row in rows],
        lambda path: draw(rows, path, jobs[rows[-1].cell] if rows else ""),
        benchmark="epochs",
        goals=[goal.to_json() for goal in (*goals_of(rows), *codec_goals(records))],
        prices=asdict(prices),
        disk_write_bytes_per_second=disks,
    )
    written = ", ".join(f"{rate / 1e6:.0f} MB/s" for rate in disks)
    return replace(outcome, conditions={**outcome.conditions, "disk writes": written or "not measured"})


def _hits(args: argparse.Namespace) -> Outcome:
    from benchmarks.epochs.hits import HitsSettings, measure_hits

    settings = with_given(HitsSettings(), args, samples="samples", bs="bs", epochs="epochs")
    if settings.bs > settings.samples:
        raise UsageError(f"--bs {settings.bs}: there are fewer samples ({settings.samples})")
    return outcome_of(measure_hits(settings))


def _models(names: Any) -> tuple[str, ...]:
    """``names``, checked before anything is started."""
    from benchmarks.epochs.settings import MODELS, REAL_JOBS

    for name in names:
        if name not in MODELS:
            raise UsageError(f"--model {name}: the plain script has {', '.join(MODELS)}")
    known_models([name for name in names if name not in REAL_JOBS])
    return tuple(dict.fromkeys(names))


BENCHMARKS = (
    Benchmark(
        name="epochs",
        help="whole jobs by Hapi, by recomputing, by streaming and by a plain script (root; goes on where it was)",
        options=(
            repeated("--model", "of resnet50, resnet18, transformer, solar, solar-head; may be repeated (default all)",
                metavar="NAME"),
            bandwidths("may be repeated (default 10Mbps, 40Mbps, 160Mbps)"),
            repeated("--epochs", "of a job; may be repeated (default 1, 2, 10, 30)", count(1, 10_000)),
            repeated("--way", "of doing it; may be repeated (default all)", metavar="NAME"),
            number("--measured", count(2, 10_000), "epochs that are run; the seconds of later ones are computed", "4"),
            switch("--full", "run all epochs of all jobs"),
            number("--repeats", count(1, 1000), "of each run; medians count", "1"),
            samples("1024", "images of a job that is not of solar cells"),
            image_size(),
            number("--real-samples", count(64, 1 << 20), "images of a solar job (default all 1,668)"),
            batch("64"),
            number("--egress", _PRICE, "price of a GB over the link", "0.09", "PRICE"),
            number("--server-price", _PRICE, "of an hour of a processor beside the store", "0.5", "PRICE"),
            number("--trainer-price", _PRICE, "of an hour of the trainer", "0.5", "PRICE"),
            option("--folder", "for data and caches (default: the temporary folder)", type=Path, metavar="FOLDER"),
            switch("--view", "measure nothing; show what FILE has"),
            results(RESULTS, "JSON lines; goes on where it was"),
            FIGURE,
            CSV,
        ),
        run=_epochs,
    ),
    Benchmark(
        name="hits",
        help="epochs whose features are all kept, beside a plain loop over a tensor",
        options=(
            samples("4096", high=1 << 17),
            batch("64"),
            number("--epochs", count(6, 10_000), "of the job; 25 of 30 are timed", "30"),
        ),
        run=_hits,
    ),
)  # fmt: skip
