"""``python -m benchmarks NAME``: measure, and print the figures with their conditions."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.cli.bench import configure, run
from hapi.cli.shared.common import OneLineParser, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    return run_command("python -m benchmarks", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = OneLineParser(
        prog="python -m benchmarks", description="Measure, and print the figures with their conditions."
    )
    configure(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
