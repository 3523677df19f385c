"""Pages of libraries: unmapped where they are the file's own, and mapped once more when they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.offload_loops import offloaded, plain, tied_model, train

from hapi.process.mapped_files import file_areas, give_back_file_pages

STATUS = Path("/proc/self/status")
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
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's list of areas")
def test_an_offloaded_training_gives_libraries_back(tmp_path: Path) -> None:
    def file_bytes() -> int:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile:"))

    model = tied_model()
    train(model, torch.optim.AdamW(model.parameters()), range(1), plain)
    before = file_bytes()
    adamw = torch.optim.AdamW(model.parameters())
    with offloaded(model, adamw, tmp_path) as optimizer:
        train(model, optimizer, range(2), plain)
        assert file_bytes() < before / 2
    assert give_back_file_pages() <= before


def test_without_a_list_nothing_is_given_back(tmp_path: Path) -> None:
    assert give_back_file_pages(tmp_path / "none") == 0
