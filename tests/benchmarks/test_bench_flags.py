"""Wrong flags of the benchmarks: one line, before anything is begun or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("layers --image-size 32", "expected 64 to 512"),
        ("layers --bs 0", "--bs: expected 1"),
        ("layers --figure x.gif", "must end in"),
        ("layers --model resnet19", "resnet19"),
        ("reuse --bandwidth fast", "--bandwidth"),
        ("concurrency --repeats none", "--repeats"),
        ("shuffle --samples 300", "--samples: expected at least two batches"),
        ("shuffle --window 0", "--window: expected 1 to"),
        ("shuffle --seeds 1 --samples 600", "--seeds: expected 2 to 10"),
        ("shuffle --samples 1e12", "--samples"),
        ("sweep --quick --paper", "--paper: not with --quick"),
        ("tenants --mode none", "--mode none: expected one of auto"),
        ("tenants --tenants 0", "--tenants: expected 1 to 64"),
        ("tenants --device-memory much", "--device-memory"),
        ("tenants --image-size 32", "--image-size: expected 64"),
        ("tenants --figure x.gif", "must end in"),
    ],
)
def test_wrong_flags_get_one_line(
    arguments: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    *progress, line = capsys.readouterr().err.strip().splitlines()
    assert said in line and not any("error" in told for told in progress)
    assert not list(tmp_path.iterdir())
