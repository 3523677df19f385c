"""The page of the documents that lists the fields of a report: it has those of real reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.local_job import open_session, trainer_of

import hapi
from hapi.wire.transport.http import Handler

PAGE = Path(hapi.__file__).parents[1] / "docs" / "reports.md"


def undocumented(report: Mapping[str, Any]) -> set[str]:
    """Fields of a report, of its plan and of its epochs that the page does not name; of any metric it has a word."""
    known = set(re.findall(r"`(\w+)", PAGE.read_text(encoding="utf-8")))
    epochs = {name for entry in report["epochs"] for name in entry}
    metrics = {f"validation_{name}" for name in report["settings"]["metric"]}
    return {*report, *report.get("plan", {}), *epochs} - known - metrics


@pytest.mark.slow
def test_the_page_has_the_fields_of_a_report(remembered: Handler, tmp_path: Path) -> None:
    found: set[str] = set()
    for changes in (
        {"split": "auto", "cache": "on", "cache_dir": str(tmp_path / "cache"), "validation": 0.2},
        {
            "metric": ("f1",),
            "validation": 0.2,
            "clip_norm": 1.0,
            "head_lr": 0.02,
            "recheck": 3,
            "egress": 0.1,
        },
        {"precision": "fp16"},
    ):
        with open_session(remembered, **changes) as session:
            found |= undocumented(trainer_of(session, **changes).run())
    assert not found, f"docs/reports.md names no {', '.join(sorted(found))}"
