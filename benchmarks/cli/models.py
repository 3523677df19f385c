"""The benchmark of stored models: writing them, and loading them whole and in part, beside files of other kinds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cli.benchmark import Benchmark, Outcome, recorded_outcome, tell, with_given
from benchmarks.cli.options import CSV, FIGURE, number, option, repeated, results, switch
from hapi.cli.shared.numbers import DAY, count, seconds
from hapi.errors import UsageError

if TYPE_CHECKING:
    from benchmarks.models.settings import ModelsSettings

RESULTS = "bench-results/models.jsonl"
PARTS = ("figures", "goals")


def _models(args: argparse.Namespace) -> Outcome:
    from benchmarks.models.settings import GOALS, goal_groups, groups_of
    from benchmarks.testbed.cells import Results, read
    from benchmarks.testbed.conditions import conditions

    settings = _settings(args)
    path = Path(args.results)
    if args.view:
        return _outcome(list(read(path)))
    from benchmarks.models.engine import measure
    from benchmarks.testbed.loose import LooseBed

    bed = LooseBed("its link is not the limit")
    groups = goal_groups() if args.part == GOALS else groups_of(settings.cells())
    cores = "local clients on all cores" if bed.cores is None else f"{bed.cores}; local clients on all"
    head = {"cores_of_processes": cores, "packages": _versions(settings.peers)}
    found = Results(path, {**conditions(), **head})
    measure(bed, groups, settings, found, tell)
    return _outcome(found.records)


def _settings(args: argparse.Namespace) -> ModelsSettings:
    from benchmarks.models.settings import GOALS, PLACES, ModelsSettings, figure_of, way_of

    settings = with_given(
        ModelsSettings(quick=args.quick, rounds=9 if args.part == GOALS else 3), args,
        figures="page", ways="way", places="place", clients="clients", rounds="rounds", folder="folder",
        peers="peers", limit="limit", cell_time="cell_time", shapes="model", loads="load",
    )  # fmt: skip
    for way in settings.ways:
        way_of(way)
    for figure in settings.figures:
        figure_of(figure)
    for place in settings.places:
        if place not in PLACES:
            raise UsageError(f"--place {place}: expected one of {', '.join(PLACES)}")
    return settings


def _versions(peers: tuple[Path, ...]) -> str:
    """Versions of the packages of other ways, those in ``peers`` too."""
    from importlib.metadata import distributions

    names = {"safetensors", "h5py", "fastsafetensors", "runai-model-streamer", "obstore"}
    found = [
        f"{d.name} {d.version}{where}"
        for where, paths in (("", None), (" (in a folder of its own)", [str(peer) for peer in peers]))
        if paths is None or paths
        for d in (distributions() if paths is None else distributions(path=paths))
        if d.name in names
    ]
    return ", ".join(sorted(dict.fromkeys(found)))


def _outcome(records: list[dict[str, Any]]) -> Outcome:
    from benchmarks.models.figure import draw
    from benchmarks.models.rows import goals_of, left_out, rows_of, table

    rows = rows_of(records)
    return recorded_outcome(
        records,
        table(records),
        [row.to_json() for row in rows],
        lambda path: draw(rows, path),
        benchmark="models",
        goals=[goal.to_json() for goal in goals_of(records)],
        left_out=left_out(records),
    )


BENCHMARKS = (
    Benchmark(
        name="models",
        help="storing and loading models, whole and in part, beside other files (DStore, Figures 4 to 9)",
        options=(
            option("--part", "figures, or the goals alone, in ten minutes (default figures)", choices=PARTS,
                default=PARTS[0]),
            repeated("--page", "of DStore's Figures 4 to 9; may be repeated (default all)", count(4, 9)),
            repeated("--model", "of the figures, such as 10x1GB; may be repeated (default all)", metavar="NAME"),
            repeated("--load", "part that is loaded, such as 25%% or 100%%; may be repeated (default all)",
                metavar="PART"),
            repeated("--way", "of keeping a model; may be repeated (default all)", metavar="NAME"),
            repeated("--place", "local, http, swift; may be repeated (default all)", metavar="PLACE"),
            repeated("--clients", "of Figure 9; may be repeated (default 1, 2, 4, 8)", count(1, 64)),
            number("--rounds", count(1, 1000), "of each cell that count (default 3; 9 of the goals' cells)"),
            switch("--quick", "small models, to try it out"),
            option("--peers", "folder with packages of other ways (pip install --no-deps --target FOLDER); may be "
                "repeated", action="append", type=Path, metavar="FOLDER"),
            option("--folder", "on the disk to be measured (default: the temporary folder)", type=Path,
                metavar="FOLDER"),
            number("--limit", seconds(1, DAY), "longest time of one step (default 5min)", metavar="TIME"),
            number("--cell-time", seconds(1, DAY), "after which a cell of which a round counts gets no more of them "
                "(default 2min)", metavar="TIME"),
            switch("--view", "measure nothing; show what FILE has"),
            results(RESULTS, "JSON lines; goes on where it was"),
            FIGURE,
            CSV,
        ),
        run=_models,
    ),
)  # fmt: skip
