"""Training beyond a GPU's memory: steps and gradients bit by bit, memory as predicted, a model that does not fit."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support import activation_models as models
from support.host_updates import UpdatedOnHost
from support.offload_loops import (
    Loop,
    accumulated,
    backward,
    clipped,
    groups_of,
    images_model,
    offloaded,
    plain,
    states_equal,
    tied_model,
    train,
    weights_equal,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.offload.program import TrainTask
from benchmarks.offload.settings import BLOCK_PARAMETERS, HOST, MEMORY
from hapi.models.devices import set_arithmetic
from hapi.offload.activations import measuring
from hapi.offload.activations.offload import ActivationOffload
from hapi.offload.optimizer import OffloadedOptimizer
from hapi.offload.training import offload_training

pytestmark = pytest.mark.gpu

CAP = 24e9
"""Bytes of the GPU's memory in which a model is to train that does not fit it."""
BLOCKS = 190
"""Their parameters take 6.4 GB; with gradients and AdamW's states 25.5 GB."""
STEPS = 14


@pytest.fixture(autouse=True)
def repeatable(place: str) -> Iterator[None]:
    """Let two runs of one loop give the same bits."""
    set_arithmetic(torch.device(place))
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = before


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def places_of(place: str, folder: Path) -> Path | None:
    return {"host": None, "disk": folder}[place]


@pytest.mark.parametrize("mode", ["active", "naive", "serial"])
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("loop", [plain, clipped, accumulated])
@pytest.mark.parametrize("make", [tied_model, images_model])
def test_steps_are_those_with_all_states_in_memory(
    make: Callable[[], nn.Module], loop: Loop, where: str, mode: str, place: str, tmp_path: Path
) -> None:
    model, twin = make().to(place), make().to(place)
    optimizer = UpdatedOnHost(groups_of(model), adamw)
    torch.manual_seed(11)
    train(model, optimizer, range(STEPS), loop)
    with offloaded(twin, adamw(groups_of(twin)), places_of(where, tmp_path), mode=mode) as moved:
        torch.manual_seed(11)
        train(twin, moved, range(STEPS), loop)
        assert weights_equal(model, twin)
        assert states_equal(optimizer.state_dict(), moved.state_dict())
        report = moved.report()
    if mode != "serial" and loop is plain:
        assert report["speculated_pieces"] > 0.8 * report["pieces"]


@pytest.mark.parametrize("where", ["host", "disk"])
def test_steps_are_close_to_those_of_the_device(where: str, place: str, tmp_path: Path) -> None:
    model, twin = tied_model().to(place), tied_model().to(place)
    torch.manual_seed(11)
    train(model, adamw(groups_of(model)), range(5), clipped)
    with offloaded(twin, adamw(groups_of(twin)), places_of(where, tmp_path)) as moved:
        torch.manual_seed(11)
        train(twin, moved, range(5), clipped)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_half_precision_has_masters_in_fp32(place: str, tmp_path: Path) -> None:
    model, twin = images_model().bfloat16().to(place), images_model().bfloat16().to(place)
    optimizer = UpdatedOnHost(groups_of(model), adamw)
    train(model, optimizer, range(STEPS), plain)
    with offloaded(twin, adamw(groups_of(twin)), tmp_path) as moved:
        train(twin, moved, range(STEPS), plain)
        assert weights_equal(model, twin)


def test_scaled_gradients_in_autocast(cuda: torch.device, tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: Any) -> list[float]:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=2)  # too large at first
        found = []
        for step in range(12):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                inputs, labels = torch.randn(8, 3, 8, 8, device=cuda), torch.full((8,), step % 7, device=cuda)
                loss = nn.functional.cross_entropy(model(inputs).float(), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append(loss.item())
        return found

    model, twin = images_model().to(cuda), images_model().to(cuda)
    torch.manual_seed(5)
    wanted = run(model, adamw(model.parameters()))
    with offloaded(twin, adamw(twin.parameters()), tmp_path) as moved:
        torch.manual_seed(5)
        assert run(twin, moved) == pytest.approx(wanted, rel=1e-3)
        assert 0 < moved.steps < 12, "steps whose gradients overflow are left out"


def small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 8, 3, 4, 64, 256, dropout=0.1, attention_dropout=0.1, num_classes=10)


