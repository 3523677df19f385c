"""``hapi verify STORE/NAME``."""

from __future__ import annotations

import argparse

from hapi.cli.common import EXIT_FAILED, EXIT_OK, say
from hapi.cli.progress import TransferBar
from hapi.storage.manifest import Manifest
from hapi.storage.objects import open_store, split_address
from hapi.storage.verify import verify_dataset


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "address", metavar="STORE/NAME", help="for example store/flowers or s3://bucket/flowers"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """One line for each damage, then a summary; exit code 1 when there is any."""
    url, name = split_address(args.address)
    with TransferBar(f"verifying {name}", args.quiet) as bar:

        def start(manifest: Manifest) -> None:
            bar.start(manifest.count)

        report = verify_dataset(
            open_store(url),
            name,
            on_start=start,
            on_damage=lambda damage: bar.print(str(damage)),
            on_progress=bar.advance,
        )
        seconds = bar.seconds
    rate = report.size / max(seconds, 1e-9) / 1e6
    verdict = "sound" if report.sound else f"DAMAGED, {len(report.damages)} findings; {report.again}"
    say(
        f"{args.address}: {report.samples} samples, {report.size / 1e6:.1f} MB read "
        f"({rate:.0f} MB/s), version {report.version or 'unknown'}: {verdict}"
    )
    return EXIT_OK if report.sound else EXIT_FAILED
