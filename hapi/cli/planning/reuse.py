"""The part of ``hapi plan`` about keeping: flags for disk and prices, and a table of what whole jobs cost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hapi import units
from hapi.cli.shared.numbers import Number, real, size
from hapi.codecs.names import NONE
from hapi.config.fields import flag_of
from hapi.errors import UsageError
from hapi.paths import user_path
from hapi.profiler.profile import Job
from hapi.profiler.reuse.choice import MODE_NAMES, Choice, Crossing
from hapi.profiler.reuse.choose import Considered, ReusePlan
from hapi.profiler.reuse.facts import (
    MOST_PRICE,
    OBJECTIVES,
    PRICES,
    Objective,
    Prices,
    ReuseFacts,
    Storage,
)
from hapi.profiler.reuse.measured_codecs import reported_codecs
from hapi.profiler.reuse.reported import ReportedReuse
from hapi.text import counted

CACHE_BYTES = 100 * 10**9
"""Cache without ``--cache``: the largest that a trainer takes by itself."""
READ_RATE, WRITE_RATE = 500_000_000, 200_000_000
"""Bytes per second of a plain SSD, for what is neither given nor measured."""
ON_THIS_DISK = "the store is on this machine's disk"
"""Reason why no stored samples are kept with ``--one-machine``; what crosses is not encoded there either."""
_PRICE = real(0, MOST_PRICE)


def _disk_rate(text: str) -> int:
    """Bytes per second, as ``200MB/s`` or ``200MB``."""
    return units.parse_bytes(text.removesuffix("/s"), "rate", "200MB/s")


_RATE = Number(_disk_rate, 1, 1e13, "1B/s to 10TB/s")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the flags about keeping."""
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="folder whose disk --cache is about, with what runs there found out (default: that of hapi-train)",
    )
    parser.add_argument(
        "--cache",
        type=size(0),
        metavar="SIZE",
        help="trainer's disk for kept features, 0 for none (default 100GB, or the profile's run's)",
    )
    parser.add_argument(
        "--server-cache",
        type=size(0),
        metavar="SIZE",
        help="disk for kept features beside the store (default 0, or the profile's run's)",
    )
    for name, what in (("read", "500MB/s"), ("write", "200MB/s")):
        parser.add_argument(
            f"--disk-{name}",
            type=_RATE,
            metavar="RATE",
            help=f"bytes per second that these disks {name} (default {what}, or the profile's run's; "
            "measured with --cache or --offload disk)",
        )
    parser.add_argument(
        "--disk-slow-write",
        type=_RATE,
        metavar="RATE",
        help="bytes per second that they write once their fast part is full; with --disk-fast "
        "(default: no slower, or without --disk-write as the profile's run, or --cache with runs before, found it)",
    )
    parser.add_argument(
        "--disk-fast",
        type=size(0),
        metavar="SIZE",
        help="bytes that their fast part takes; with --disk-slow-write",
    )
    for name, what in PRICES.items():
        parser.add_argument(
            flag_of(name), type=_PRICE, metavar="PRICE", help=f"{what} (default 0, or the profile's run's)"
        )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="aim of what is kept (default time, or the profile's run's)",
    )


@dataclass(frozen=True, kw_only=True)
class ReuseTerms:
    """Caches, prices and objective that flags and a run's report give."""

    facts: ReuseFacts
    prices: Prices
    objective: Objective
    disk: tuple[float, float]
    """Bytes a second that the trainer's disk reads and writes."""


def terms_of(args: argparse.Namespace) -> ReuseTerms:
    """Return the terms: flags, then those of the run whose report ``--profile`` names, then defaults.

    Raises:
        UsageError: money is the objective, and nothing has a price.
        ConfigError: the report is not of the form that was written.
    """
    if (args.disk_slow_write is None) != (args.disk_fast is None):
        raise UsageError(
            "--disk-slow-write and --disk-fast say together where a disk becomes slower: give both"
        )
    run = None if args.profile is None else ReportedReuse.load(args.profile)
    known = Prices() if run is None else run.prices
    prices = Prices(
        egress=known.egress if args.egress is None else args.egress,
        server=known.server if args.server_price is None else args.server_price,
        trainer=known.trainer if args.trainer_price is None else args.trainer_price,
    )
    objective: Objective = args.objective or ("time" if run is None else run.objective)
    prices.check(objective)
    usual = Storage(bytes=CACHE_BYTES, read=READ_RATE, write=WRITE_RATE)
    usual = _measured(args, usual) if run is None else run.facts.client or usual
    disk = args.disk_read or usual.read, args.disk_write or usual.write
    return ReuseTerms(facts=_facts(args, run, usual), prices=prices, objective=objective, disk=disk)


