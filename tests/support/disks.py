"""File systems of a chosen size."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[Path]:
    """A file system of its own at ``folder``, which is made; skips the test where mounting is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def small_ext4(folder: Path, kibibytes: int) -> Iterator[Path]:
    """As :func:`small_disk`, with ext4, whose folders take room; of a file beside ``folder``."""
    folder.mkdir()
    image = folder.with_suffix(".ext4")
    with image.open("wb") as file:
        file.truncate(kibibytes << 10)
    try:
        for command in (
            ["mkfs.ext4", "-q", "-m", "0", "-b", "4096", image],
            ["mount", "-o", "loop", image, folder],
        ):
            subprocess.run(command, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("needs ext4, and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
