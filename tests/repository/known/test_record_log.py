"""The log of records: shared by writers, cut off where it is damaged, bounded, never an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.threads import at_once

from hapi.repository.known import record_log
from hapi.repository.known.record_log import RecordLog

RECORDS = {"a": b"one", "b": b"", "long": bytes(range(256)) * 40}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "store.log"


def test_what_was_appended_is_read_and_the_last_of_a_name_counts(path: Path) -> None:
    RecordLog(path).append(RECORDS)
    RecordLog(path).append({"a": b"two"})
    assert RecordLog(path).read() == {**RECORDS, "a": b"two"}
    assert RecordLog(path.with_name("other.log")).read() == {}


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_record_is_cut_off_by_the_next_writer(path: Path, cut: int) -> None:
    RecordLog(path).append({"a": b"one"})
    RecordLog(path).append({"torn": bytes(40)})
    os.truncate(path, path.stat().st_size - min(cut, 59))
    assert RecordLog(path).read() == {"a": b"one"}
    RecordLog(path).append({"c": b"three"})
    assert RecordLog(path).read() == {"a": b"one", "c": b"three"}


def test_no_flipped_bit_is_believed(path: Path) -> None:
    RecordLog(path).append(RECORDS)
    data = path.read_bytes()
    for position in range(0, len(data), 511):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        found = RecordLog(path).read()
        assert found.items() <= RECORDS.items() and len(found) < len(RECORDS)


def test_many_writers(path: Path) -> None:
    def write(number: int) -> None:
        for turn in range(20):
            RecordLog(path).append({f"{number}/{turn}": bytes([number]) * turn})

    at_once(4, write)
    assert RecordLog(path).read() == {f"{n}/{t}": bytes([n]) * t for n in range(4) for t in range(20)}


def test_beyond_its_bound_it_begins_anew(path: Path) -> None:
    log = RecordLog(path, max_bytes=200)
    log.append({"a": bytes(100)})
    log.append({"b": bytes(100)})
    assert log.read() == {"b": bytes(100)} and path.stat().st_size <= 200
    log.append({"c": bytes(300)})
    assert log.read() == {"b": bytes(100)}


def test_the_files_that_were_not_used_for_longest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_log, "MAX_FILES", 2)
    for moment, name in enumerate(("one", "two", "three")):
        path = tmp_path / f"{name}.log"
        RecordLog(path).append({"a": b"x"})
        os.utime(path, (1000 + moment, 1000 + moment))
    RecordLog(tmp_path / "four.log").append({"a": b"x"})
    assert {path.stem for path in tmp_path.iterdir()} == {"three", "four"}


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    log = RecordLog(tmp_path / "file" / "x.log")
    log.append({"a": b"x"})
    assert log.read() == {}
    log.clear()
