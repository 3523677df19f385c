"""``hapi bench``: measure, and print the figures with their conditions."""

from __future__ import annotations

import argparse

from hapi.errors import UsageError
from hapi.units import parse_bytes, parse_count


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and their options to ``parser``."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    wire = benchmarks.add_parser("wire", help="GB/s of features from server to client, beside a plain socket")
    wire.add_argument("--body", default="64MiB", metavar="SIZE", help="bytes per transfer (default 64MiB)")
    wire.add_argument("--rounds", default="15", metavar="N", help="transfers each way (default 15)")
    wire.add_argument("--json", metavar="FILE", help="also write the figures there")


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark; returns the exit code."""
    return _wire(args)


def _wire(args: argparse.Namespace) -> int:
    from hapi.bench.conditions import condition_lines, write_json
    from hapi.bench.wire import measure_wire

    body, rounds = parse_bytes(args.body, "--body"), parse_count(args.rounds, "--rounds")
    if not 1 << 20 <= body <= 1 << 32 or rounds < 1:
        raise UsageError("--body: from 1MiB to 4GiB; --rounds: at least 1")
    result = measure_wire(body, rounds)
    print("\n".join([*result.table(), "", *condition_lines(result.conditions)]))
    if args.json:
        write_json(args.json, result.to_json())
    return 0
