"""Weights in memory that processes share: one copy, loaded once, counted, and never half of one."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.disks import small_disk
from support.forked import ForkedProcess, environment
from support.forked_python import PYTHON
from support.weight_tools import TAKER, Contents, Source, contents_of, mapped_kilobytes, taken

from hapi.errors import UsageError
from hapi.models.shared import folder as folders
from hapi.models.shared.folder import Division, WeightsFolder
from hapi.models.shared.pack import ALIGNMENT, divided
from hapi.models.shared.weights import SharedWeights, Silence, shared_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def takers(folder: Path) -> Iterator[Any]:
    """Starts processes as of :data:`TAKER`; they are ended after the test."""
    started: list[Any] = []

    def start(count: int, hangs_at: int = -1, budget: int = 1 << 30, ends: bool = False) -> Any:
        """Start one; one that ``ends`` by itself is a new interpreter."""
        arguments = [str(folder), str(count), str(hangs_at), str(budget)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment()}
        started.append(
            subprocess.Popen([sys.executable, "-c", TAKER, *arguments], text=True, **pipes)
            if ends
            else ForkedProcess([PYTHON, "-c", TAKER, *arguments], **pipes)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def packs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def said(process: Any) -> str:
    return str(process.stdout.readline().strip())


def test_what_is_there_is_not_loaded_again(folder: Path) -> None:
    first, second = Source(contents_of(50)), Source(contents_of(50))
    held = taken(folder, first)
    again = taken(folder, second)
    assert (len(first.asked), second.asked) == (50, [])
    assert len(packs(folder)) == 1, "tensors that are loaded together lie in one file"
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in (*held.values(), *again.values()))


def test_all_types_and_forms_come_back(folder: Path) -> None:
    contents: Contents = {
        "bool": torch.tensor([True, False]), "bf16": torch.randn(3, 5).bfloat16(), "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4), "turned": torch.randn(3, 4).t(), "fp64": torch.randn(2, 2, 2).double(),
    }  # fmt: skip
    taken(folder, Source(contents))
    source = Source(contents)
    found = taken(folder, source)
    assert sorted(source.asked) == ["empty", "turned"], "without elements, or with strides: each has its own"
    assert all(found[key].shape == t.shape and found[key].dtype == t.dtype for key, t in contents.items())


def test_splits_that_overlap_load_the_difference(folder: Path) -> None:
    early, late = Source(contents_of(5)), Source(contents_of(12))
    held = taken(folder, early)
    both = taken(folder, late)
    assert len(late.asked) == 7
    assert not set(late.asked) & early.contents.keys()
    assert len(packs(folder)) == 2
    assert held
    assert both


def test_a_write_in_place_is_seen_by_no_other_job(folder: Path) -> None:
    contents = contents_of(3)
    one, other = taken(folder, Source(contents)), taken(folder, Source(contents))
    assert mapped_kilobytes(folder, "Anonymous") == 0
    for tensor in one.values():
        tensor.zero_()
    assert all(torch.equal(other[key], tensor) for key, tensor in contents.items())
    assert mapped_kilobytes(folder, "Anonymous") > 0
    del one
    taken(folder, Source(contents))


def test_files_can_be_read_by_the_user_alone_and_not_be_written(folder: Path) -> None:
    held = taken(folder, Source(contents_of(3)))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE((folder / name).stat().st_mode) for name in packs(folder)] == [0o400]
    assert held


@pytest.mark.parametrize("kind", ["open to others", "link", "file"])
def test_a_folder_that_others_could_change_is_not_used(
    tmp_path: Path, folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "open to others":
        folder.mkdir(mode=0o755)
    elif kind == "link":
        (tmp_path / "else").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "else")
    else:
        folder.write_bytes(b"")
    shared = SharedWeights(WeightsFolder(folder, None))
    contents = contents_of(3)
    for _ in range(2):
        source = Source(contents)
        assert len(dict(shared.take(contents, source))) == len(source.asked) == 3
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1, "it is told once"
    assert str(folder) in caplog.text


def test_a_pack_in_use_stays_and_an_idle_one_leaves_for_the_budget(folder: Path) -> None:
    size = sum(tensor.nbytes for tensor in contents_of(10).values())
    budget = 3 * size
    used = taken(folder, Source(contents_of(10, seed=1)), budget)
    taken(folder, Source(contents_of(10, seed=2)), budget)
    taken(
        folder, Source(contents_of(10, seed=3)), budget
    )  # the second is idle, and beyond an eighth of the budget
    assert len(packs(folder)) == 2
    source = Source(contents_of(10, seed=1))
    taken(folder, source, budget)
    assert source.asked == []
    del used
    source = Source(contents_of(10, seed=2))
    taken(folder, source, budget)
    assert len(source.asked) == 10


def test_without_room_each_job_has_its_own(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    contents = contents_of(10)
    budget = sum(tensor.nbytes for tensor in contents.values()) // 2
    for _ in range(2):
        source = Source(contents)
        taken(folder, source, budget)
        assert len(source.asked) == 10
    assert "no room" in caplog.text
    assert packs(folder) == []


def test_a_full_file_system_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "memory", 256) as disk:
        contents = contents_of(50)  # 400 KB
        source = Source(contents)
        taken(disk / "weights", source, 1 << 30)
        assert len(source.asked) == 50
        assert packs(disk / "weights") == []
        small = contents_of(5, seed=1)
        held = taken(disk / "weights", Source(small), 1 << 30)
        source = Source(small)
        taken(disk / "weights", source, 1 << 30)
        assert source.asked == []
        del held
    assert "No space left" in caplog.text


def test_a_load_that_fails_leaves_nothing_and_the_next_one_loads(folder: Path) -> None:
    contents = contents_of(5)

    def fails(number: int) -> None:
        if number == 3:
            raise ConnectionError("the store is gone")

    with pytest.raises(ConnectionError):
        taken(folder, Source(contents, fails))
    assert packs(folder) == []
    with pytest.raises(KeyError, match="not loaded whole"):
        list(SharedWeights(WeightsFolder(folder, None)).take(contents, lambda keys: iter(())))
    assert packs(folder) == []
    taken(folder, Source(contents))


def test_an_iterator_that_is_closed_gives_up_its_load(folder: Path) -> None:
    contents = contents_of(40)
    source = Source(contents)
    dozen = WeightsFolder(folder, None, pack_bytes=100_000)
    taking = SharedWeights(dozen).take(contents, source)
    next(taking)
    taking.close()  # type: ignore[attr-defined]
    assert len(source.asked) < 40
    assert [name.split("-")[0] for name in packs(folder)] == ["pack"]
    rest = Source(contents)
    taken(folder, rest)
    assert len(rest.asked) == 40 - len(source.asked)


def test_threads_load_each_tensor_once(folder: Path) -> None:
    sources = [Source(contents_of(30), lambda number: time.sleep(0.001)) for _ in range(4)]
    threads = [threading.Thread(target=taken, args=(folder, source)) for source in sources]
    held = taken(folder, Source(contents_of(5)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(source.asked) for source in sources) == 25
    assert held


def test_a_damaged_pack_is_no_pack(folder: Path) -> None:
    taken(folder, Source(contents_of(3)))
    for content in (b"", b"HAPIWTS1", b"HAPIWTS1" + (99).to_bytes(8, "little") + b"[[1", b"HAPIWTS0" * 100):
        (folder / "pack-0123").write_bytes(content)
        source = Source(contents_of(3))
        taken(folder, source)
        assert source.asked == []
        assert "pack-0123" not in packs(folder)


def test_a_folder_removed_meanwhile_costs_nobody_their_weights(folder: Path) -> None:
    def remove(number: int) -> None:
        if number == 2:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

    source = Source(contents_of(4), remove)
    held = taken(folder, source)
    assert len(source.asked) == 4
    again = Source(contents_of(4))
    taken(folder, again)
    assert len(again.asked) == 4
    assert held


def test_packs_have_a_bound() -> None:
    assert [list(p) for p in divided([("a", 3), ("b", 9), ("c", 4), ("d", 4)], 8)] == [
        ["a"],
        ["b"],
        ["c", "d"],
    ]


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert shared_weights(cpu) is None, "tests share nothing unless they say so"
    monkeypatch.setenv("HAPI_SHARED_WEIGHTS", "")
    monkeypatch.setenv("HAPI_SHARED_WEIGHTS_DIR", str(tmp_path / "weights"))
    assert isinstance(shared_weights(cpu), SharedWeights)
    assert shared_weights(torch.device("cuda")) is None, (
        "a GPU's weights are only on their way in this memory"
    )
    monkeypatch.setenv("HAPI_SHARED_WEIGHTS", "0")
    assert shared_weights(cpu) is None
    for name, value in (("HAPI_SHARED_WEIGHTS", "much"), ("HAPI_SHARED_WEIGHTS_DIR", "weights")):
        monkeypatch.setenv("HAPI_SHARED_WEIGHTS", "1GiB")
        monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=name):
            shared_weights(cpu)


@pytest.mark.parametrize(("seconds", "age"), [(5.0, 1e6), (0.05, -7200.0)])
def test_a_load_that_stands_still_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, age: float
) -> None:
    """The other load has begun long ago, or the clock was set back since, and shows no sign of life."""
    monkeypatch.setattr("hapi.models.shared.weights.STALLED_SECONDS", seconds)
    monkeypatch.setattr("hapi.models.shared.weights.TOUCH_SECONDS", 0.01)
    signed = time.time() - age
    begun, go_on = threading.Event(), threading.Event()

    def hangs(number: int) -> None:
        begun.set()
        go_on.wait()

    other = threading.Thread(target=taken, args=(folder, Source(contents_of(4), hangs)))
    other.start()
    begun.wait()
    for name in packs(folder):
        os.utime(folder / name, (signed, signed))
    source = Source(contents_of(4))
    taken(folder, source)
    assert len(source.asked) == 4
    go_on.set()
    other.join()
    last = Source(contents_of(4))
    taken(folder, last)
    assert last.asked == []


def test_a_clock_that_is_set_ends_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    silence, began = Silence(), time.time()
    monkeypatch.setattr("hapi.models.shared.weights.TOUCH_SECONDS", 0.01)
    monkeypatch.setattr(time, "time", lambda: began + 7200)
    assert silence.seconds(began) < 60
    time.sleep(0.03)
    assert silence.seconds(began + 7200) < 60, "a sign by the new clock"
    monkeypatch.setattr(time, "time", lambda: began - 7200)
    assert silence.seconds(began + 7200) < 60


@pytest.mark.slow
def test_a_killed_loader_is_followed_by_another(folder: Path, takers: Any) -> None:
    first = takers(20, hangs_at=11)
    assert said(first) == "hangs"
    assert [name.split("-")[0] for name in packs(folder)] == ["open"]
    second = takers(20)
    time.sleep(0.2)
    first.kill()
    assert said(second) == "loaded 20"
    assert [name.split("-")[0] for name in packs(folder)] == ["pack"]


@pytest.mark.slow
def test_processes_hold_one_copy_and_a_kill_leaves_no_use(folder: Path, takers: Any) -> None:
    processes = [takers(200) for _ in range(4)]
    assert sorted(said(process) for process in processes) == ["loaded 0"] * 3 + ["loaded 200"]
    size = sum(tensor.nbytes for tensor in contents_of(200).values())
    shares = [mapped_kilobytes(folder, "Pss", process.pid) * 1024 for process in processes]
    assert size <= sum(shares) <= 1.05 * size
    assert sum(mapped_kilobytes(folder, "Anonymous", process.pid) for process in processes) == 0
    assert WeightsFolder(folder, None).clear() == 0
    for process in processes:
        process.kill()
        process.wait()
    assert WeightsFolder(folder, None).clear() >= size
    assert packs(folder) == []


@pytest.mark.slow
def test_the_last_process_to_end_leaves_no_more_than_may_be_idle(folder: Path, takers: Any) -> None:
    budget = 1 << 20  # of which 128 KiB may be idle; the contents have 400 KB
    first, second = (takers(50, budget=budget, ends=True) for _ in range(2))
    assert sorted((said(first), said(second))) == ["loaded 0", "loaded 50"]
    held = packs(folder)
    first.communicate()
    assert packs(folder) == held and first.returncode == 0, "the other one computes with them"
    second.communicate()
    assert packs(folder) == [] and second.returncode == 0
    few = takers(10, budget=budget, ends=True)
    assert said(few) == "loaded 10"
    few.communicate()
    assert len(packs(folder)) == 1, "80 KB may stay for the next job"


@pytest.mark.slow
def test_a_process_that_ends_waits_for_no_lock(folder: Path, takers: Any) -> None:
    process = takers(50, ends=True)
    assert said(process) == "loaded 50"
    with (folder / "lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process.communicate(timeout=240)
    assert process.returncode == 0


def test_packs_that_others_remove_just_now_are_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gives a pack up does not wait for the folder's lock."""
    held = taken(folder, Source(contents_of(3)))
    (one,) = packs(folder)
    monkeypatch.setattr(folders, "_names", lambda at: ["open-gone", one, "pack-gone"])
    shared = WeightsFolder(folder, 1 << 20)
    assert shared.usage() == ((folder / one).stat().st_size, 0)
    assert shared.clear() == 0 and not shared.divide({"other": 8}).refused
    shared.leave()
    assert held and (folder / one).exists()


class WithoutRoom(SharedWeights):
    """Weights on a device that has no room for what others have loaded."""

    def _opened(self, division: Division) -> Any:
        raise OSError(errno.ENOMEM, "no room on the device")


def test_packs_that_were_begun_are_given_up_when_others_cannot_be_opened(folder: Path) -> None:
    held = taken(folder, Source(contents_of(3)))
    before, open_files = packs(folder), len(list(Path("/proc/self/fd").iterdir()))
    source = Source(contents_of(5))
    found = dict(WithoutRoom(WeightsFolder(folder, None)).take(source.contents, source))
    assert held and found.keys() == source.contents.keys() and len(source.asked) == 5
    assert packs(folder) == before and len(list(Path("/proc/self/fd").iterdir())) == open_files
