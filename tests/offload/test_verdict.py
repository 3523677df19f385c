"""The line on the cost of offloading."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.offload_loops import groups_of, offloaded, plain, tied_model, train
from torch.optim import AdamW

from hapi.offload.loop.verdict import LAST_STEP, verdict


@pytest.mark.parametrize(
    ("seconds", "waited", "drive", "expected"),
    [
        (1.0, 0.01, 0.9, ""),
        (2.0, 1.0, 2.0, "offloading costs 1.0 s of 2.0 s a step"),
        (2.0, 1.0, 2.0, "a batch 2.0 times as large"),
        (1.0, 0.8, 4.0, "a batch 20.0 times as large"),
    ],
)
def test_it_says_the_cost_and_what_would_hide_it(
    seconds: float, waited: float, drive: float, expected: str
) -> None:
    found = verdict(seconds, waited, drive)
    assert (
        found == ""
        if not expected
        else expected in found.replace("1.00 s", "1.0 s").replace("2.00 s", "2.0 s")
    )


def test_a_loop_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tied_model()
    with (
        caplog.at_level("INFO", "hapi.offload"),
        offloaded(model, AdamW(groups_of(model)), tmp_path) as moved,
    ):
        train(model, moved, range(LAST_STEP + 3), plain)
    told = [
        r for r in caplog.records if "offloading costs" in r.message or "offloading is hidden" in r.message
    ]
    assert len(told) == 1
