"""The benchmark of training beyond the memory: AdamW on a disk beside AdamW in memory, and other ways."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cli.benchmark import Benchmark, Outcome, recorded_outcome, tell, with_given
from benchmarks.cli.options import CSV, FIGURE, number, option, repeated, results, switch
from hapi.cli.shared.numbers import DAY, count, seconds, size
from hapi.errors import UsageError

RESULTS = "bench-results/offload.jsonl"
_QUICK_TURNS = 2


def _offload(args: argparse.Namespace) -> Outcome:
    from benchmarks.offload.settings import GOALS, PARTS, REGIMES, WAYS, OffloadSettings, blocks_of
    from benchmarks.testbed.cells import Results, read
    from benchmarks.testbed.conditions import conditions

    for part in args.part or ():
        if part not in (*PARTS, GOALS):
            raise UsageError(f"--part {part}: expected one of {', '.join((*PARTS, GOALS))}")
    plain = OffloadSettings(quick=args.quick, rounds=7 if args.part == [GOALS] else 3)
    if args.quick:
        plain = OffloadSettings(quick=True, rounds=_QUICK_TURNS, steps=1, caps=(8e8,))
    settings = with_given(
        plain, args, parts="part", tails="tail", rounds="turns", limit="limit", threads="threads",
        ways="way", regimes="batch", caps="cap", device="device", rows="rows",
    )  # fmt: skip
    _check_device(settings.device, settings.rows, settings.parts)
    for tail in settings.tails:
        blocks_of(tail)
    for name in settings.ways:
        if name not in WAYS:
            raise UsageError(f"--way {name}: expected one of {', '.join(WAYS)}")
    for name in settings.regimes:
        if name not in REGIMES:
            raise UsageError(f"--batch {name}: expected one of {', '.join(REGIMES)}")
    if args.view:
        return _outcome(list(read(Path(args.results))))
    from benchmarks.offload.engine import check_folder, measure
    from benchmarks.offload.sizes import find_sizes

    check_folder(args.folder)
    head = {"grid": {"steps": settings.steps, "threads": settings.threads, "quick": settings.quick}}
    found = Results(Path(args.results), {**conditions(), **head})
    measure(settings.groups(), settings, args.folder, found, tell)
    if "clipping" in settings.parts and all(record["kind"] != "given back" for record in found.records):
        from benchmarks.offload.rollback import given_back

        found.add({"kind": "given back", **given_back()})
    if "size" in settings.parts:
        find_sizes(settings, args.folder, found, tell)
    return _outcome(found.records)


def _check_device(device: str, rows: int | None, parts: Sequence[str]) -> None:
    from hapi.models.devices import resolve_device

    if resolve_device(device, "--device").type == "cpu":
        return
    if rows is None:
        raise UsageError(f"--device {device}: needs --rows N, the rows of a batch, such as 4096")
    others = [part for part in parts if part != "steps"]
    if others:
        raise UsageError(f"--device {device}: measures --part steps, not {', '.join(others)}")


def _outcome(records: list[dict[str, Any]]) -> Outcome:
    from benchmarks.offload.figure import draw
    from benchmarks.offload.paper import compare
    from benchmarks.offload.rows import goals_of, left_out, rows_of, sizes_of, table

    rows, sizes = rows_of(records), sizes_of(records)
    compared = compare(records, rows)
    lines = table(records)
    if compared:
        lines += ["", "beside the paper (LoHan)", *(f"  {one.text()}" for one in compared)]
    return recorded_outcome(
        records,
        lines,
        [row.to_json() for row in rows],
        lambda path: draw(rows, sizes, compared, path),
        benchmark="offload",
        goals=[goal.to_json() for goal in goals_of(records)],
        sizes=sizes,
        paper=[one.to_json() for one in compared],
        left_out=left_out(records),
    )


BENCHMARKS = (
    Benchmark(
        name="offload",
        help="training with AdamW's states on a disk, beside AdamW in memory and other ways (LoHan, Figures 5 to 10)",
        options=(
            repeated("--part", "steps, size, disks, aside, clipping, swap, or the goals alone; may be repeated "
                "(default all but the goals)", metavar="PART"),
            repeated("--tail", "100M, 218M, 1B; may be repeated (default all)", metavar="NAME"),
            number("--turns", count(1, 1000), "of each way (default 3; 7 of the goals')"),
            repeated("--way", "that takes part, such as memory, active, serial; may be repeated (default all)",
                metavar="NAME"),
            repeated("--batch", "of steps, swap, goals: compute-bound, balanced, I/O-bound; may be repeated (default "
                "all)", metavar="NAME"),
            repeated("--cap", "memory of the part size; may be repeated (default 1, 1.5 and 2 GB)",
                size(600_000_000, 1 << 44), "SIZE"),
            option("--device", "cuda measures --part steps on a GPU, beside torchao, trainstream and DeepSpeed "
                "where they are installed (default cpu)", metavar="DEVICE"),
            number("--rows", count(1, 1 << 24), "of a batch of --part steps (default: those of --batch)"),
            number("--threads", count(1, 4096), "of torch (default: the cores; beside other work 1 is faster)"),
            number("--limit", seconds(1, DAY), "longest time of one answer (default 5min)", metavar="TIME"),
            switch("--quick", "a small tail, to try it out"),
            option("--folder", "on the disk to be used (default: the temporary folder)", type=Path, metavar="FOLDER"),
            switch("--view", "measure nothing; show what FILE has"),
            results(RESULTS, "JSON lines; goes on where it was"),
            FIGURE,
            CSV,
        ),
        run=_offload,
    ),
)  # fmt: skip
