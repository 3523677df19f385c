"""``hapi bench shuffle``: its flags."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hapi.errors import UsageError
from hapi.units import parse_count


def configure_shuffle(benchmarks: Any) -> argparse.ArgumentParser:
    """Add it to ``hapi bench``; the parser."""
    p: argparse.ArgumentParser = benchmarks.add_parser(
        "shuffle", help="shuffle quality and accuracy of chunk windows, beside full permutation and py1e"
    )
    p.add_argument("--samples", default="1000000", metavar="N", help="of an epoch (default 1000000)")
    p.add_argument("--group", default="512", metavar="N", help="samples of a chunk (default 512)")
    p.add_argument(
        "--window", action="append", metavar="N", help="chunks open; may be repeated (default 1 to 1024)"
    )
    p.add_argument("--bs", default="256", metavar="N", help="samples of a batch (default 256)")
    p.add_argument("--seeds", default="5", metavar="N", help="trainings of each order (default 5)")
    p.add_argument("--epochs", default="20", metavar="N", help="of each training (default 20)")
    p.add_argument("--no-accuracy", action="store_true", help="measure the quality only")
    p.set_defaults(measure=_shuffle)
    return p


def _shuffle(args: argparse.Namespace) -> Any:
    from hapi.bench.shuffle import ShuffleSettings, measure_shuffle
    from hapi.bench.shuffle_accuracy import AccuracySettings

    accuracy = AccuracySettings(seeds=_count(args.seeds, "--seeds"), epochs=_count(args.epochs, "--epochs"))
    settings = ShuffleSettings(
        samples=_count(args.samples, "--samples", 100_000_000),
        group=_count(args.group, "--group"),
        windows=tuple(_count(w, "--window") for w in args.window or ShuffleSettings().windows),
        batch=_count(args.bs, "--bs"),
        accuracy=None if args.no_accuracy else accuracy,
    )
    return measure_shuffle(settings, lambda line: print(line, file=sys.stderr, flush=True))


def _count(text: str | int, what: str, most: int = 1 << 20) -> int:
    count = parse_count(str(text), what)
    if not 1 <= count <= most:
        raise UsageError(f"{what}: expected 1 to {most}")
    return count
