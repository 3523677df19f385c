"""Lines of hapi-train on the console: they fit 100 columns, whatever the numbers are."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest

from hapi.cli.shared.lines import print_parts, print_wrapped
from hapi.cli.shared.steady_bar import SteadyBar
from hapi.cli.shared.training_progress import _epoch_line, _that_fit

USUAL: dict[str, Any] = {
    "epoch": 0, "split": 11, "splits": [[0, 1], [11, 5]], "seconds": 10.55, "samples": 1797, "loss": 1.7805,
    "bytes_received": 6_500_000, "cached_samples": 0, "stall_seconds": 1, "accuracy": 0.465,
}  # fmt: skip
HELD_OUT = {"validation_loss": 1.2345, "validation_accuracy": 0.265}
EXTREME = {
    "epoch": 1000, "splits": [[10, 1], [11, 3], [12, 5]], "seconds": 99999.3, "samples": 1 << 40,
    "bytes_received": 1023 << 20, "stall_seconds": 99999.3, "loss": 123.4567,
}  # fmt: skip


def test_the_line_of_an_epoch() -> None:
    line = "epoch   0  split  0/11  10.55 s  170/s  6.20 MiB stall   9%  loss 1.7805 acc 46.5%"
    assert _epoch_line(USUAL) == line
    assert _epoch_line({**USUAL, **HELD_OUT}) == f"{line}  val 1.2345 26.5%"
    assert _epoch_line({**USUAL, "accuracy": None}) == line.removesuffix(" acc 46.5%"), "a regression"


@pytest.mark.parametrize("cached", [0, 1 << 40])
@pytest.mark.parametrize(
    "held_out", [{}, HELD_OUT, {"validation_loss": 12345.6789, "validation_accuracy": 1.0}]
)
def test_no_line_is_too_long(held_out: dict[str, float], cached: int) -> None:
    for entry in (USUAL, EXTREME | {"split": 12, "accuracy": 1.0}):
        line = _epoch_line({**USUAL, **entry, **held_out, "cached_samples": cached and entry["samples"]})
        assert len(line) <= 100 and "loss" in line and ("val" in line) == bool(held_out)


def test_parts_and_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts("data", "flowers", "10 classes")
    print_parts("model", "m" * 40, "w" * 50, "freeze 11", "x" * 120, "end")
    print_wrapped("note  " + "word " * 30 + "/a/path/" + "long" * 30)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data  flowers, 10 classes"
    assert lines[1:5] == [
        f"model {'m' * 40}, {'w' * 50},",
        "      freeze 11,",
        f"      {'x' * 120},",
        "      end",
    ]
    assert lines[5].startswith("note  word word") and lines[6].startswith("      word")
    assert [line for line in lines if len(line) > 100] == [lines[3], lines[-1]], "only single words"


def test_figures_of_a_bar_by_what_fits() -> None:
    assert [_that_fit(["ab", "cde", "f"], columns) for columns in (1, 2, 6, 7, 9, 10)] == [
        "", "ab", "ab", "ab, cde", "ab, cde", "ab, cde, f",
    ]  # fmt: skip


def test_a_bar_goes_on_where_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(2e9, -3600.0)
    monkeypatch.setattr("tqdm.std.time", lambda: next(now))
    drawn = io.StringIO()
    bar = SteadyBar(total=9, file=drawn, mininterval=0.0)
    bar.update(5)
    assert "5/9" in drawn.getvalue()
    bar.close()
