"""Frozen weights on a GPU that several processes hold once."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.harness import losses, report_of, server, train
from support.weight_tools import Source, contents_of

from hapi.models.shared.device_weights import device_weights
from hapi.models.shared.place import FOLDER_VARIABLE, VARIABLE

pytestmark = pytest.mark.gpu

COUNT, ELEMENTS = 40, 4 << 20
"""Tensors of 16 MiB: 640 MiB."""
ROOT = Path(__file__).parents[2]
TAKER = f"""
import sys, time, torch
from support.weight_tools import Source, contents_of
from hapi.models.shared.device_weights import device_weights
device = torch.device("cuda", 0)
weights, source = device_weights(device), Source(contents_of({COUNT}, {ELEMENTS}))
began = time.perf_counter()
found = dict(weights.take(source.contents, source))
torch.cuda.synchronize()
print(len(source.asked), time.perf_counter() - began, flush=True)
first, *others = source.contents
for line in sys.stdin:
    if line.strip() == "write":
        found[first].fill_(7.0)
        torch.cuda.synchronize()
    all_equal = all(torch.equal(found[key].cpu(), source.contents[key]) for key in others)
    print(all_equal, found[first].unique().tolist()[:2], flush=True)
"""


@pytest.fixture
def folder(cuda: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, "on")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "weights"))
    return tmp_path


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TAKER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])},
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def tell(process: subprocess.Popen[str], order: str) -> list[str]:
    assert process.stdin is not None
    process.stdin.write(order + "\n")
    process.stdin.flush()
    return said(process)


def test_a_process_has_them_once(folder: Path, cuda: torch.device) -> None:
    weights = device_weights(cuda)
    assert weights is not None, "this machine cannot share a GPU's memory"
    contents = contents_of(20, 1000)
    found = dict(weights.take(contents, Source(contents)))
    assert all(
        tensor.device == cuda and tensor.untyped_storage().nbytes() == tensor.nbytes
        for tensor in found.values()
    )
    assert all(torch.equal(found[key].cpu(), tensor) for key, tensor in contents.items())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())
    total = torch.stack([tensor.sum() for tensor in found.values()]).sum()
    del found
    gc.collect()  # unmapped once the sums are made
    assert total.isfinite()
    again = Source(contents)
    assert dict(weights.take(contents, again)) and len(again.asked) == 20, "nobody used them any more"


def test_processes_hold_one_copy_that_outlives_its_maker(
    folder: Path, cuda: torch.device, note: Callable[[str], None]
) -> None:
    size = COUNT * ELEMENTS * 4
    first = start()
    second = third = None
    try:
        loaded, seconds = said(first)
        assert int(loaded) == COUNT
        second = start()
        loaded, later = said(second)
        assert int(loaded) == 0
        size = f"{COUNT * ELEMENTS * 4 >> 20} MiB of weights"
        note(
            f"{size}: {float(seconds):.3f} s in the first process, {1000 * float(later):.1f} ms in the second"
        )
        assert tell(first, "write") == ["True", "[7.0]"]
        assert tell(second, "look") == ["True", "[7.0]"], "it is one copy"
        first.send_signal(signal.SIGKILL)
        first.wait()
        third = start()
        assert said(third)[0] == "0"
        for process in (second, third):
            assert tell(process, "look") == ["True", "[7.0]"]
    finally:
        for process in (first, second, third):
            if process is not None:
                process.kill()
                process.communicate()


def test_servers_on_one_gpu_share_their_fronts(folder: Path, store: Path) -> None:
    """The second ``hapi-server`` on the GPU takes the front's memory from the first."""
    settings = ("--dataset", "digits", "--model", "vgg11", "--bs", "8", "--epochs", "1", "--seed", "3", "--split", "13",
                "--weights", "random", "--device", "cuda")  # fmt: skip
    found = []
    own = {name: os.environ[name] for name in (VARIABLE, FOLDER_VARIABLE)}
    with server(store, "--device", "cuda", **own) as one, server(store, "--device", "cuda", **own) as two:
        for number, running in enumerate((one, two)):
            path = folder / f"{number}.json"
            train("--server", running.url, "--report", str(path), *settings)
            found.append(losses(report_of(path)))
        packs = list(Path(os.environ[FOLDER_VARIABLE]).parent.glob("weights-gpu-*/pack-*"))
        holders = list(packs[0].parent.glob("holder-*")) if packs else []
        assert packs and len(holders) == 2
    assert found[0] == found[1]
