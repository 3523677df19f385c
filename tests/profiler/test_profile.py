"""Profiles as files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.profiler_tools import crafted

from hapi.errors import ConfigError, UsageError
from hapi.profiler.profile import Job, Profile

PROFILE = crafted([100, 10], [0.5, 0.25], notes=("measured",))


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 1, "version is 1"),
        (("layers",), [], "1 to 100000 layers"),
        (("layers", 0, "output_bytes"), 1.5, r"layers\[0\].output_bytes: expected a number"),
        (("layers", 1, "flops"), float("nan"), r"layers\[1\].flops: the number is out of range"),
        (("layers", 0, "server_seconds"), -1, "out of range"),
        (("layers", 0, "name"), 7, "expected str, found int"),
        (("freeze",), True, "freeze: expected a number, found bool"),
        (("freeze",), 2, "must ascend"),
        (("link",), [], "link: expected an object"),
        (("link", "bits_per_second"), 0, "above 0"),
        (("link", "bits_per_second"), 1e-300, "well above 0"),
        (("link", "variation"), 1, "below 1"),
        (("server", "share"), 1e-320, "well above 0"),
        (("server", "concurrency"), 0, "at least 1"),
        (("server", "speed"), 1, "server: unknown field 'speed'"),
        (("samples", "encoded"), 1, "expected bool"),
        (("notes",), "x", "notes: expected a list"),
        (("model",), None, "expected str"),
        (("model",), "a\ud800", "model: half a character"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    document = copy.deepcopy(json.loads(json.dumps(PROFILE.to_json())))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        Profile.from_json(document)


def test_a_missing_field_is_named() -> None:
    document = PROFILE.to_json()
    del document["step_seconds"]
    with pytest.raises(ConfigError, match="profile: field 'step_seconds' is missing"):
        Profile.from_json(document)


def test_files_that_are_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"x\.json: not JSON"):
            Profile.load(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"x\.json: profile: expected an object"):
        Profile.load(str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        Profile.load(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="cannot be written"):
        PROFILE.save(str(tmp_path / "none" / "x"))


def test_the_profile_in_a_report_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report: dict[str, Any] = {"model": "resnet18", "epochs": [{"epoch": 0}], "layers": 2}
    path.write_text(json.dumps({**report, "plan": {"split": 1, "profile": PROFILE.to_json()}}))
    assert Profile.load(str(path)) == PROFILE
    path.write_text(json.dumps({**report, "plan": {"profile": {**PROFILE.to_json(), "freeze": 2}}}))
    with pytest.raises(ConfigError, match=r"report\.json: profile: freeze 2 and last_split"):
        Profile.load(str(path))
    for plan in ({}, {"plan": {"split": 1}}, {"plan": None}, {"plan": {"profile": None}}):
        path.write_text(json.dumps({**report, **plan}))
        with pytest.raises(
            ConfigError, match=r"report\.json: is the report of a run without a profile, .* --split auto"
        ):
            Profile.load(str(path))


def test_a_job_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="bs is 0"):
        Job(bs=0)


def test_the_run_of_a_profile(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    PROFILE.save(path)
    assert Job.load(path) is None
    job = Job(bs=7, samples=91, memory_bytes=1 << 30)
    PROFILE.save(path, job)
    assert Job.load(path) == job and Profile.load(path) == PROFILE
    Path(path).write_text(json.dumps({**PROFILE.to_json(), "job": {"bs": "many"}}))
    with pytest.raises(ConfigError, match=r"profile\.json: job\.bs: expected a number"):
        Job.load(path)
