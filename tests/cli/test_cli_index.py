"""``hapi index``: what the user sees of it."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hapi.cli.main import main


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two tar shards of five samples, and a file beside them."""
    for shard in range(2):
        path = tmp_path / "store" / "wds" / f"{shard}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as archive:
            for number in range(5 * shard, 5 * shard + 5):
                for name, data in ((f"{number}.png", png(number)), (f"{number}.cls", b"%d" % (number % 2))):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    (tmp_path / "store" / "wds" / "notes.txt").write_text("text")
    return tmp_path / "store"


def test_a_folder_of_tar_shards(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "wds", f"{store}/d", "--image-size", "8", "--classes", "even,odd"]) == 0
    printed = capsys.readouterr()
    assert "hapi index: wds is webdataset: 2 shards, 0.0 MB" in printed.err
    assert (
        "hapi index: 1 object is no webdataset shard by its name and left out: wds/notes.txt" in printed.err
    )
    assert (
        f"indexed wds (webdataset) as {store}/d: 10 samples, 2 classes, 0.0 MB in 2 shards, left in place,"
        in printed.out
    )
    assert main(["ls", str(store)]) == 0
    assert "whole, in place: wds, webdataset" in capsys.readouterr().out
    assert main(["ls", f"{store}/d"]) == 0
    assert "in_place   wds, webdataset" in capsys.readouterr().out
    assert main(["ls", f"{store}/d", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["in_place"] == {"format": "webdataset", "folder": "wds"}
    assert listed["classes"] == ["even", "odd"] and listed["transform"]["crop"] == 8
    assert main(["verify", f"{store}/d"]) == 0
    assert "10 samples" in capsys.readouterr().out


def test_bad_samples_are_told_in_one_line_or_listed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = store / "wds" / "1.tar"
    shard.write_bytes(shard.read_bytes().replace(b"\x89PNG", b"NONE"))
    assert main(["index", "wds", f"{store}/d"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hapi index: error: shard 1.tar, sample 5: cannot be decoded as an image")
    assert main(["ls", str(store)]) == 0 and "holds no datasets" in capsys.readouterr().out
    assert main(["index", "wds", f"{store}/d", "--skip-bad"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("left out: shard 1.tar, sample") == 5 and "5 samples" in printed.out
    assert "5 left out" in printed.out
    assert main(["ls", str(store)]) == 0
    assert "in place: wds, webdataset, 5 left out" in capsys.readouterr().out
    shard.unlink()
    (store / "wds" / "0.tar").write_bytes(b"x" * 20_000)
    assert main(["verify", f"{store}/d"]) == 1
    assert "DAMAGED, 6 findings; index it again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "0"], "--workers: expected 1 to 256"),
        (["--format", "objects"], "has no objects shards by their names (3 objects)"),
        (["--image-size", "8", "--crop", "8"], "--image-size sets --resize and --crop"),
        (
            ["--label", "txt"],
            "sample 0: it has no label; name the label's field with --label, or give --labels",
        ),
        (["--classes", "a"], "labels are 0 to 1, but must be 0 to 0 for 1 class; correct"),
        (["--labels", "/nowhere/x"], "labels /nowhere/x: "),
    ],
)
def test_wrong_use_is_one_line(
    store: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index", "wds", f"{store}/d", *flags]) in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1] and lines[-1].startswith("hapi index: error: ")
    assert main(["index", "wds", f"{store}/d", "--format", "zip"]) == 2


@pytest.mark.parametrize(
    ("folder", "address"),
    [
        ("store/wds/", "store/d"),
        ("./store/wds", "./store/d/"),
        ("./wds/", "store/d//"),
        ("store//wds/*.tar", "./store/./d"),
        ("STORE/wds/", "STORE/d/"),
    ],
)
def test_paths_as_a_shell_completes_them(
    store: Path,
    folder: str,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(store.parent)
    folder, address = (text.replace("STORE", str(store)) for text in (folder, address))
    assert main(["index", folder, address, "--image-size", "8", "--format", "webdataset", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["ls", address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 10 and found["in_place"]["folder"] == "wds"


def test_a_path_outside_the_store(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(store.parent)
    (store.parent / "elsewhere").mkdir()
    for folder in ("elsewhere/", str(store.parent / "elsewhere"), "../elsewhere"):
        assert main(["index", folder, "store/d", "--quiet"]) in (1, 2)
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and (f"{folder} is not in the store " in err or "nothing below" in err)
