"""What a store in a folder does with things in it that are no files."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from hapi.errors import NotFoundError, StoreError
from hapi.store.open import open_store


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


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_a_lease_is_waited_for(tmp_path: Path) -> None:
    """File servers have leases on files: whoever opens one waits until it is given back."""
    place, before = tmp_path / "shard", signal.signal(signal.SIGIO, signal.SIG_IGN)
    place.write_bytes(b"data")
    holder = os.open(place, os.O_RDWR)
    try:
        try:
            fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"no leases here: {error}")
        giving_back = threading.Timer(0.2, fcntl.fcntl, (holder, fcntl.F_SETLEASE, fcntl.F_UNLCK))
        giving_back.start()
        assert open_store(str(tmp_path)).get("shard") == b"data"
        giving_back.join()
    finally:
        os.close(holder)
        signal.signal(signal.SIGIO, before)


def test_a_folder_that_a_killed_writer_left_empty_is_no_name(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("models/a/versions/1", b"1")
    (tmp_path / "models/b/versions").mkdir(parents=True)
    (tmp_path / "models/b/versions/.1.partial").write_bytes(b"1")
    assert store.list_names("models") == ["a"]
