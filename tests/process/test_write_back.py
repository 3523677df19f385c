"""Bytes that the kernel begins to write: what it was given to do comes to the disk, and nothing else happens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hapi.process import write_back
from hapi.process.write_back import begin_writing, wait_written


def test_nothing_changes_and_nothing_raises(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+", buffering=0) as file:
        file.write(bytes(range(256)) * 64)
        begin_writing(file.fileno(), 0, 1 << 14)
        wait_written(file.fileno(), 0, 1 << 14)
        file.seek(0)
        assert file.read() == bytes(range(256)) * 64
    read_end, write_end = os.pipe()
    begin_writing(write_end, 0, 1)  # which the kernel refuses
    os.close(read_end)
    os.close(write_end)
    begin_writing(write_end, 0, 1)


def test_the_kernel_is_told_which_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    monkeypatch.setattr(write_back, "_CALL", lambda *values: calls.append([one.value for one in values]))
    begin_writing(5, 1 << 33, 1 << 32)
    wait_written(5, 0, 10)
    begin_writing(5, 7, 0)
    assert calls == [[5, 1 << 33, 1 << 32, 2], [5, 0, 10, 7]]


def test_where_the_kernel_cannot_be_told_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_back, "_CALL", None)
    begin_writing(-1, 0, 1)
    wait_written(-1, 0, 1)
