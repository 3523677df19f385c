"""``benchmarks samples``: its flags."""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

from benchmarks.cli.bench_flags import add_folder
from hapi.cli.shared.numbers import DAY, Number, count, seconds, size
from hapi.errors import UsageError
from hapi.units import parse_bytes


def _sample_bytes(text: str) -> int:
    """Bytes of a sample; 0 for the mix."""
    if text == "mix":
        return 0
    size = parse_bytes(text)
    if size < 16:
        raise ValueError(text)
    return size


_SIZE = Number(_sample_bytes, 0, 1 << 26, "16 to 64MiB, or 'mix'")


def configure_samples(benchmarks: Any) -> argparse.ArgumentParser:
    """Add it to ``benchmarks``; the parser."""
    p: argparse.ArgumentParser = benchmarks.add_parser(
        "samples",
        help="samples/s from a disk by size, beside a file for each, raw reads and other loaders (Linux)",
    )
    p.add_argument(
        "--size",
        type=_SIZE,
        action="append",
        metavar="SIZE",
        help="of a sample, or 'mix'; may be repeated (default: six)",
    )
    p.add_argument(
        "--total", type=size(1 << 20, 1 << 36), metavar="SIZE", help="bytes of each data set (default 256MiB)"
    )
    p.add_argument(
        "--seconds", type=seconds(1e-3, DAY), metavar="TIME", help="longest time of each figure (default 2s)"
    )
    p.add_argument(
        "--bs", type=count(1, 1 << 16), default="256", metavar="N", help="samples of a batch (default 256)"
    )
    p.add_argument(
        "--over",
        choices=("http", "swift"),
        help="through hapi-server, or from an OpenStack Swift on loopback, beside plain downloads of large ranges",
    )
    p.add_argument("--rounds", type=count(1, 100), metavar="N", help="turns of each reader (default 3)")
    add_folder(p)
    p.add_argument(
        "--quick", action="store_true", help="32MiB, one round and half a second each, to try it out"
    )
    p.set_defaults(measure=_samples)
    return p


def _samples(args: argparse.Namespace) -> Any:
    from benchmarks.storage.samples import SIZES, SamplesSettings, measure_samples
    from benchmarks.storage.samples_over import OverSettings, measure_over

    total, longest, rounds = (32 << 20, 0.5, 1) if args.quick else (256 << 20, 2.0, 3)
    shared: dict[str, Any] = {
        "sizes": tuple(args.size) if args.size else SIZES,
        "total": args.total or total,
        "seconds": args.seconds or longest,
        "rounds": args.rounds or rounds,
        "batch": args.bs,
        "folder": args.folder,
    }
    try:
        if args.over:
            return measure_over(OverSettings(over=args.over, **shared), _tell)
        return measure_samples(SamplesSettings(**shared), _tell)
    except OSError as error:
        where = args.folder or tempfile.gettempdir()
        raise UsageError(f"{where}: {error.strerror or error}; --folder names another place") from error


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
