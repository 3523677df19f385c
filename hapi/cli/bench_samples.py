"""``hapi bench samples``: its flags."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hapi.errors import UsageError
from hapi.units import parse_bytes, parse_count, parse_duration


def configure_samples(benchmarks: Any) -> argparse.ArgumentParser:
    """Add it to ``hapi bench``; the parser."""
    p: argparse.ArgumentParser = benchmarks.add_parser(
        "samples",
        help="samples/s from a disk by size, beside a file for each, raw reads and other loaders (Linux)",
    )
    p.add_argument(
        "--size",
        action="append",
        metavar="SIZE",
        help="of a sample, or 'mix'; may be repeated (default: six)",
    )
    p.add_argument("--total", metavar="SIZE", help="bytes of each data set (default 256MiB)")
    p.add_argument("--seconds", metavar="TIME", help="longest time of each figure (default 2s)")
    p.add_argument("--bs", default="256", metavar="N", help="samples of a batch (default 256)")
    p.add_argument(
        "--folder", metavar="FOLDER", help="on the disk to be measured (default: the temporary folder)"
    )
    p.add_argument("--quick", action="store_true", help="32MiB and half a second each, to try it out")
    p.set_defaults(measure=_samples)
    return p


def _samples(args: argparse.Namespace) -> Any:
    from hapi.bench.samples import SIZES, SamplesSettings, measure_samples

    total, seconds = ("32MiB", "500ms") if args.quick else ("256MiB", "2s")
    settings = SamplesSettings(
        sizes=tuple(_size(text) for text in args.size) if args.size else SIZES,
        total=_between(
            parse_bytes(args.total or total, "--total"), 1 << 20, 1 << 36, "--total", "1MiB to 64GiB"
        ),
        seconds=parse_duration(args.seconds or seconds, "--seconds"),
        batch=_between(parse_count(args.bs, "--bs"), 1, 1 << 16, "--bs", "1 to 65536"),
        folder=args.folder,
    )
    return measure_samples(settings, lambda line: print(line, file=sys.stderr, flush=True))


def _size(text: str) -> int:
    """Bytes of a sample; 0 for the mix."""
    if text == "mix":
        return 0
    return _between(parse_bytes(text, "--size"), 16, 1 << 26, "--size", "16 to 64MiB, or 'mix'")


def _between(value: int, low: int, high: int, what: str, told: str) -> int:
    if not low <= value <= high:
        raise UsageError(f"{what}: expected {told}")
    return value
