"""Files that a person names by mistake, and stores that leave nothing: one line, at once."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from hapi.cli.main import main
from hapi.errors import UsageError
from hapi.paths import read_bounded


@pytest.fixture
def unlabelled(tmp_path: Path) -> Path:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((6, 4), dtype=np.uint8))
    return path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--labels", "/dev/zero"], "--labels"),
        (["--labels", "/proc/self/mem"], "--labels"),
        (["--classes", "@/dev/zero"], "--classes @/dev/zero"),
        (["--classes", "@/"], "--classes @/"),
    ],
)
def test_files_without_an_end(
    unlabelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    tracemalloc.start()
    try:
        code = main(["pack", str(unlabelled), f"{tmp_path}/store/d", *flags])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and words.removeprefix("--") in error
    assert peak < 400 << 20


def test_labels_from_an_open_pipe(unlabelled: Path, tmp_path: Path) -> None:
    """As a shell's ``<(command)`` gives one."""
    reading, writing = os.pipe()
    os.write(writing, b"0 1 0 1 0 1\n")
    os.close(writing)
    try:
        command = [
            "pack",
            str(unlabelled),
            f"{tmp_path}/store/d",
            "--labels",
            f"/dev/fd/{reading}",
            "--quiet",
        ]
        assert main(command) == 0
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    "command",
    [
        ["pack", "ARRAY", "STORE/d", "--labels", "PIPE"],
        ["pack", "ARRAY", "STORE/d", "--labels", "LINK"],
        ["pack", "ARRAY", "STORE/d", "--classes", "@PIPE"],
        ["plan", "resnet18", "--profile", "PIPE"],
        ["report", "PIPE"],
        ["push", "resnet18", "STORE/m", "--weights", "PIPE"],
        ["push", "PIPE", "STORE/m"],
        ["export", "PIPE", "--output", "STORE/model.safetensors"],
        ["predict", "PIPE", "ARRAY"],
        ["predict", "/dev/zero", "ARRAY"],
        ["evaluate", "PIPE", "--dataset", "STORE/d"],
        ["train", "PIPE"],
        ["train", "--store", "STORE", "--init-from", "PIPE"],
        ["train", "--store", "STORE", "--weights", "PIPE"],
        ["train", "--store", "STORE", "--checkpoint", "PIPE", "--resume"],
        ["train", "--store", "STORE", "--class-weights", "PIPE"],
        ["train", "--server", "https://127.0.0.1:1", "--token-file", "PIPE"],
        ["train", "--server", "https://127.0.0.1:1", "--ca-file", "PIPE"],
    ],
    ids=" ".join,
)
@pytest.mark.timeout(60)
def test_nobody_waits_for_a_named_pipe(
    unlabelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    pipe, link = tmp_path / "pipe.safetensors", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    places = {"PIPE": pipe, "LINK": link, "ARRAY": unlabelled, "STORE": tmp_path}
    for word, place in places.items():
        command = [part.replace(word, str(place)) for part in command]
    assert main(command) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("pipe or a device" in error or "not a plain file" in error)


def test_reading_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5, "FILE") == b"12345"
    with pytest.raises(UsageError, match="FILE: has more than 4 bytes"):
        read_bounded(path, 4, "FILE")
    with pytest.raises(UsageError, match="FILE: cannot be read: No such file"):
        read_bounded(tmp_path / "none", 4, "FILE")
    with pytest.raises(UsageError, match="FILE: cannot be read"):
        read_bounded("a\0b", 4, "FILE")


@pytest.mark.parametrize(
    "command",
    [
        ["pack", "sklearn:digits", "memory://x/d"],
        ["index", "wds", "memory://x/d"],
        ["push", "squeezenet1_1", "MEMORY://x/m", "--weights", "random:0", "--input-size", "32"],
    ],
)
def test_a_store_that_ends_with_the_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nothing would be left" in error


@pytest.mark.parametrize("text", ["x", "-1s", "1000000h", "nan"])
def test_a_wrong_time_to_keep(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["pack", "sklearn:digits", f"{tmp_path}/d", f"--keep-old={text}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--keep-old" in error and not list(tmp_path.iterdir())


def test_what_is_kept_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def packed(limit: int, *flags: str) -> str:
        command = ["pack", "sklearn:digits", f"{tmp_path}/s/d", "--limit", str(limit), "--quiet", *flags]
        assert main(command) == 0
        return capsys.readouterr().err

    assert "kept" not in packed(10)
    assert "kept" not in packed(10, "--replace")
    assert packed(11, "--replace").count("kept for running jobs: version ") == 1
    assert main(["ls", f"{tmp_path}/s/d"]) == 0
    assert "replaced   kept: version " in capsys.readouterr().out
    assert "kept" not in packed(12, "--replace", "--keep-old", "0")
    assert main(["ls", f"{tmp_path}/s/d"]) == 0
    assert "nothing is kept" in capsys.readouterr().out
