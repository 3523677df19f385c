"""Reads of a file that is not in memory bring what was asked for, and little beside it."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.models.pages import make_cold, resident
from hapi.errors import HapiError
from hapi.store.base import ReadPart
from hapi.store.local import LocalStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into the page cache")
MIB = 1 << 20


def empties(path: Path) -> bool:
    """Whether the file leaves the page cache: some pages that were just written do so after a moment only."""
    for _ in range(100):
        with suppress(HapiError):
            make_cold([path])
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("part", [64 << 10, MIB])
def test_no_more_comes_from_the_disk_than_was_asked_for(tmp_path: Path, part: int) -> None:
    """Whatever the disk's own read-ahead is: here a few parts one after another, and then a gap."""
    path = tmp_path / "object"
    path.write_bytes(bytes(64 * MIB))
    if not empties(path):
        pytest.skip("this file system keeps its files in memory")
    starts = [begin + number * part for begin in range(0, 48 * MIB, 12 * MIB) for number in range(3)]
    outs = [memoryview(bytearray(part)) for _ in starts]
    LocalStore(tmp_path).read_many([ReadPart("object", s, out) for s, out in zip(starts, outs, strict=True)])
    wanted = len(starts) * part / (64 * MIB)
    assert resident([path]) < 1.02 * wanted + MIB / (64 * MIB)
