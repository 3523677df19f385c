"""Checkpoints that are rotated, damaged, and that a full disk holds up."""

from __future__ import annotations

import contextlib
import itertools
import logging
from pathlib import Path

import pytest
from support.stores import Killed

from hapi.atomic import replacing
from hapi.errors import DivergedError, HapiError
from hapi.train.checkpoints import keeping
from hapi.train.checkpoints.checkpoint_files import existing, make_way, numbered
from hapi.train.checkpoints.keeping import Keeper


def put(path: Path, content: str, keep: int) -> None:
    with replacing(path) as file:
        file.write(content.encode())
        make_way(path, keep)


def contents(path: Path) -> list[str]:
    return [p.read_text() for p in existing(path)]


# -- the files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_the_newest_are_left(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "c.pt"
    (tmp_path / "c.pt.old").write_text("another's")
    for number in range(7):
        put(path, str(number), keep)
        assert contents(path) == [str(n) for n in range(number, -1, -1)][:keep]
    assert {p.name for p in tmp_path.iterdir()} == {
        *(numbered(path, n).name for n in range(keep)),
        "c.pt.old",
    }


def test_names_are_ordered_by_their_number(tmp_path: Path) -> None:
    for name in ("c.pt.10", "c.pt.9", "c.pt", "c.pt.x", "c.pt.01", "c.pt.0", "c.pt.-1", "xc.pt.1"):
        (tmp_path / name).write_text(name)
    assert [p.name for p in existing(tmp_path / "c.pt")] == ["c.pt", "c.pt.9", "c.pt.10"]
    assert existing(tmp_path / "no" / "c.pt") == []


@pytest.mark.parametrize("links", [True, False])
def test_a_death_at_any_move_leaves_whole_ones_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """After each system call of a rotation; afterwards the next rotations go on as if nothing had been."""
    calls = itertools.count(1)
    dies_after = 0

    def dying(name: str) -> None:
        plain = getattr(Path, name)

        def call(self: Path, target: Path) -> None:
            plain(self, target)
            if next(calls) == dies_after:
                raise Killed

        monkeypatch.setattr(Path, name, call)

    def refuse(*_: object) -> None:
        raise PermissionError

    dying("replace")
    if links:
        dying("hardlink_to")
    else:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    for number in range(1, 8):
        path = tmp_path / str(number) / "c.pt"
        path.parent.mkdir()
        dies_after = 0
        for content in range(4):
            put(path, str(content), 4)
        calls, dies_after = itertools.count(1), number
        with contextlib.suppress(Killed):
            put(path, "4", 4)
        found = [int(c) for c in contents(path)]
        assert found == sorted(found, reverse=True) and found[0] in (3, 4), found
        assert path.exists() or not links
        dies_after = 0
        for content in range(5, 9):
            put(path, str(content), 4)
        assert contents(path) == ["8", "7", "6", "5"]


# -- the keeper --------------------------------------------------------------------------------------------------


class Disk:
    """What writes, and fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.tries = failures, 0

    def write(self) -> None:
        self.tries += 1
        if self.tries <= self.failures:
            raise HapiError("--checkpoint c.pt: cannot be written: No space left on device")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that pass when somebody sleeps, or when the test says so."""
    now = [100.0]
    monkeypatch.setattr(keeping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(keeping.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_regular_checkpoint(clock: list[float]) -> None:
    disk = Disk()
    keeper = Keeper(disk.write, 3, 60)
    for batch in range(1, 8):
        keeper.step((0, batch))
    assert disk.tries == 2 and keeper.saved == (0, 6)
    keeper.epoch((1, 0))
    keeper.last((1, 0))
    assert disk.tries == 3 and keeper.troubles == []


def test_a_full_disk_is_tried_again_with_pauses(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(failures=3)
    keeper = Keeper(disk.write, None, 60)
    with caplog.at_level(logging.WARNING):
        keeper.epoch((1, 0))
        tried_at = []
        for batch in range(1, 100):
            before = disk.tries
            keeper.step((1, batch))
            if disk.tries > before:
                tried_at.append(batch)
            clock[0] += 1
    assert tried_at == [11, 31, 71], "10, 20 and 40 s apart"
    assert keeper.saved == (1, 71)
    assert len(keeper.troubles) == len(caplog.records) == 2, "said once, and when it is over"
    assert "No space left on device (at epoch 1, batch 0); training goes on" in keeper.troubles[0]
    assert "epoch 1, batch 71 was written, after 3 that failed" in keeper.troubles[1]


def test_no_checkpoint_in_the_end_is_an_error(clock: list[float]) -> None:
    disk = Disk(failures=10**9)
    keeper = Keeper(disk.write, None, 300)
    keeper.epoch((1, 0))
    started = clock[0]
    with pytest.raises(HapiError, match="cannot be written: No space"):
        keeper.last((1, 0))
    assert clock[0] - started == Keeper.LAST_SECONDS and 4 < disk.tries < 12
    saved_late = Keeper(Disk(failures=3).write, None, 300)
    saved_late.last((1, 0))
    assert saved_late.saved == (1, 0)


def test_what_diverged_is_no_failure_of_the_disk(clock: list[float]) -> None:
    def write() -> None:
        raise DivergedError("nan")

    keeper = Keeper(write, 1, 60)
    with pytest.raises(DivergedError):
        keeper.step((0, 1))


def test_without_a_checkpoint_nothing_is_written(clock: list[float]) -> None:
    keeper = Keeper(None, None, 60)
    keeper.step((0, 1))
    keeper.epoch((1, 0))
    keeper.last((1, 0))
    assert keeper.saved is None
