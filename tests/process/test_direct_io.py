"""Whole transfers between memory and files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.process.direct_io import ALIGNMENT, aligned, read_whole, write_whole


@given(st.integers(0, 1 << 40))
def test_the_next_multiple(nbytes: int) -> None:
    found = aligned(nbytes)
    assert not found % ALIGNMENT
    assert 0 <= found - nbytes < ALIGNMENT


def test_what_is_written_is_read_also_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr("os.pwritev", lambda fd, views, at: write(fd, [views[0][:1000]], at))
    monkeypatch.setattr("os.preadv", lambda fd, views, at: read(fd, [views[0][:700]], at))
    data = np.random.default_rng(0).integers(0, 256, 12_345, np.uint8)
    found = np.zeros_like(data)
    with (tmp_path / "file").open("w+b") as file:
        write_whole(file.fileno(), 77, data)
        read_whole(file.fileno(), 77, found)
    assert np.array_equal(found, data)


def test_a_file_that_is_too_short_is_told(tmp_path: Path) -> None:
    found = np.zeros(100, np.uint8)
    with (tmp_path / "file").open("w+b") as file:
        write_whole(file.fileno(), 0, np.ones(90, np.uint8))
        read_whole(file.fileno(), 0, found, may_lack=11)
        assert found.sum() == 90
        with pytest.raises(OSError, match="shorter than it was"):
            read_whole(file.fileno(), 0, found, may_lack=10)
