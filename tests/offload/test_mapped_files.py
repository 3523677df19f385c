"""Pages of libraries: unmapped where they are the file's own, and mapped once more when they are used."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from support.offload_loops import offloaded, plain, tied_model, train

from hapi.process.mapped_files import file_areas, give_back_file_pages

SMAPS = Path("/proc/self/smaps")
AREAS = """\
7f0000000000-7f0000002000 r-xp 00001000 fe:00 12 /lib/with spaces: x.so
Rss:                   8 kB
Anonymous:             0 kB
7f0000002000-7f0000003000 r--p 00001000 fe:00 12 /lib/relocated.so
Rss:                   4 kB
Anonymous:             4 kB
7f0000003000-7f0000004000 rw-p 00001000 fe:00 12 /lib/written.so
Rss:                   4 kB
Anonymous:             0 kB
7f0000004000-7f0000005000 r--s 00001000 fe:00 13 /data/shared
Rss:                   4 kB
Anonymous:             0 kB
7f0000005000-7f0000006000 r--p 00000000 00:00 0 [vvar]
Rss:                   4 kB
Anonymous:             0 kB
7f0000006000-7f0000007000 r--p 00000000 fe:00 14 /lib/untouched.so
Rss:                   0 kB
Anonymous:             0 kB
"""


def test_areas_with_pages_of_their_own_are_left_alone() -> None:
    assert list(file_areas(AREAS.splitlines())) == [(0x7F0000000000, 0x7F0000002000, 8192)]


@pytest.mark.slow
@pytest.mark.skipif(not SMAPS.exists(), reason="needs Linux's list of areas")
def test_an_offloaded_training_gives_pages_of_files_back(tmp_path: Path) -> None:
    """A file stands for a library: mapped to be read, and read once."""
    content = bytes(range(256)) * 4096
    (tmp_path / "library").write_bytes(content)
    with (tmp_path / "library").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    address = np.frombuffer(mapped, np.uint8).ctypes.data

    def resident() -> int:
        areas = file_areas(SMAPS.read_text(encoding="utf-8", errors="replace").splitlines())
        return sum(nbytes for start, stop, nbytes in areas if start <= address < stop)

    assert mapped[:] == content and resident() >= len(content)
    model = tied_model()
    with offloaded(model, torch.optim.AdamW(model.parameters()), tmp_path) as optimizer:
        assert resident() == 0
        train(model, optimizer, range(2), plain)
    assert mapped[:] == content


def test_without_a_list_nothing_is_given_back(tmp_path: Path) -> None:
    assert give_back_file_pages(tmp_path / "none") == 0
