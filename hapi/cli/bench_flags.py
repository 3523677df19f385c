"""Flags that several benchmarks have."""

from __future__ import annotations

import argparse

from hapi.errors import UsageError


def add_folder(parser: argparse.ArgumentParser) -> None:
    """``--folder``: where temporary files are made."""
    parser.add_argument(
        "--folder", metavar="FOLDER", help="on the disk to be measured (default: the temporary folder)"
    )


def within(value: int, low: int, high: int, what: str, told: str | None = None) -> int:
    """``value``; :class:`UsageError` naming the flag ``what`` when it is not ``low`` to ``high``."""
    if not low <= value <= high:
        raise UsageError(f"{what}: expected {told or f'{low} to {high}'}, got {value}")
    return value
