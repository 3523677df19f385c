"""``hapi plan``: what whole jobs cost by what is kept, and what people type wrongly about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.profiler_tools import crafted, free_tier

from hapi.cli.main import main


@pytest.fixture
def saved(tmp_path: Path) -> str:
    path = str(tmp_path / "profile.json")
    crafted(
        [60_000, 1_000, 10], [0.01] * 3, [0.01] * 3, client_tier=free_tier("cpu"), step_seconds=1e-4
    ).save(path)
    return path


def test_seconds_and_money_side_by_side(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--epochs", "30", "--cache", "100GB", "--disk-write", "200MB/s", "--egress", "0.09"]
    assert main(["plan", "--profile", saved, *flags, "--server-price", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("whole job of 30 epochs"))
    table = lines[begin + 1 : begin + 6]
    assert table[0].split()[:5] == ["KEPT", "CUT", "SPLIT", "JOB", "MONEY"]
    assert [line.split("  ")[0] for line in table[1:]] == [
        "nothing", "samples here", "features there", "features here",
    ]  # fmt: skip
    assert table[4].endswith("<- least time") and "no --server-cache" in table[3]
    assert lines[begin + 6].startswith("  keep here: 30 epochs in ") and "instead of" in lines[begin + 6]
    assert max(map(len, table)) <= 100


def test_the_document_has_it(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile", saved, "--json", "--epochs", "1", "--server-cache", "1GB"]) == 0
    reuse = json.loads(capsys.readouterr().out)["reuse"]
    assert reuse["mode"] == "recompute" and "one epoch only" in reuse["reason"]
    assert {one["mode"]: one["cost"] is None for one in reuse["candidates"]}["keep there"] is False
    assert reuse["prices"] == {"egress": 0.0, "server": 0.0, "trainer": 0.0}
    assert main(["plan", "--profile", saved, "--json", "--cache", "0"]) == 0
    assert "there is no cache" in json.loads(capsys.readouterr().out)["reuse"]["reason"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--epochs", "0"], "expected 1 to"),
        (["--egress", "-1"], "expected 0 to"),
        (["--server-price", "nan"], "expected 0 to"),
        (["--cache", "1e40GB"], "--cache"),
        (["--cache", "lots"], "--cache"),
        (["--disk-write", "0"], "expected 1B/s to"),
        (["--disk-read", "200Mbps"], "--disk-read"),
        (["--objective", "fame"], "invalid choice"),
        (["--objective", "money"], "give a price"),
    ],
)
def test_wrong_values_are_told_in_one_line(
    saved: str, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    try:
        code = main(["plan", "--profile", saved, *flags])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2 and said in capsys.readouterr().err
