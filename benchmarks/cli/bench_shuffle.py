"""``benchmarks shuffle``: its flags."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hapi.cli.shared.numbers import count


def configure_shuffle(benchmarks: Any) -> argparse.ArgumentParser:
    """Add it to ``benchmarks``; the parser."""
    p: argparse.ArgumentParser = benchmarks.add_parser(
        "shuffle", help="shuffle quality and accuracy of chunk windows, beside full permutation and py1e"
    )
    for flag, usual, most, what in (
        ("--samples", 1_000_000, 100_000_000, "of an epoch"),
        ("--group", 512, 1 << 20, "samples of a chunk"),
        ("--bs", 256, 1 << 20, "samples of a batch"),
        ("--seeds", 5, 1000, "trainings of each order"),
        ("--epochs", 20, 10_000, "of each training"),
    ):
        p.add_argument(
            flag, type=count(1, most), default=usual, metavar="N", help=f"{what} (default {usual})"
        )
    p.add_argument(
        "--window",
        type=count(1, 1 << 20),
        action="append",
        metavar="N",
        help="chunks open; may be repeated (default 1 to 1024)",
    )
    p.add_argument("--no-accuracy", action="store_true", help="measure the quality only")
    p.set_defaults(measure=_shuffle)
    return p


def _shuffle(args: argparse.Namespace) -> Any:
    from benchmarks.storage.shuffle import ShuffleSettings, measure_shuffle
    from benchmarks.storage.shuffle_accuracy import AccuracySettings

    accuracy = AccuracySettings(seeds=args.seeds, epochs=args.epochs)
    settings = ShuffleSettings(
        samples=args.samples,
        group=args.group,
        windows=tuple(args.window or ShuffleSettings().windows),
        batch=args.bs,
        accuracy=None if args.no_accuracy else accuracy,
    )
    return measure_shuffle(settings, lambda line: print(line, file=sys.stderr, flush=True))
