"""Codecs out of a run's report: what it measured can be planned with, and damage is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hapi.errors import ConfigError, HapiError
from hapi.profiler.reuse.facts import RAW, ReuseFacts
from hapi.profiler.reuse.measured_codecs import ReportedCodecs, reported_codecs

ZEROS = {"name": "zeros", "ratio": 1.9, "encode_rate": 1e9, "decode_rate": 2e9}
REPORT: dict[str, Any] = {
    "epochs": [],
    "cache": {"mode": "auto", "codecs": [{"cut": 3, "codec": "zeros", "measured": [ZEROS]}]},
    "wire_codec": {
        "measured": {"2": [{**ZEROS, "ratio": 1.4}, {**ZEROS, "name": "int8", "ratio": 4.0}], "1": []}
    },
}


def written(path: Path, document: Any) -> str:
    (path / "report.json").write_text(json.dumps(document))
    return str(path / "report.json")


def test_what_a_run_measured(tmp_path: Path) -> None:
    found = reported_codecs(written(tmp_path, REPORT))
    facts = ReuseFacts(codecs=found.kept, wire_codecs=found.wire)
    assert [(c.name, c.ratio) for c in facts.codecs_at(3)] == [("none", 1.0), ("zeros", 1.9)]
    assert [(c.name, c.ratio) for c in facts.wire_at(2)] == [("none", 1.0), ("zeros", 1.4)], "int8 rounds"
    assert facts.codecs_at(2) == facts.wire_at(1) == facts.wire_at(3) == (RAW,)


@pytest.mark.parametrize("document", [{}, [], {"layers": []}, {"epochs": []}, {"epochs": [], "cache": {}}])
def test_files_without_codecs(tmp_path: Path, document: Any) -> None:
    assert reported_codecs(written(tmp_path, document)) == ReportedCodecs()


@pytest.mark.parametrize(
    "part",
    [
        {"cache": {"codecs": [{"cut": "third", "measured": []}]}},
        {"cache": {"codecs": [{"cut": 3}]}},
        {"cache": []},
        {"cache": {"codecs": [{"cut": 3, "measured": [{**ZEROS, "ratio": "two"}]}]}},
        {"wire_codec": {"measured": {"1": [{}]}}},
        {"wire_codec": {"measured": {"1": [{**ZEROS, "decode_rate": 0}]}}},
        {"wire_codec": {"measured": 5}},
    ],
)
def test_damage_is_one_line(tmp_path: Path, part: dict[str, Any]) -> None:
    with pytest.raises(HapiError) as found:
        reported_codecs(written(tmp_path, {**REPORT, **part}))
    assert "\n" not in str(found.value) and "codec" in str(found.value)
    assert isinstance(found.value, ConfigError) or "ratio" in str(found.value)
