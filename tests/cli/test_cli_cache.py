"""``hapi cache``: what is in it, and what is removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.weight_tools import Source, contents_of, taken

from hapi.cache.feature_key import FeatureKey, WireRounding
from hapi.cache.features import FeatureCache
from hapi.cache.folder import CacheFolder
from hapi.cache.samples import SampleCache
from hapi.cli.main import main
from hapi.wire.labels import SINGLE
from hapi.wire.references import DatasetReference, TransformSpec
from hapi.wire.samples import Samples

KEY = FeatureKey(
    dataset=DatasetReference(name="flowers", version="a" * 32), transform=TransformSpec(), prefix="b" * 32, cut=3,
    cut_name="relu", shape=(4, 2), dtype="float32", code="hapi 1",
)  # fmt: skip


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
        assert lines[0].startswith("flowers@0123456789abcdef  samples  2 kept") and lines[0].endswith(
            "in use"
        )
        assert "97.8 KiB" in lines[1] and lines[1].startswith("photos@") and lines[1].endswith(" ago")
        assert main(["cache", "clear", str(tmp_path / "c")]) == 0
        assert "removed 1 version, 97.8 KiB\nflowers@" in capsys.readouterr().out
    assert main(["cache", "clear", str(tmp_path / "c")]) == main(["cache", "ls", str(tmp_path / "c")]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["empty"]


def test_ls_says_how_features_were_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rounding in (None, WireRounding("int8", 2)):
        key, ids = replace(KEY, rounding=rounding), np.arange(2)
        with FeatureCache(CacheFolder.open(tmp_path, 1 << 20), key, 10, SINGLE) as cache:
            cache.put(ids, np.zeros((2, 32), np.uint8), ids)
    assert main(["cache", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("float32 4x2, rounded to int8 at split 2  2 kept" in line for line in lines) == 1
    assert sum("float32 4x2  2 kept" in line for line in lines) == 1 == len(lines) - 1


def test_clear_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("photos", "flowers"):
        filled(tmp_path, name).close()
    assert main(["cache", "clear", str(tmp_path), "--only", "roses@1"]) == 1
    assert "has no roses@1; 'hapi cache ls' lists what it has" in capsys.readouterr().err
    assert main(["cache", "clear", str(tmp_path), "--only", "photos@0123456789abcdef"]) == 0
    assert [v.name for v in CacheFolder.open(tmp_path, 1 << 20).versions()] == ["flowers@0123456789abcdef"]
    assert main(["cache", "ls", str(tmp_path), "--only", "x"]) == 2
    assert "hapi cache ls: error: unknown argument --only" in capsys.readouterr().err


def test_features_are_told_by_their_dataset_and_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FeatureCache(CacheFolder.open(tmp_path, 1 << 20), KEY, 20, SINGLE, made_with="cpu, 16") as cache:
        ids = np.arange(7)
        cache.put(ids, np.zeros((7, 32), np.uint8), ids)
    assert main(["cache", "ls", str(tmp_path)]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"features@{KEY.digest}  features of flowers@{'a' * 12}, model {'b' * 12}")
    assert "cut 3 (relu), float32 4x2  7 kept" in line and " for 224 B raw  used" in line
    for arguments in ([str(tmp_path), "-v"], ["-v", str(tmp_path)]):
        assert main(["cache", "ls", *arguments]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first.split("  used")[0] == line.split("  used")[0] and second == "    computed by cpu, 16"


def test_verify_removes_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path, "photos").close()
    assert main(["cache", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("2 read  in order\n")
    segment = max(tmp_path.glob("*@*/segment-*"), key=lambda path: path.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[5_000] ^= 1
    segment.write_bytes(data)
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert "1 read  1 damaged, removed" in capsys.readouterr().out
    assert main(["cache", "verify", str(tmp_path)]) == 0
    assert "1 read  in order" in capsys.readouterr().out


def test_the_users_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HAPI_SHARED_WEIGHTS_DIR", str(tmp_path / "no weights"))
    for action, said in (("ls", "empty\n"), ("clear", "removed 0 versions, 0 B\n"), ("verify", "")):
        assert main(["cache", action]) == 0 and capsys.readouterr().out == said
    assert not list(tmp_path.iterdir())
    filled(tmp_path / "hapi" / "cache", "photos").close()
    assert main(["cache", "ls"]) == 0 and "photos@" in capsys.readouterr().out


def test_the_folder_by_the_flag_of_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "c", "photos").close()
    flag = ["--cache-dir", str(tmp_path / "c")]
    assert main(["cache", "ls", *flag]) == 0 and "photos@" in capsys.readouterr().out
    assert main(["cache", "clear", *flag, str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(
        f"--cache-dir {tmp_path}/c: a folder is given already, {tmp_path}\n"
    )
    assert main(["cache", "clear", *flag]) == 0 and "removed 1 version" in capsys.readouterr().out


def test_what_is_no_cache_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis@final").mkdir()
    (tmp_path / "thesis@final" / "thesis.tex").touch()
    for action in ("ls", "clear", "verify"):
        assert main(["cache", action, str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"hapi cache: error: {tmp_path}: is no cache of Hapi\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["thesis.tex", "thesis@final"]


def test_weights_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HAPI_SHARED_WEIGHTS", "on")
    monkeypatch.setenv("HAPI_SHARED_WEIGHTS_DIR", str(tmp_path / "weights"))
    held = taken(tmp_path / "weights", Source(contents_of(50)))
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == f"empty\nweights in {tmp_path}/weights  394.6 KiB, 394.6 KiB in use\n"
    del held
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.endswith(f"removed 394.6 KiB of weights in {tmp_path}/weights\n")
    (tmp_path / "weights").chmod(0o755)
    assert main(["cache", "clear"]) == 1
    assert "is not this user's own folder" in capsys.readouterr().err
