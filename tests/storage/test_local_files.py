"""What a store in a folder does with things in it that are no files."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hapi.errors import NotFoundError, StoreError
from hapi.storage.objects import open_store


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_only_files_are_read(tmp_path: Path, kind: str) -> None:
    """A FIFO in the place of an object would keep its reader waiting for ever."""
    place, store = tmp_path / "shard", open_store(str(tmp_path))
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(place))
    for read in (lambda: store.get("shard"), lambda: store.read_into("shard", 0, memoryview(bytearray(4)))):
        with pytest.raises(StoreError, match="shard"):
            read()
    store.announce([("shard", 0, 4)])
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotFoundError):
        store.get("folder")
