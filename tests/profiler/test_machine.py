"""What is learned about this machine and kept: found again, never trusted blindly, never in the way."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.threads import at_once

from hapi.errors import ConfigError
from hapi.paths import user_cache_folder
from hapi.process.processors import processor_count
from hapi.profiler import machine
from hapi.profiler import machine_cache as cache
from hapi.profiler.machine import Machine, constants, frame_seconds

KEY = ("host=here", "torch=2")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    machine._remembered.cache_clear()
    yield tmp_path / "cache" / "hapi"
    machine._remembered.cache_clear()


def only_file(home: Path) -> Path:
    (path,) = home.iterdir()
    return path


def test_what_was_kept_is_found(home: Path) -> None:
    assert cache.load("machine", KEY) is None
    assert cache.save("machine", KEY, {"a": [1, 2.5]}) == ""
    kept = cache.load("machine", KEY)
    assert kept is not None and kept.content == {"a": [1, 2.5]} and kept.path == only_file(home)
    assert cache.load("machine", (*KEY, "more")) is None and cache.load("plan", KEY) is None


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"form": 99},
        {"key": ["host=there", "torch=2"]},
        {"measured": "yesterday"},
        {"measured": 5},
        {"measured": (datetime.now(UTC) - timedelta(days=31)).isoformat()},
        {"measured": (datetime.now(UTC) + timedelta(days=3)).isoformat()},
        {"measured": "9999-12-31T23:59:59+00:00"},
        {"extra": 1},
    ],
    ids=lambda f: next(iter(f)),
)
def test_a_file_that_does_not_count_is_not_found(home: Path, fields: dict[str, Any]) -> None:
    cache.save("machine", KEY, 1)
    change(only_file(home), **fields)
    assert cache.load("machine", KEY) is None
    assert cache.save("machine", KEY, 2) == ""
    kept = cache.load("machine", KEY)
    assert kept is not None and kept.content == 2


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b" " * (17 << 20)]
)
def test_a_damaged_file_is_not_found(home: Path, raw: bytes) -> None:
    cache.save("machine", KEY, 1)
    only_file(home).write_bytes(raw)
    assert cache.load("machine", KEY) is None


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.load("machine", KEY) is None
    assert cache.save("machine", KEY, 1).startswith(
        f"nothing is kept for the next time: {tmp_path}/file/hapi: "
    )


def test_a_full_disk_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in cache.save("machine", KEY, 1)
    assert list(home.iterdir()) == []


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    monkeypatch.setattr(Path, "home", none)
    assert user_cache_folder() is None and cache.load("machine", KEY) is None
    assert "no home folder" in cache.save("machine", KEY, 1)


def test_outdated_files_are_removed(home: Path) -> None:
    cache.save("machine", KEY, 1)
    old, foreign = only_file(home), home / "notes.txt"
    foreign.write_text("mine")
    long_ago = time.time() - 40 * 86400
    os.utime(old, (long_ago, long_ago))
    os.utime(foreign, (long_ago, long_ago))
    cache.save("plan", KEY, 2)
    assert not old.exists() and foreign.exists() and cache.load("plan", KEY) is not None


def test_many_write_at_once(home: Path) -> None:
    at_once(8, lambda number: cache.save("machine", KEY, [number] * 5000))
    kept = cache.load("machine", KEY)
    assert kept is not None and len(set(kept.content)) == 1 and len(kept.content) == 5000
    assert only_file(home) == kept.path


def test_the_identity_names_everything_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dict(fact.split("=", 1) for fact in cache.identity())
    assert {
        "host",
        "processor",
        "processors",
        "gpus",
        "torch",
        "torchvision",
        "hapi",
        "OMP_NUM_THREADS",
    } <= set(facts)
    assert facts["processors"] == str(processor_count()) and facts["torch"].startswith("2.")
    before = cache.identity()
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert cache.identity() != before


def test_constants_are_measured_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = constants("cpu", 64)
    assert first.device == "cpu" and first.image_side == 64
    assert 1e8 < first.flops_per_second < 1e14 and 1e8 < first.copy_bytes_per_second < 1e13
    assert 1e-5 < first.decode_seconds < 1
    assert 1e-12 < first.send_seconds_per_byte < 1e-7 and 1e-12 < first.receive_seconds_per_byte < 1e-7
    monkeypatch.setattr(machine, "_measure", lambda *_: pytest.fail("measured again"))
    assert constants("cpu", 64) == first
    machine._remembered.cache_clear()  # as another process would find it
    assert constants("cpu", 64) == first
    change(only_file(home), content={"version": 1})
    machine._remembered.cache_clear()
    slower = dataclasses.replace(first, decode_seconds=1.0)
    monkeypatch.setattr(machine, "_measure", lambda *_: slower)
    assert constants("cpu", 64) == slower
    monkeypatch.setattr(machine, "_measure", lambda *_: first)
    assert constants("cpu", 64) == slower and constants("cpu", 64, remeasure=True) == first
    assert constants("cpu", 64) == first


def test_a_machine_as_json() -> None:
    found = constants("cpu", 32)
    assert Machine.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found
    for wrong in ({"version": 2}, {"processors": 0}, {"flops_per_second": 0.0}, {"decode_seconds": "soon"}):
        with pytest.raises(ConfigError, match="machine"):
            Machine.from_json(dataclasses.asdict(found) | wrong)


def test_tiers_of_a_machine() -> None:
    found = constants("cpu", 32)
    server, client = found.tier(server=True), found.tier(server=False, encoded=False)
    assert server.codec_seconds_per_byte == found.send_seconds_per_byte
    assert client.codec_seconds_per_byte == found.receive_seconds_per_byte and client.decode_seconds == 0
    assert server.threads <= server.processors == processor_count()
    twice = found.faster(2.0).tier(server=True)
    assert twice.codec_seconds_per_byte == server.codec_seconds_per_byte / 2
    assert twice.decode_seconds == server.decode_seconds / 2


def test_frames_are_measured_without_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError("no loopback here")

    monkeypatch.setattr("socket.create_server", none)
    sent, received = frame_seconds()
    assert sent > 0 and received > 0
