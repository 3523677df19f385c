"""Weights on a device that processes share: one copy, while anybody uses it; on a device that is a file in memory."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.forked import ForkedProcess
from support.forked_python import PYTHON
from support.memfd_blocks import MemfdMemory, taken
from support.weight_tools import Source, contents_of

from hapi.models.shared.device_weights import DeviceWeights
from hapi.models.shared.holders import Holders, _short

ROOT = Path(__file__).parents[2]
Start = Callable[[int], ForkedProcess]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ("a-long-name-" * 9) / "weights-gpu-0"  # longer than a socket's address may be


@pytest.fixture(autouse=True)
def made(folder: Path) -> None:
    folder.parent.mkdir()


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Processes that take so many contents, and hold them."""
    running: list[ForkedProcess] = []

    def begin(count: int) -> ForkedProcess:
        code = "import sys; from support.memfd_blocks import main; main(*sys.argv[1:])"
        command = [PYTHON, "-c", code, str(folder), str(count)]
        running.append(ForkedProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            stream.close()  # type: ignore[union-attr]


def said(process: ForkedProcess) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def packs(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in folder.iterdir() if path.name != "lock")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_second_user_maps_what_the_first_has_loaded(folder: Path) -> None:
    memory = MemfdMemory()
    first, second = (DeviceWeights(folder, memory) for _ in range(2))
    held = taken(first, Source(contents_of(20)))
    source = Source(contents_of(30))
    more = taken(second, source)
    assert len(source.asked) == 10, "the rest alone is loaded"
    assert (memory.made, memory.opened) == (2, 1)
    shared = next(iter(held))
    held[shared].zero_()
    assert not more[shared].any(), "it is one copy"


def test_the_last_user_takes_the_weights_along(folder: Path) -> None:
    weights = DeviceWeights(folder, MemfdMemory())
    held = taken(weights, Source(contents_of(20)))
    gc.collect()  # files of garbage that earlier tests left
    files = open_files()
    again = taken(DeviceWeights(folder, MemfdMemory()), Source(contents_of(20)))
    del again
    gc.collect()
    assert open_files() == files
    assert packs(folder) == ["holder", "pack"]
    del held
    gc.collect()
    source = Source(contents_of(20))
    taken(weights, source)
    assert len(source.asked) == 20


def test_the_folder_has_no_bytes_of_weights(folder: Path) -> None:
    held = taken(DeviceWeights(folder, MemfdMemory()), Source(contents_of(100)))
    taken_on_disk = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert taken_on_disk < 0.1 * sum(tensor.nbytes for tensor in held.values())


def test_without_room_on_the_device_each_has_its_own(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = MemfdMemory(room=1000)
    source = Source(contents_of(20))
    assert taken(DeviceWeights(folder, memory), source)
    assert len(source.asked) == 20 and not memory.made
    assert "there is no room" in caplog.text and len(caplog.records) == 1


def test_a_pack_that_was_not_written_whole_is_none(folder: Path) -> None:
    contents = contents_of(20)
    some = Source(dict(list(contents.items())[:7]))
    with pytest.raises(KeyError):
        list(DeviceWeights(folder, MemfdMemory()).take(contents, lambda keys: some(list(some.contents))))
    assert packs(folder) == []
    taken(DeviceWeights(folder, MemfdMemory()), Source(contents))


def test_threads_load_each_tensor_once(folder: Path) -> None:
    sources = [Source(contents_of(30)) for _ in range(4)]
    weights = DeviceWeights(folder, MemfdMemory())
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda source=source: found.append(taken(weights, source)))
        for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and sum(len(source.asked) for source in sources) == 30


def test_a_stopped_holder_is_not_waited_for_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapi.models.shared.holders.ANSWER_SECONDS", 0.2)
    folder.mkdir(mode=0o700)
    holders, other = Holders(folder), Holders(folder)
    holders.offer("a", os.memfd_create("a"))
    with holders._lock:  # its thread waits too
        assert other.get("a") is None
    file = other.get("a")
    assert file is not None
    os.close(file)
    assert other.get("b") is None
    holders.withdraw("a")
    assert other.get("a") is None


def test_sockets_of_killed_processes_are_removed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    living = Holders(folder)
    living.offer("a", os.memfd_create("a"))
    (name,) = folder.iterdir()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed,
        _short(folder / "holder-1-dead") as address,
    ):
        killed.bind(address)
        killed.listen()
    other = Holders(folder)
    other.offer("b", os.memfd_create("b"))
    left = set(folder.iterdir())
    assert len(left) == 2 and name in left and folder / "holder-1-dead" not in left
    file = other.get("a")
    assert file is not None
    os.close(file)


def test_types_come_back(folder: Path) -> None:
    contents = {
        "half": torch.ones(3, 5).half(), "truth": torch.tensor([True, False]), "one": torch.tensor(7),
        "none": torch.empty(0, 3), "strided": torch.arange(6.0).view(2, 3).T,
    }  # fmt: skip
    found = taken(DeviceWeights(folder, MemfdMemory()), Source(contents))
    assert all(found[name].dtype == tensor.dtype for name, tensor in contents.items())
    assert found["one"].shape == () and found["strided"].shape == (3, 2)


@pytest.mark.slow
def test_processes_hold_one_copy_that_outlives_its_maker(folder: Path, start: Start) -> None:
    first = start(20)
    assert said(first) == "loaded 20"
    second = start(20)
    assert said(second) == "loaded 0"
    first.send_signal(signal.SIGKILL)
    first.wait()
    third = start(20)
    assert said(third) == "loaded 0"
    for process in (second, third):
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(240) == 0
    source = Source(contents_of(20))
    taken(DeviceWeights(folder, MemfdMemory()), source)
    assert len(source.asked) == 20
    assert not [path for path in folder.glob("holder-*") if f"-{os.getpid()}-" not in path.name]
