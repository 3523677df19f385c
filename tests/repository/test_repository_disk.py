"""``hapi push`` and ``hapi gc`` on a disk that is full at any byte, and beside one another with kills."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.disks import small_disk, small_ext4
from support.forked import ForkedProcess, environment
from support.killed_at import killed_at

from hapi.cli.main import main
from hapi.repository.opening import open_model
from hapi.repository.packs.collect import collect_packs
from hapi.repository.packs.journal import PUSHES
from hapi.repository.packs.pushes import CONDEMNED
from hapi.repository.verify import verify_model
from hapi.repository.versions import list_versions, model_names
from hapi.store.local import LocalStore

SIZE = 300 << 10
"""Bytes of a tensor, which models share from 256 KiB on."""
PAGE = 4096


def checkpoint(folder: Path, *numbers: int) -> str:
    path = folder / f"{'-'.join(map(str, numbers))}.safetensors"
    save_file({f"layer{n}.weight": torch.full((SIZE,), n, dtype=torch.uint8) for n in numbers}, path)
    return str(path)


def check_whole(store: LocalStore, *references: str) -> None:
    """Every version is whole, and those of these references are there."""
    for reference in references:
        assert not verify_model(store, reference).damages
    for name in model_names(store):
        for number in list_versions(store, name):
            assert not verify_model(store, f"{name}@{number}").damages


def leave_free(disk: Path, pages: int) -> None:
    """Fill the disk but for so many pages."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize // PAGE
    (disk / "ballast").write_bytes(bytes((free - pages) * PAGE))
    assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize == pages * PAGE


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_page_of_a_push(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = checkpoint(tmp_path, 1, 2), checkpoint(tmp_path, 2, 3)
    tensor = SIZE // PAGE
    with small_disk(tmp_path / "disk", 4096) as disk:
        store = LocalStore(disk / "store")
        assert main(["push", one, f"{store.url}/m", "--tag", "best", "--quiet"]) == 0
        failed = 0
        for pages in (*range(8), tensor // 2, *range(tensor, tensor + 16)):
            leave_free(disk, pages)
            code = main(["push", two, f"{store.url}/m", "--quiet"])
            check_whole(store, "m@1", "m@best")
            if code:
                failed += 1
                error = capsys.readouterr().err
                assert "make room and run the same again" in error and len(error.splitlines()) == 1
                assert list_versions(store, "m") == [1] and not list((disk / "store").rglob(".*"))
                (disk / "ballast").unlink()
                assert main(["push", two, f"{store.url}/m", "--quiet"]) == 0
            (disk / "ballast").unlink(missing_ok=True)
            check_whole(store, "m@2")
            assert main(["rm", f"{store.url}/m@2", "--yes"]) == 0
            assert main(["gc", store.url, "--yes"]) == 0
            assert store.list_keys(PUSHES) == [] and len(store.list_keys("repository/packs")) == 1
            capsys.readouterr()
        assert 8 < failed < 24


def with_garbage(store: LocalStore, folder: Path) -> None:
    """A model, the packs of one that is gone, and a pack of which a third is needed."""
    for name, numbers in (("kept", (1, 2)), ("gone", (2, 3)), ("large", (4, 5, 6)), ("part", (2, 5))):
        assert main(["push", checkpoint(folder, *numbers), f"{store.url}/{name}", "--quiet"]) == 0
    assert main(["rm", f"{store.url}/gone", f"{store.url}/large", "--yes"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("pages", [0, 1, 2, 4, 7])
def test_a_collection_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], pages: int) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk:
        store = LocalStore(disk / "store")
        with_garbage(store, tmp_path)
        leave_free(disk, pages)
        capsys.readouterr()
        assert main(["gc", store.url, "--yes"]) == 0
        check_whole(store, "kept", "part")
        reported = capsys.readouterr().out
        # The room of the first suffices for what is left of the second.
        assert "1 packs of 900." in reported and "were packed anew in 300." in reported
        assert len(store.list_keys("repository/packs")) == 2 and not list((disk / "store").rglob(".*"))
        (disk / "ballast").unlink()
        assert collect_packs(store) == ()


@pytest.mark.slow
def test_models_are_removed_from_a_full_disk_with_folders_that_take_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_ext4(tmp_path / "disk", 8192) as disk:
        store = LocalStore(disk / "store")
        with_garbage(store, tmp_path)
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(bytes(PAGE)):
                pass
        with pytest.raises(OSError, match="No space left"):
            (disk / "folder").mkdir()
        capsys.readouterr()
        assert main(["rm", f"{store.url}/kept@1", f"{store.url}/part", "--yes"]) == 0
        assert model_names(store) == [] and main(["gc", store.url, "--yes"]) == 0
        assert store.list("repository/packs") == [] and not capsys.readouterr().err


@pytest.mark.slow
def test_no_room_to_pack_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Smaller packs give the room for larger ones; those that have none stay, in a line."""
    with small_disk(tmp_path / "disk", 8192) as disk:
        store = LocalStore(disk / "store")
        for name, first in (("a", 10), ("b", 20)):
            numbers = range(first, first + 3 * (first // 10))
            for model, layers in (("large", numbers), (name, numbers[: first // 10])):
                assert main(["push", checkpoint(tmp_path, *layers), f"{store.url}/{model}", "--quiet"]) == 0
            assert main(["rm", f"{store.url}/large", "--yes"]) == 0
        ended = {}
        for pages in (0, SIZE // PAGE - 8, SIZE // PAGE + 8):
            leave_free(disk, pages)
            capsys.readouterr()
            assert main(["gc", store.url, "--yes"]) == 0
            check_whole(store, "a", "b")
            ended[pages] = capsys.readouterr().out
            (disk / "ballast").unlink()
        none, little, enough = ended.values()
        for line in (none, little):
            assert "2 packs of 2.64 MiB, more than half of it dead, stay until there is room" in line
        assert "2 packs of 2.64 MiB, more than half of it dead, were packed anew in 90" in enough
        assert collect_packs(store) == () and not list((disk / "store").rglob(".*"))


@pytest.mark.slow
def test_a_collection_on_a_full_disk_is_killed_at_every_third_change_of_a_file(tmp_path: Path) -> None:
    given = LocalStore(tmp_path / "given")
    with_garbage(given, tmp_path)
    with small_disk(tmp_path / "disk", 4096) as disk:
        for moment in range(time.time_ns() % 3, 1000, 3):
            store = LocalStore(disk / "store")
            shutil.copytree(given.root, store.root)
            leave_free(disk, 0)
            code, output = killed_at(disk, moment, "gc", store.url, "--yes")
            check_whole(store, "kept", "part")
            assert code in (0, -signal.SIGKILL), output
            if code:
                assert main(["gc", store.url, "--yes"]) == 0
                check_whole(store, "kept", "part")
            assert len(store.list_keys("repository/packs")) == 2 and not list(store.root.rglob(".*"))
            (disk / "ballast").unlink()
            shutil.rmtree(store.root)
            if not code:
                assert moment > 10
                return
    raise AssertionError


def start(*arguments: str) -> ForkedProcess:
    return ForkedProcess(
        ["hapi.cli.main", *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
def test_two_collections_beside_a_push_are_killed_at_random_moments(tmp_path: Path) -> None:
    """One of the three, another one each round; the others end, and nothing that they relied on is gone."""
    rng = random.Random(time.time_ns())
    store = LocalStore(tmp_path / "store")
    assert main(["push", checkpoint(tmp_path, 1, 2), f"{store.url}/kept", "--quiet"]) == 0
    killed = 0
    for turn in range(9):
        assert main(["push", checkpoint(tmp_path, 2, 3, 4), f"{store.url}/gone", "--quiet"]) == 0
        large = range(10 + 3 * turn, 13 + 3 * turn)  # of which a third stays, and is packed anew
        assert main(["push", checkpoint(tmp_path, *large), f"{store.url}/large", "--quiet"]) == 0
        assert main(["push", checkpoint(tmp_path, 2, large[1]), f"{store.url}/part", "--quiet"]) == 0
        # The push needs what the collections are to remove.
        assert main(["rm", f"{store.url}/gone", f"{store.url}/large", "--yes"]) == 0
        new = ("push", checkpoint(tmp_path, 3, 4, 5), f"{store.url}/new", "--quiet")
        running = [start(*new), *(start("gc", store.url, "--yes") for _ in range(2))]
        time.sleep(rng.uniform(0, 0.4))
        running[turn % 3].kill()
        ended = [process.communicate()[0] for process in running]
        killed += running[turn % 3].returncode == -signal.SIGKILL
        for number, process in enumerate(running):
            assert process.returncode == 0 or number == turn % 3, ended[number]
        check_whole(store, "kept", "part", *(["new"] if running[0].returncode == 0 else []))
        assert main([*new]) == 0
        assert main(["gc", store.url, "--yes"]) == 0
        check_whole(store, "kept", "part", "new")
        assert collect_packs(store) == () and not store.exists(CONDEMNED) and not store.list_keys(PUSHES)
        entry = open_model(store, "part").manifest.tensors[f"layer{large[1]}.weight"]
        assert store.size(entry.pack) < 2 * SIZE
        assert main(["rm", f"{store.url}/new", "--yes"]) == 0
        assert main(["gc", store.url, "--yes"]) == 0
    assert killed
