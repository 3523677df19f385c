"""Models whose packs are lost or cut, in every command that tells of them; pulls onto disks that take no file."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.disks import small_disk

import hapi
from hapi.cli.main import main
from hapi.repository.opening import open_model
from hapi.store.local import LocalStore

SIZE = 300 << 10
Output = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path, capsys: Output) -> LocalStore:
    """A store with models ``lost``, of three layers in one pack, and ``whole``."""
    for name, numbers in (("lost", (1, 2, 3)), ("whole", (4,))):
        file = tmp_path / f"{name}.safetensors"
        save_file({f"l{n}.weight": torch.full((SIZE,), n, dtype=torch.uint8) for n in numbers}, file)
        assert main(["push", str(file), f"{tmp_path}/store/{name}", "--quiet"]) == 0
    capsys.readouterr()
    return LocalStore(tmp_path / "store")


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        (0.5, "2 of 3 tensors are lost (packs: 1 cut short); push the model again with --repair"),
        (0.0, "3 of 3 tensors are lost (packs: 1 cut short); push the model again with --repair"),
        (None, "3 of 3 tensors are lost (packs: 1 missing); push the model again with --repair"),
    ],
)
def test_lost_tensors_are_told_in_a_line(
    store: LocalStore, held: float | None, problem: str, tmp_path: Path, capsys: Output
) -> None:
    (pack,) = open_model(store, "lost").manifest.packs
    data = store.get(pack)
    if held is None:
        store.delete(pack)
    else:
        store.put(pack, data[: int(held * len(data))])
    assert main(["show", f"{store.url}/lost"]) == 0
    told = capsys.readouterr()
    assert told.err == f"hapi show: lost@1: {problem}\n" and "l3" in told.out
    assert main(["show", f"{store.url}/lost", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problem"] == problem
    summaries = {summary.name: summary.problem for summary in hapi.list_models(store.url)}
    assert summaries == {"lost": problem, "whole": None}
    assert main(["ls", store.url]) == 0
    lost, whole = capsys.readouterr().out.splitlines()[1:]
    assert "damaged: " in lost and lost.endswith("push the model again with --repair")
    assert whole.endswith("whole")
    assert main(["ls", f"{store.url}/lost", "--json"]) == 0
    detail = json.loads(capsys.readouterr().out)
    assert (detail["state"], detail["version"]) == ("damaged", 1)
    assert main(["push", str(tmp_path / "lost.safetensors"), f"{store.url}/lost", "--repair", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["ls", store.url]) == 0 and "damaged" not in capsys.readouterr().out


def refused(address: str, output: Path, capsys: Output) -> str:
    """The one line that a pull which cannot write says."""
    assert main(["pull", address, "--output", str(output), "--quiet"]) in (1, 2)
    told = capsys.readouterr()
    assert not told.out and len(told.err.splitlines()) == 1
    return told.err


@pytest.mark.parametrize("output", ["pulled.safetensors", "folder"])
def test_a_pull_onto_a_disk_that_is_full_or_read_only(
    store: LocalStore, output: str, tmp_path: Path, capsys: Output
) -> None:
    address = f"{store.url}/lost"
    with small_disk(tmp_path / "disk", 4096) as disk:
        target = disk / output
        if output == "folder":
            target.mkdir()
        state = os.statvfs(disk)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(state.f_bavail * state.f_bsize - SIZE))
        assert "make room and run the same again" in refused(address, target, capsys)
        assert [path.name for path in disk.rglob("*") if path.is_file()] == ["ballast"]
        ballast.unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert "Read-only file system" in refused(address, target, capsys)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert main(["pull", address, "--output", str(target), "--quiet"]) == 0
        (file,) = disk.rglob("*.safetensors")
        assert load_file(file)["l3.weight"].eq(3).all()
