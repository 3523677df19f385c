"""What may have become of a store in a local folder: kinds by name, and which commands must then not succeed."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COMMANDS = ("ls", "verify", "pack", "serve", "mount")
READERS = ("verify", "serve", "mount")
ALL_BUT_PACK = ("ls", *READERS)
Spoil = Callable[[Path], None]
"""Spoils the store in this folder."""


@dataclass(frozen=True)
class Spoiled:
    """A kind, by its name, and the commands that cannot do their work then."""

    name: str
    spoil: Spoil
    stops: tuple[str, ...]


SPOILED: list[Spoiled] = []


def spoiled(name: str, *stops: str) -> Callable[[Spoil], Spoil]:
    """Register a kind."""

    def register(spoil: Spoil) -> Spoil:
        SPOILED.append(Spoiled(name, spoil, stops))
        return spoil

    return register


def manifest(store: Path) -> Path:
    return store / "datasets" / "small" / "manifest.json"


def shard(store: Path, number: int = 0) -> Path:
    (found,) = (store / "datasets" / "small").glob(f"*/shard-{number:05d}.bin")
    return found


def index(store: Path) -> Path:
    (found,) = (store / "datasets" / "small").glob("*/index.safetensors")
    return found


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"1")


def _socket(path: Path) -> None:
    """Bound by its name in its folder: the name of a socket has 107 bytes at most."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


WHAT: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "a folder": _folder,
    "a FIFO": lambda path: os.mkfifo(path),
    "a socket": _socket,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a terabyte of zeros": _sparse,
    "empty": lambda path: path.touch(),
}
"""What stands in the place of a file."""


def _in_place_of(find: Callable[[Path], Path], make: Callable[[Path], None]) -> Spoil:
    def spoil(store: Path) -> None:
        path = find(store)
        path.unlink()
        make(path)

    return spoil


for _what, _make in WHAT.items():
    _gone = ("verify", "serve", "mount", "ls")  # not even named, or named as damaged
    SPOILED.append(Spoiled(f"manifest is {_what}", _in_place_of(manifest, _make), _gone))
    SPOILED.append(Spoiled(f"index is {_what}", _in_place_of(index, _make), READERS))
    SPOILED.append(Spoiled(f"shard is {_what}", _in_place_of(shard, _make), READERS))


@spoiled("shard ends early", *READERS)
def short_shard(store: Path) -> None:
    os.truncate(shard(store), 1000)


@spoiled("index ends early", *READERS)
def short_index(store: Path) -> None:
    os.truncate(index(store), 5000)


@spoiled("shards are swapped", *READERS)
def swapped(store: Path) -> None:
    first, second = shard(store).read_bytes(), shard(store, 1).read_bytes()
    shard(store).write_bytes(second)
    shard(store, 1).write_bytes(first)


@spoiled("manifest of another dataset", *ALL_BUT_PACK)
def other_name(store: Path) -> None:
    (store / "datasets" / "other").mkdir()
    manifest(store).rename(store / "datasets" / "other" / "manifest.json")


@spoiled("a file where datasets are", *COMMANDS)
def file_for_folder(store: Path) -> None:
    shutil.rmtree(store / "datasets")
    (store / "datasets").write_bytes(b"1")


@spoiled("a FIFO where datasets are", *COMMANDS)
def fifo_for_folder(store: Path) -> None:
    shutil.rmtree(store / "datasets")
    os.mkfifo(store / "datasets")


@spoiled("datasets link to themselves", *COMMANDS)
def loop(store: Path) -> None:
    shutil.rmtree(store / "datasets")
    (store / "datasets").symlink_to("datasets")


@spoiled("a dataset holds itself")
def upwards(store: Path) -> None:
    (store / "datasets" / "small" / "again").symlink_to("..")


@spoiled("the lock is a FIFO", "pack")
def fifo_lock(store: Path) -> None:
    (store / "datasets" / "new").mkdir()
    os.mkfifo(store / "datasets" / "new" / "pack.lock")


@spoiled("the lock is a folder", "pack")
def folder_lock(store: Path) -> None:
    (store / "datasets" / "new" / "pack.lock").mkdir(parents=True)


@spoiled("the unfinished packing is a FIFO", "pack")
def fifo_packing(store: Path) -> None:
    (store / "datasets" / "new").mkdir()
    os.mkfifo(store / "datasets" / "new" / "packing.json")


@spoiled("names with escapes")
def escapes(store: Path) -> None:
    for name in ("a\x1b[31mb", "line\nend", "\udcff"):
        (store / "datasets" / name).mkdir()
        (store / "datasets" / name / "manifest.json").write_bytes(b"{}")
