"""Folders of offloaded states: one job at a time, enough room, the last whole commit after a kill."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import groups_of, images_model, offloaded, plain, tied_model, train, weights_equal
from torch import nn

from hapi.errors import UsageError
from hapi.offload.failures import OffloadError
from hapi.offload.states.base import Commit
from hapi.offload.states.commit_file import CommitFile
from hapi.offload.states.disk import DiskStates
from hapi.offload.states.drive import Drive
from hapi.offload.training import offload_training


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model), lr=1e-2)


def test_a_second_job_is_refused(tmp_path: Path) -> None:
    model = tied_model()
    with offloaded(model, adamw(model), tmp_path):
        other = tied_model()
        with pytest.raises(UsageError, match="in use by another job"):
            offloaded(other, adamw(other), tmp_path)


def test_states_of_another_job_are_refused(tmp_path: Path) -> None:
    model = tied_model()
    moved = offloaded(model, adamw(model), tmp_path)
    train(model, moved, range(2), plain)
    moved.close(remove=False)
    other = images_model()
    with pytest.raises(UsageError, match="states of another job, which was killed; remove that folder"):
        offloaded(other, adamw(other), tmp_path)
    again = tied_model()
    with offloaded(again, adamw(again), tmp_path) as found:
        assert found.steps == 2
        assert weights_equal(model, again)


def test_too_little_room_is_told_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied_model()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(UsageError, match=r"needs .* \(\d+ bytes\), and its disk has .* free; make room"):
        offloaded(model, adamw(model), tmp_path)
    assert list(tmp_path.iterdir()) == [], "what is refused leaves nothing"


def test_a_disk_that_is_full_at_the_start_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, at: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    model = tied_model()
    with pytest.raises(UsageError, match="No space left on device; it needs"):
        offloaded(model, adamw(model), tmp_path)


def test_a_disk_that_fails_leaves_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = tied_model(), tied_model()
    moved = offloaded(twin, adamw(twin), tmp_path)
    torch.manual_seed(5)
    train(twin, moved, range(5), plain)
    optimizer = adamw(model)

    def fails(self: object, *args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "states")

    monkeypatch.setattr(DiskStates, "write", fails)
    with pytest.raises(OffloadError, match=r"failed: Input/output error \(states\); step \d+ is committed"):
        train(twin, moved, range(5, 9), plain)
    moved.close()
    monkeypatch.undo()
    third = tied_model()
    with offloaded(third, adamw(third), tmp_path) as found:
        assert found.steps in (4, 5)
        torch.manual_seed(5)
        train(model, optimizer, range(found.steps), plain)
        names = [name for name, _ in model.named_parameters()]
        assert all(torch.equal(model.get_parameter(name), third.get_parameter(name)) for name in names)


@pytest.mark.parametrize("damage", ["nothing", "cut", "flipped", "zeros"])
def test_a_torn_commit_does_not_count(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "commit"
    commits = [Commit(n, 10 + n, bytes([n % 2, 1]), (n, n, n), b"extra") for n in (1, 2, 3)]
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    file = CommitFile(descriptor, 2, 3, 5)
    assert file.newest is None
    for commit in commits:
        file.write(commit)
    data = bytearray(path.read_bytes())
    block = file.nbytes // 2
    if damage == "cut":
        data = data[: block + 20]
    elif damage == "flipped":
        data[block + 40] ^= 1
    elif damage == "zeros":
        data[block:] = bytes(block)
    path.write_bytes(data)
    assert CommitFile(descriptor, 2, 3, 5).newest == commits[2 if damage == "nothing" else 1]
    assert CommitFile(descriptor, 2, 4, 5).newest is None
    os.close(descriptor)


def test_a_commit_comes_when_its_records_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut between the two leaves the commit before, whose records are whole."""
    write, sync, commit = Drive.write, Drive.sync, CommitFile.write
    unsafe: set[Drive] = set()
    commits: list[int] = []

    def written(self: Drive, *of: Any) -> None:
        unsafe.add(self)
        write(self, *of)

    def synced(self: Drive) -> None:
        sync(self)
        unsafe.discard(self)

    def committed(self: CommitFile, made: Commit) -> None:
        commits.append(len(unsafe))
        commit(self, made)

    monkeypatch.setattr(Drive, "write", written)
    monkeypatch.setattr(Drive, "sync", synced)
    monkeypatch.setattr(CommitFile, "write", committed)
    model = tied_model()
    with offloaded(model, adamw(model), [tmp_path / "a", tmp_path / "b"], mode="serial") as moved:
        train(model, moved, range(5), plain)
    assert len(commits) >= 4 and not any(commits)


def test_wrong_uses_are_told_in_one_line(tmp_path: Path) -> None:
    model = images_model()
    adagrad = torch.optim.Adagrad(model.parameters())
    with pytest.raises(UsageError, match="Adagrad cannot be offloaded: take one of torch's"):
        offload_training(model, adagrad, disk=tmp_path)
    with pytest.raises(UsageError, match="mode='fast': take one of"):
        offload_training(model, adamw(model), mode="fast")
    for wrong in ("", 3, [tmp_path, ""]):
        with pytest.raises(UsageError, match="name a folder, or a list with one on each drive"):
            offload_training(model, adamw(model), "1KB", wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"model: expected a torch\.nn\.Module, not NoneType"):
        offload_training(None, adamw(model), "1KB", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="each once"):
        offload_training(model, adamw(model), "1KB", [tmp_path, tmp_path])
    double = images_model().double()
    with pytest.raises(UsageError, match=r"0\.weight is float64"):
        offload_training(double, adamw(double), "1KB", tmp_path)
    sparse = nn.Embedding(500, 4, sparse=True)
    moved = offloaded(sparse, torch.optim.SGD(sparse.parameters()), tmp_path)
    with pytest.raises(UsageError, match="weight has sparse gradients"):
        sparse(torch.tensor([1])).sum().backward()
    moved.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="name a folder that can be written"):
        offloaded(model, adamw(model), tmp_path / "file")


def test_states_in_the_memory_that_is_trained_in_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = tied_model()
    with offloaded(model, adamw(model), None):
        assert "frees none of it: a disk would" in caplog.text


def test_a_folder_that_does_not_exist_yet_is_made_also_where_all_fits(tmp_path: Path) -> None:
    model = images_model()
    optimizer = adamw(model)
    found = offload_training(model, optimizer, "1GB", tmp_path / "new" / "folder")
    assert found == (model, optimizer)
    train(model, optimizer, range(3), plain)


def test_a_model_that_is_dropped_gives_its_files_back(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        model = images_model()
        offload_training(model, adamw(model), "1GB", tmp_path)
        del model
        gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


@pytest.mark.parametrize(("name", "stays"), [("rank1", True), ("hapi-rank1", False)])
def test_a_folder_that_the_user_made_stays_and_that_of_a_rank_goes(
    name: str, stays: bool, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    model = tied_model()
    with offloaded(model, adamw(model), folder):
        assert list(folder.iterdir())
    assert folder.exists() == stays and not (stays and list(folder.iterdir()))