def _facts(args: argparse.Namespace, run: ReportedReuse | None, usual: Storage) -> ReuseFacts:
    """Caches of the flags, or else of the run; ``usual`` has the rates of a disk that neither knows."""
    known = ReuseFacts(client=usual) if run is None else run.facts
    if args.profile is not None:
        measured = reported_codecs(args.profile)
        known = replace(known, codecs=measured.kept, wire_codecs=measured.wire)

    def storage(before: Storage | None, nbytes: int | None) -> Storage | None:
        """Return a disk of ``nbytes`` with the rates of the flags; None for those of ``before``."""
        if nbytes == 0 or (nbytes is None and before is None):
            return None
        found = before or usual
        if args.disk_write is not None:  # the rate of all that is written, unless another flag says otherwise
            found = replace(found, slow_write=None, fast_bytes=0)
        if args.disk_fast is not None:
            found = replace(found, slow_write=args.disk_slow_write, fast_bytes=args.disk_fast)
        return replace(
            found,
            bytes=found.bytes if nbytes is None else nbytes,
            read=args.disk_read or found.read,
            write=args.disk_write or found.write,
        )

    found = replace(
        known,
        client=storage(known.client, args.cache),
        server=storage(known.server, args.server_cache),
        samples=known.samples if args.samples is None else None,
    )
    return replace(found, samples_refused=ON_THIS_DISK, wire_codecs=()) if args.one_machine else found


def _measured(args: argparse.Namespace, usual: Storage) -> Storage:
    """The rates of this machine's disk, where the command is about it."""
    if not (args.cache or args.cache_dir or args.offload == "disk") or None not in (
        args.disk_read,
        args.disk_write,
    ):
        return usual
    # They need numpy, without which a plan from kept figures answers at once.
    from hapi.cache.disk_rates import measure_disk
    from hapi.cache.open_folder import default_path
    from hapi.cache.writing.fast_part import FastPart

    folder = (
        (default_path() or Path.cwd()) if args.cache_dir is None else user_path(args.cache_dir, "--cache-dir")
    )
    read, write = measure_disk(folder)
    usual = replace(usual, read=read or usual.read, write=write or usual.write)
    known = FastPart.load(folder)
    if known is None or known.slow_write >= usual.write:
        return usual
    return replace(usual, slow_write=known.slow_write, fast_bytes=int(known.fast_bytes))


def print_reuse(found: ReusePlan, job: Job, prices: Prices) -> None:
    """Print the best of each mode, and why one was chosen."""
    print(f"whole job of {counted(job.epochs, 'epoch')}, by what is kept:")
    money = prices != Prices()
    rows = [
        ("KEPT", "CUT", "SPLIT", "JOB", *(("MONEY",) if money else ()), "RECEIVED", "ON DISK", "FILLED", "")
    ]
    rows += [_row(one, found, money) for one in found.candidates]
    print_table(rows, left=(0, len(rows[0]) - 1))
    print(f"  {found.mode}: {found.reason}")


def _row(one: Considered, found: ReusePlan, money: bool) -> tuple[str, ...]:
    name, cost = MODE_NAMES[one.mode], one.cost
    if cost is None:
        return (name, *["-"] * (7 if money else 6), _SHORT.get(one.rejected, one.rejected))
    kept, sent = cost.choice.codec.name, cost.choice.crossing.wire.name
    name += "" if kept == NONE else f" as {kept}"
    name += "" if sent == NONE else f", sent as {sent}"
    return (
        name,
        str(cost.choice.cut) if cost.choice.mode.startswith("keep") else "-",
        _both_splits(cost.choice),
        units.format_duration(cost.seconds),
        *((units.format_money(cost.money),) if money else ()),
        units.format_bytes(cost.received_bytes),
        units.format_bytes(cost.kept_bytes),
        "-" if cost.fill_seconds is None or not cost.kept_bytes else units.format_duration(cost.fill_seconds),
        one.rejected or f"<- least {found.objective}",
    )


def _both_splits(choice: Choice) -> str:
    """Splits at first, and those that follow once the cache is full."""
    now, later = _splits(choice.crossing), _splits(choice.settled.crossing)
    return now if later == now else f"{now}, then {later}"


def _splits(crossing: Crossing) -> str:
    """The split, or both of batches that alternate."""
    at = crossing.alternation
    return str(crossing.split) if at is None else f"{crossing.split}/{at.other}"


_SHORT = {"the server keeps no features": "no --server-cache", "no cache here": "no --cache"}


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
