"""Figures as a table that other programs read."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hapi.errors import UsageError


def write_csv(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``rows`` to ``path``, whole or not at all, with the first one's names as the header."""
    if not rows:
        raise UsageError(f"{path}: there is nothing to write")
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text.getvalue(), encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{target}: cannot write the figures: {error.strerror or error}") from error
