"""``hapi verify STORE/NAME``: a dataset or a pushed model."""

from __future__ import annotations

import argparse

from hapi.api.contents import is_model, verify
from hapi.cli.shared.common import EXIT_FAILED, EXIT_OK, say
from hapi.cli.shared.progress import TransferBar
from hapi.store.open import open_store, split_model_address


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "address", metavar="STORE/NAME", help="for example store/flowers or s3://bucket/flowers"
    )
    parser.add_argument("--model", action="store_true", help="the pushed model of this name, not the dataset")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Print one line for each damage, then a summary; exit code 1 when there is any."""
    url, name = split_model_address(args.address)
    model = args.model or is_model(open_store(url), name)
    with TransferBar(f"verifying {name}", args.quiet, by_bytes=model) as bar:
        report = verify(
            args.address,
            model=model,
            on_start=bar.start,
            on_damage=lambda damage: bar.print(str(damage)),
            on_progress=bar.advance,
        )
        seconds = bar.seconds
    rate = report.size / max(seconds, 1e-9) / 1e6
    verdict = "sound" if report.sound else f"DAMAGED, {len(report.damages)} findings; {report.remedy}"
    what, state = ("tensors", "digest") if model else ("samples", "version")
    say(
        f"{args.address}: {report.samples} {what}, {report.size / 1e6:.1f} MB read "
        f"({rate:.0f} MB/s), {state} {report.version or 'unknown'}: {verdict}"
    )
    return EXIT_OK if report.sound else EXIT_FAILED
