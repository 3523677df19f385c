"""The part of ``hapi plan`` about keeping: flags for disk and prices, and a table of what whole jobs cost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hapi import units
from hapi.cli.shared.numbers import Number, real, size
from hapi.errors import UsageError
from hapi.profiler.profile import Job, Profile
from hapi.profiler.reuse.choose import Considered, ReusePlan, choose_reuse
from hapi.profiler.reuse.facts import OBJECTIVES, Prices, ReuseFacts, Storage

CACHE_BYTES = 100 * 10**9
"""Cache without ``--cache``: the largest that a trainer takes by itself."""
READ_RATE, WRITE_RATE = 500_000_000, 200_000_000
"""Bytes per second of a plain SSD, for what is neither given nor measured."""
_HOUR = real(0, 1e9)


def _disk_rate(text: str) -> int:
    """Bytes per second, as ``200MB/s`` or ``200MB``."""
    return units.parse_bytes(text.removesuffix("/s"), "rate")


_RATE = Number(_disk_rate, 1, 1e13, "1B/s to 10TB/s")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags about keeping."""
    parser.add_argument(
        "--cache",
        type=size(0),
        metavar="SIZE",
        help="trainer's disk for kept features, 0 for none (default 100GB)",
    )
    parser.add_argument(
        "--server-cache",
        type=size(0),
        metavar="SIZE",
        help="disk for kept features beside the store (default 0)",
    )
    for name, what in (("read", "500MB/s"), ("write", "200MB/s")):
        parser.add_argument(
            f"--disk-{name}",
            type=_RATE,
            metavar="RATE",
            help=f"bytes per second that these disks {name} (default {what}; measured with --cache)",
        )
    for flag, what in (
        ("--egress", "price of a GB from the server to the trainer"),
        ("--server-price", "price of an hour of the whole server at work"),
        ("--trainer-price", "price of an hour of the trainer"),
    ):
        parser.add_argument(flag, type=_HOUR, default=0.0, metavar="PRICE", help=f"{what} (default 0)")
    parser.add_argument(
        "--objective", choices=OBJECTIVES, default="time", help="aim of what is kept (default time)"
    )


def prices_of(args: argparse.Namespace) -> Prices:
    """Return the prices that ``args`` give; :class:`UsageError` for money as the aim without any."""
    prices = Prices(egress=args.egress, server=args.server_price, trainer=args.trainer_price)
    if args.objective == "money" and prices == Prices():
        raise UsageError("--objective money: give a price (--egress, --server-price or --trainer-price)")
    return prices


def reuse_of(args: argparse.Namespace, profile: Profile, job: Job, prices: Prices) -> ReusePlan:
    """Return what a job keeps under the disks and prices of ``args``."""
    measured: tuple[float | None, float | None] = (None, None)
    if args.cache and args.profile is None and None in (args.disk_read, args.disk_write):
        # They need numpy, without which a plan from kept figures answers at once.
        from hapi.cache.disk_rates import measure_disk
        from hapi.cache.open_folder import default_path

        measured = measure_disk(default_path() or Path.cwd())
    read = args.disk_read or measured[0] or READ_RATE
    write = args.disk_write or measured[1] or WRITE_RATE

    def storage(nbytes: int) -> Storage | None:
        """Return a disk with room for ``nbytes``."""
        return Storage(bytes=nbytes, read=read, write=write) if nbytes else None

    facts = ReuseFacts(
        client=storage(CACHE_BYTES if args.cache is None else args.cache),
        server=storage(args.server_cache or 0),
    )
    return choose_reuse(profile, job, facts, prices=prices, objective=args.objective)


def print_reuse(found: ReusePlan, job: Job, prices: Prices) -> None:
    """Print the best of each mode, and why one was chosen."""
    print(f"whole job of {job.epochs} epoch{'' if job.epochs == 1 else 's'}, by what is kept:")
    money = prices != Prices()
    rows = [
        ("KEPT", "CUT", "SPLIT", "JOB", *(("MONEY",) if money else ()), "RECEIVED", "ON DISK", "FILLED", "")
    ]
    rows += [_row(one, found, money) for one in found.candidates]
    print_table(rows, left=(0, len(rows[0]) - 1))
    print(f"  {found.mode}: {found.reason}")


def _row(one: Considered, found: ReusePlan, money: bool) -> tuple[str, ...]:
    name, cost = _NAMES[one.mode], one.cost
    if cost is None:
        return (name, *["-"] * (7 if money else 6), _SHORT.get(one.rejected, one.rejected))
    return (
        name,
        str(cost.choice.cut) if cost.choice.mode.startswith("keep") else "-",
        str(cost.choice.split),
        units.format_duration(cost.seconds),
        *((f"{cost.money:.2f}",) if money else ()),
        units.format_bytes(cost.received_bytes),
        units.format_bytes(cost.kept_bytes),
        "-" if cost.fill_seconds is None or not cost.kept_bytes else units.format_duration(cost.fill_seconds),
        one.rejected or f"<- least {found.objective}",
    )


_SHORT = {"the server keeps no features": "no --server-cache", "no cache here": "no --cache"}
_NAMES = {
    "recompute": "nothing",
    "keep samples": "samples here",
    "keep there": "features there",
    "keep here": "features here",
}


def document_of(found: ReusePlan, prices: Prices) -> dict[str, Any]:
    """Return the plan as JSON, with the prices."""
    return {
        **found.to_json(),
        "prices": {"egress": prices.egress, "server": prices.server, "trainer": prices.trainer},
    }


def print_table(rows: Sequence[Sequence[str]], left: Sequence[int]) -> None:
    """Print ``rows`` in columns, those of the numbers ``left`` to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
