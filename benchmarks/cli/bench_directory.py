"""``benchmarks directory``: what a sample directory of many millions takes."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.cli.bench_flags import add_folder
from hapi.cli.shared.numbers import count, size


def configure_directory(benchmarks: Any) -> None:
    """Add it to ``benchmarks``."""
    p = benchmarks.add_parser(
        "directory",
        help="bytes a sample, load time, look-up time and memory of a sample directory (DLFS, section III-B)",
    )
    p.add_argument(
        "--samples",
        type=count(1, 1 << 30),
        default="10M",
        metavar="N",
        help="(default 10M; 50M makes a file of 1.6 GB)",
    )
    p.add_argument(
        "--sample-size",
        type=size(1, 1 << 30),
        default="110kB",
        metavar="SIZE",
        help="mean bytes of a sample (default 110kB)",
    )
    p.add_argument(
        "--processes",
        type=count(1, 100),
        default="3",
        metavar="N",
        help="that open it, each once cold (default 3)",
    )
    add_folder(p)
    p.add_argument("--json", metavar="FILE", help="also write the figures there")
    p.set_defaults(measure=_measure)


def _measure(args: argparse.Namespace) -> Any:
    from benchmarks.storage.directory import DirectorySettings, measure_directory

    settings = DirectorySettings(
        samples=args.samples,
        sample_bytes=args.sample_size,
        processes=args.processes,
        folder=args.folder,
    )
    return measure_directory(settings, lambda line: print(line, file=sys.stderr, flush=True))