@pytest.mark.parametrize("tier", ["host", "disks"])
@pytest.mark.parametrize("policy", ["auto", "swap", "recompute"])
@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_gradients_with_swapped_activations_are_those_of_plain_training(
    name: str, policy: str, tier: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tier == "disks":
        monkeypatch.setattr(measuring, "_HOST_SHARE", 0.0)
    make, loss = {"gpt": (models.SmallGpt, models.gpt_loss), "vit": (small_vit, models.image_loss)}[name]
    torch.manual_seed(0)
    model = make().to(place)
    twin = copy.deepcopy(model)
    folders = [tmp_path / "a", tmp_path / "b"] if tier == "disks" else None
    with ActivationOffload(twin, 5_000_000, folders, policy) as offload:
        seen = models.train(twin, loss, steps=3)
        report = offload.report()
    assert models.same(models.train(model, loss, steps=3), seen)
    assert report["state"] == "planned"
    if place == "cuda" and policy == "swap":
        assert report["bytes_to_host" if tier == "host" else "bytes_written"] > 0


@pytest.mark.parametrize(("policy", "share", "disks"), [("keep all", 10.0, 0), ("swap", 0.6, 0), ("swap", 0.6, 1),
    ("recompute", 0.6, 0), ("auto", 0.6, 0), ("auto", 0.6, 2)])  # fmt: skip
def test_memory_of_a_pass_is_that_predicted(
    policy: str, share: float, disks: int, cuda: torch.device, tmp_path: Path, note: Callable[[str], None]
) -> None:
    torch.manual_seed(0)
    model = models.SmallGpt(width=256, depth=8).to(cuda)
    tokens = torch.randint(0, 101, (16, 128), device=cuda)

    def step() -> None:
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    def peak_of(run: Callable[[], None]) -> int:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    step()  # gradients and the libraries' working memory are there
    whole = peak_of(step)
    folders = [tmp_path / str(number) for number in range(disks)]
    chosen = "auto" if policy == "keep all" else policy
    with ActivationOffload(model, int(share * whole), folders or None, chosen) as offload:
        step()
        offload.step_done()
        step()
        seen, predicted = peak_of(step), offload.report()["predicted_peak_bytes"]
    note(
        f"{policy}, {share:g} of {whole / 1e6:.0f} MB, {disks} disks: predicted {predicted / seen:.3f} of the peak"
    )
    assert seen <= predicted <= 1.1 * seen


def test_a_model_that_does_not_fit_trains(cuda: torch.device, note: Callable[[str], None]) -> None:
    """Under a cap of 24 GB; the same model with AdamW on the device dies."""
    ended = {way: in_process(way, CAP) for way in (MEMORY, HOST)}
    code, said, _ = ended[MEMORY]
    assert code != 0 and "out of memory" in said
    code, said, answer = ended[HOST]
    assert code == 0, said
    assert answer["device_peak"] <= CAP
    assert answer["losses"][-1] < answer["losses"][0]
    note(
        f"{BLOCKS * BLOCK_PARAMETERS / 1e9:.2f} G parameters with AdamW under {CAP / 1e9:g} GB: "
        f"{answer['device_peak'] / 1e9:.1f} GB at most, {answer['seconds']:.2f} s a step, "
        f"{answer['peak'] / 1e9:.1f} GB of host memory"
    )


def in_process(way: str, cap: float) -> tuple[int, str, dict[str, Any]]:
    """Train the large model in a process of its own; return its code, what it complained of, and its answer."""
    task = TrainTask(
        way=way,
        blocks=BLOCKS,
        rows=512,
        memory=int(0.9 * cap),
        folders=(),
        device="cuda",
        device_cap=int(cap),
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.offload.program", json.dumps(asdict(task))],
        input=json.dumps({"do": "turn", "steps": 1}) + "\n",
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": str(os.cpu_count())},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, done.stderr, answers[-1] if answers else {}


def test_a_killed_training_goes_on(place: str, tmp_path: Path) -> None:
    model = tied_model().to(place)
    whole = offloaded(model, adamw(groups_of(model)), tmp_path / "whole")
    torch.manual_seed(11)
    train(model, whole, range(6), plain)
    whole.close()
    twin = tied_model().to(place)
    first = offloaded(twin, adamw(groups_of(twin)), tmp_path / "cut")
    torch.manual_seed(11)
    train(twin, first, range(3), plain)
    with contextlib.suppress(ZeroDivisionError), first:
        backward(twin, 3)  # begun, and never ended
        raise ZeroDivisionError
    other = tied_model().to(place)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.0 - parameter.requires_grad)  # frozen ones are the user's to bring
    again = offloaded(other, adamw(groups_of(other)), tmp_path / "cut")
    assert again.steps == 3
    train(other, again, range(3, 6), plain)
    again.close()
    assert weights_equal(model, other)


def test_what_fits_stays_on_the_device(place: str) -> None:
    model = images_model().to(place)
    optimizer = adamw(groups_of(model))
    assert offload_training(model, optimizer, memory="1GB")[1] is optimizer
    assert not isinstance(optimizer, OffloadedOptimizer)
