"""``hapi cache``: what is in it, and what is removed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hapi.cache.folder import CacheFolder
from hapi.cache.samples import SampleCache
from hapi.cli.main import main
from hapi.wire.references import DatasetReference
from hapi.wire.samples import Samples


def filled(path: Path, name: str) -> SampleCache:
    cache = SampleCache(
        CacheFolder.open(path, 1 << 20), DatasetReference(name=name, version="0123456789abcdef"), 10
    )
    data, ids = np.zeros(100_000, np.uint8), np.array([1, 2])
    cache.put(Samples(ids=ids, data=data, offsets=np.array([0, 1, 100_000]), labels=ids))
    cache.flush()
    return cache


def test_ls_and_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "c", "photos").close()
    with filled(tmp_path / "c", "flowers"):
        assert main(["cache", "ls", str(tmp_path / "c")]) == 0
        lines = sorted(capsys.readouterr().out.splitlines())
        assert lines[0].startswith("flowers@0123456789abcdef") and lines[0].endswith("in use")
        assert "97.8 KiB" in lines[1] and lines[1].startswith("photos@") and lines[1].endswith(" ago")
        assert main(["cache", "clear", str(tmp_path / "c")]) == 0
        assert "removed 1 dataset version, 97.8 KiB\nflowers@" in capsys.readouterr().out
    assert main(["cache", "clear", str(tmp_path / "c")]) == main(["cache", "ls", str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["empty"]


def test_what_is_no_cache_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis@final").mkdir()
    (tmp_path / "thesis@final" / "thesis.tex").touch()
    for action in ("ls", "clear"):
        assert main(["cache", action, str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"hapi cache: error: {tmp_path}: is no cache of Hapi\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["thesis.tex", "thesis@final"]
