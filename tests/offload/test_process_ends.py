"""Files of a script that ended in order are gone; any other end keeps them, and the next run goes on from there."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import offload_ends
from support.offload_ends import IN_ORDER, OUT_OF_ORDER, STEPS
from support.offload_loops import groups_of, offloaded, plain, tied_model, train, weights_equal

TESTS = Path(__file__).parents[1]
SLOW = pytest.mark.slow


def run_script(folder: Path, ends: list[str], *start: str) -> dict[str, int]:
    """Run the script, and return its children's exit codes."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *(start or (offload_ends.__file__,)), str(folder), *ends],
        env=environment, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return {name: int(code) for name, code in (line.split() for line in found.stdout.splitlines())}


def goes_on_from(folder: Path) -> int:
    """Return the step that the next run goes on from; it comes to the weights of an undisturbed one."""
    model = tied_model()
    train(model, torch.optim.AdamW(groups_of(model), lr=1e-2), range(6), plain)
    twin = tied_model()
    with offloaded(twin, torch.optim.AdamW(groups_of(twin), lr=1e-2), folder) as moved:
        steps = moved.steps
        train(twin, moved, range(steps, 6), plain)
        assert weights_equal(model, twin)
    return steps


@pytest.mark.slow
def test_only_an_end_in_order_removes_the_files(tmp_path: Path) -> None:
    codes = {**IN_ORDER, **OUT_OF_ORDER}
    assert run_script(tmp_path, list(codes)) == codes
    kept = [end for end in codes if (tmp_path / end / "hapi-offload" / "commit").exists()]
    assert kept == list(OUT_OF_ORDER)
    for end in kept:  # a kill may come before the last step is committed, and the one before is durable
        assert goes_on_from(tmp_path / end) in (STEPS - 2, STEPS - 1, STEPS)


def job(folder: Path, fails: bool) -> None:
    model = tied_model()
    train(model, offloaded(model, torch.optim.AdamW(groups_of(model), lr=1e-2), folder), range(STEPS), plain)
    if fails:
        raise RuntimeError("as asked for")


@pytest.mark.long_cases("spawn-False")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("way", ["fork", pytest.param("spawn", marks=SLOW)])
def test_children_of_multiprocessing_end_as_scripts_do(way: str, fails: bool, tmp_path: Path) -> None:
    child = multiprocessing.get_context(way).Process(target=job, args=(tmp_path, fails))
    child.start()
    child.join(240)
    assert child.exitcode == fails
    assert (tmp_path / "hapi-offload").exists() == fails
    assert not fails or goes_on_from(tmp_path) == STEPS


@pytest.mark.long
def test_a_module_that_is_run_ends_as_a_script_does(tmp_path: Path) -> None:
    ends = ["last-line", "exit-0", "exit-1", "terminated-143"]
    run_script(tmp_path, ends, "-m", "support.offload_ends")
    assert [(tmp_path / end / "hapi-offload").exists() for end in ends] == [False, False, True, True]
