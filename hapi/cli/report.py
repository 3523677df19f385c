"""``hapi report REPORT.json``: the HTML page of a run, from its kept JSON report."""

from __future__ import annotations

import argparse
from pathlib import Path

from hapi.errors import UsageError
from hapi.figures.canvas import check_drawing
from hapi.figures.html import write_html
from hapi.figures.reading import load_run
from hapi.paths import check_output


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("report", metavar="REPORT.json", help="report that hapi-train --report FILE wrote")
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="the page to write (default: beside the report, with .html as its suffix)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its name."""
    source = Path(args.report)
    check_drawing("hapi report")
    found = load_run(args.report)
    target = Path(args.html) if args.html else source.with_suffix(".html")
    if target.absolute() == source.absolute():
        raise UsageError(f"--html {target}: is the report itself; give another name")
    check_output("--html", str(target))
    write_html(found, str(target))
    print(f"wrote {target}")
    return 0
