"""Whole transfers between memory and files."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapi.arrays import Bytes
from hapi.process.direct_io import (
    ALIGNMENT,
    HUGE_PAGE,
    aligned,
    read_whole,
    transfer_buffer,
    write_whole,
)


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


def advice(memory: Bytes) -> set[str]:
    """Return the flags of the mapping (proc(5), ``VmFlags``) that has the first byte of ``memory``."""
    address, found = memory.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(area[1], 16) <= address < int(area[2], 16)
        elif found and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("the memory is not mapped")


@given(st.integers(0, 3 * HUGE_PAGE))
def test_it_has_the_length_and_begins_at_a_huge_page(nbytes: int) -> None:
    memory = transfer_buffer(nbytes)
    assert len(memory) == nbytes
    assert not memory.ctypes.data % max(ALIGNMENT, HUGE_PAGE)
    memory[-1:] = 7


def test_only_whole_huge_pages_are_huge() -> None:
    """Otherwise a buffer of a few bytes would take two megabytes."""
    memory = transfer_buffer(HUGE_PAGE + ALIGNMENT)
    if "hg" not in advice(memory):
        pytest.skip("this kernel has no huge pages")
    assert "hg" not in advice(memory[HUGE_PAGE:])
    assert "hg" not in advice(transfer_buffer(ALIGNMENT))


def test_a_forked_child_does_not_have_it_and_frees_nothing_in_its_place() -> None:
    memory = transfer_buffer(HUGE_PAGE)
    memory[:] = 1
    assert "dc" in advice(memory)
    child = os.fork()
    if not child:
        is_intact = False
        try:
            del memory
            gc.collect()
            taken = [transfer_buffer(HUGE_PAGE) for _ in range(4)]
            for one in taken:
                one[:] = 2
            gc.collect()
            is_intact = all(one.min() == 2 for one in taken)
        finally:
            os._exit(not is_intact)
    assert os.waitpid(child, 0)[1] == 0
    assert memory.min() == 1
