"""Freed memory: kept for the next tensors as far as a pass will use it, and given back beyond that."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.activation_models import SmallGpt, gpt_loss, train

from hapi import allocator
from hapi.offload.activations import freed_memory
from hapi.offload.activations.freed_memory import FreedMemory
from hapi.offload.activations.offload import ActivationOffload
from hapi.offload.layer_memory import GradientRoom

MIB = 1 << 20
on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")
BLOCKS = """
import json, resource
from hapi.offload.activations.freed_memory import FreedMemory
from hapi.process.free_memory import anonymous_bytes

def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"1") * size
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

freed, found = FreedMemory(), {}
freed.give_back()
faults(16 << 20)
found["given back"] = faults(16 << 20)
freed.keep(48 << 20)
before = anonymous_bytes()
faults(40 << 20)
freed.bound()
found["kept"] = faults(40 << 20)
faults(200 << 20)
found["too much"] = anonymous_bytes() - before
freed.bound()
found["within"] = anonymous_bytes() - before
freed.close()
faults(100 << 20)
found["closed"] = anonymous_bytes() - before
print(json.dumps(found))
"""
TRAINING = """
import json, resource, sys
import torch
from torch import nn
import hapi
from hapi.process.free_memory import anonymous_bytes

model, batch = nn.Sequential(*(nn.Linear(700, 700) for _ in range(8))), torch.randn(64, 700)
adamw = torch.optim.AdamW(model.parameters())
faults, anonymous = [], []
model, optimizer = hapi.offload_training(model, adamw, memory="40MB", disk=sys.argv[1])
with optimizer:
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt  # of no other work
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        anonymous.append(anonymous_bytes())
    report = optimizer.report()
print(json.dumps({
    "faults": faults, "anonymous": anonymous, "speculated": report["speculated_pieces"],
    "peak": report["activations"]["predicted_peak_bytes"],
    "gradients": sum(parameter.nbytes for parameter in model.parameters()),
}))
"""


def found_by(program: str, *arguments: str) -> dict[str, Any]:
    """What a process of its own finds, whose allocator nobody has configured."""
    mine = {name: value for name, value in os.environ.items() if name not in allocator.OWN}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, check=True, timeout=240,
        env={**mine, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@on_glibc
def test_freed_memory_is_kept_within_its_bound() -> None:
    found = found_by(BLOCKS)
    assert found["given back"] > 4000 and found["kept"] < 100
    assert found["too much"] > 190 * MIB and found["within"] < 48 * MIB and found["closed"] < 48 * MIB


@on_glibc
@pytest.mark.slow
def test_gradients_of_a_step_take_the_pages_of_the_step_before(tmp_path: Path) -> None:
    found = found_by(TRAINING, str(tmp_path))
    pages = found["gradients"] // resource.getpagesize()
    assert found["speculated"]
    assert found["faults"][0] > pages, "it is measured, and memory is not known yet"
    # One step may need more than those before it, where more gradients wait for the disk.
    assert statistics.median(found["faults"][4:]) < pages / 10, found
    # The first steps also start threads and load code, which take memory of their own.
    assert max(found["anonymous"][5:]) - found["anonymous"][0] <= found["peak"], "no more than a pass takes"


@pytest.mark.parametrize(
    "leaves", [[90, 10, 90, 90, 90, 10], [90, 90, 10, 90, 10, 90, 90], [70, 70, 70, 90, 70, 70]]
)
def test_a_heap_in_pieces_is_not_kept(leaves: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are what each pass leaves free, of which 50 may stay; 75 are too few to give all up for."""
    used, asked = {"free": 30}, []
    monkeypatch.setattr(freed_memory, "bytes_in_use", lambda: 1000)
    monkeypatch.setattr(freed_memory, "anonymous_bytes", lambda: 1200 + used["free"])
    monkeypatch.setattr(freed_memory, "give_back_freed_memory", lambda: used.update(free=0))
    for name in ("keep_all_blocks", "keep_large_blocks", "give_back_large_blocks"):
        monkeypatch.setattr(freed_memory, name, lambda name=name: asked.append(name) or True)
    freed = FreedMemory()
    freed.keep(50)
    assert asked == ["keep_all_blocks"] and not used["free"]
    for at, free in enumerate(leaves):
        used["free"] += free
        freed.bound()
        assert used["free"] <= 50 or asked[-1] == "give_back_large_blocks"
        is_in_pieces = any(leaves[first : first + 3] == [90, 90, 90] for first in range(at - 1))
        assert (asked[-1] == "give_back_large_blocks") == is_in_pieces
    freed.close()
    assert asked[-1] == "keep_large_blocks"


@pytest.mark.slow_except("6000000")
@pytest.mark.parametrize("memory", [1 << 30, 6_000_000])
def test_freed_memory_is_kept_where_the_memory_has_room_for_it(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[int, int] = {}
    monkeypatch.setattr(freed_memory, "bytes_in_use", lambda: 1000)
    monkeypatch.setattr(freed_memory, "anonymous_bytes", lambda: 2000)
    monkeypatch.setattr(
        allocator,
        "_function",
        lambda name: (
            (lambda option, value: options.update({option: value}) or 1) if name == "mallopt" else None
        ),
    )
    model = SmallGpt()
    gradients = GradientRoom(total=sum(parameter.nbytes for parameter in model.parameters()))
    with ActivationOffload(model, memory, [tmp_path], gradients=gradients) as offload:
        train(model, gpt_loss)
        kept = not offload.report()["swapped_bytes"]
        assert kept == (memory == 1 << 30)
        assert (options[allocator._MMAP_MAX] == 0) == kept
    assert options[allocator._MMAP_MAX]


@pytest.mark.slow
def test_freed_blocks_in_pieces_may_stay_within_the_memory_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heap takes up to a quarter more than its blocks: a bound of just these gave all of them back, step by step."""
    kept: list[int] = []
    monkeypatch.setattr(FreedMemory, "keep", lambda self, nbytes: kept.append(nbytes))

    def planned(memory: int) -> dict[str, Any]:
        model = SmallGpt()
        gradients = GradientRoom(total=sum(parameter.nbytes for parameter in model.parameters()))
        with ActivationOffload(model, memory, [tmp_path], gradients=gradients) as offload:
            train(model, gpt_loss, steps=2)
            return offload.report()

    peak = planned(1 << 30)["predicted_peak_bytes"]
    for memory in (int(2.0 * peak), int(1.1 * peak)):
        report = planned(memory)
        assert report["case"] == "everything fits"
        assert kept[-1] == min(int(1.25 * report["predicted_peak_bytes"]), memory) - report["saved_bytes"]
