"""The line on the cost of offloading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.offload_loops import groups_of, offloaded, plain, tied_model, train
from torch.optim import AdamW

from hapi.offload.loop.verdict import LAST_STEP, StepWatch, verdict
from hapi.offload.states.queues import Traffic


@pytest.mark.parametrize(
    ("seconds", "waited", "drive", "expected"),
    [
        (1.0, 0.01, 0.9, ""),
        (2.0, 1.0, 2.0, "offloading costs 1.0 s of 2.0 s a step"),
        (2.0, 1.0, 2.0, "a batch 2.0 times as large"),
        (1.0, 0.8, 4.0, "a batch 20.0 times as large"),
        (2.0, 1.0, 2.0, "a freeze that leaves about 25% of the trained parameters would hide it"),
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


@given(computing=st.floats(0.01, 10), drive=st.floats(0.01, 100))
def test_the_freeze_that_it_names_hides_the_cost(computing: float, drive: float) -> None:
    """With backward twice as long as forward, of which a freeze leaves the forward pass."""
    waited = max(0.0, drive - computing)
    found = re.search(r"about (\d+)%", verdict(computing + waited, waited, drive))
    if found is None:
        assert drive <= 1.05 * computing
        return
    share = (int(found[1]) - 0.5) / 100  # what rounding adds
    assert share * drive <= computing / 3 + share * computing * 2 / 3 + 1e-9


@pytest.mark.parametrize(("transfer", "expected"), [(1e6, "offloading will cost about"), (0.0, "")])
def test_what_is_to_be_expected_is_said_after_two_steps(transfer: float, expected: str) -> None:
    said: list[tuple[str, bool]] = []
    watch = StepWatch(Traffic(), transfer, lambda *line: said.append(line))
    watch.step_done()
    assert not said
    watch.step_done()
    watch.step_done()
    assert [(line.startswith(expected), is_cost) for line, is_cost in said] == [(True, True)] * bool(expected)
