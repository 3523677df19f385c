"""Figures as a table that other programs read."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from hapi.errors import UsageError
from hapi.paths import write_whole


def write_csv(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``rows`` to ``path``, whole or not at all, with the first one's names as the header."""
    if not rows:
        raise UsageError(f"{path}: there is nothing to write")
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())
