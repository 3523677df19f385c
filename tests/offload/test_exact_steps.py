"""Offloaded steps are the steps in memory, bit by bit, whatever a loop does."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.host_updates import UpdatedOnHost
from support.offload_loops import (
    Loop,
    accumulated,
    backward,
    clipped,
    disorderly,
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
from torch.utils._python_dispatch import TorchDispatchMode

from hapi.errors import UsageError
from hapi.offload.engine import Engine
from hapi.offload.optimizer import OffloadedOptimizer
from hapi.offload.states.disk import DiskStates
from hapi.offload.training import offload_training
from hapi.offload.updates import ADAM_ELEMENTS, CACHED_ELEMENTS, PlainAdam

ADAMW: dict[str, Any] = {"lr": 1e-2}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "adam-amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adamw-foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True, maximize=True),
    "adamw-tensor-rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2)),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
}


def both(
    make: Callable[[], nn.Module], kind: str, loop: Loop, steps: int, disk: Any, **more: Any
) -> tuple[nn.Module, Any, nn.Module, Any]:
    """Train in memory and offloaded; return both models and optimisers."""
    model, twin = make(), make()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    moved = offloaded(twin, OPTIMIZERS[kind](groups_of(twin)), disk, **more)
    torch.manual_seed(11)
    train(model, optimizer, range(steps), loop)
    torch.manual_seed(11)
    train(twin, moved, range(steps), loop)
    return model, optimizer, twin, moved


@pytest.mark.slow_cases("accumulated-naive-images_model", "accumulated-serial-tied_model")
@pytest.mark.parametrize(
    ("mode", "make"),
    [
        ("active", tied_model),
        ("naive", images_model),
        ("serial", tied_model),
        *(pytest.param(mode, make, marks=pytest.mark.slow) for mode, make in (
            ("active", images_model), ("naive", tied_model), ("serial", images_model),
        )),
    ],
)  # fmt: skip
@pytest.mark.parametrize("loop", [plain, clipped, accumulated])
def test_steps_are_equal(make: Callable[[], nn.Module], loop: Loop, mode: str, tmp_path: Path) -> None:
    model, optimizer, twin, moved = both(make, "adamw", loop, 10, [tmp_path / "a", tmp_path / "b"], mode=mode)
    with moved:
        assert weights_equal(model, twin)
        assert states_equal(optimizer.state_dict(), moved.state_dict())
        report = moved.report()
    assert report["steps"] == 10
    if mode != "serial" and loop is plain:
        assert report["speculated_pieces"] > 0.8 * report["pieces"]
    assert not any(tmp_path.glob("*/*")), "files are removed at the end"


@pytest.mark.slow
def test_windows_are_computed_ahead_in_their_last_pass_and_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[bool] = []
    is_asked = False
    read, submit, expect = DiskStates.read, Engine.submit, Engine.expect

    def counted(self: DiskStates, *of: Any) -> None:
        reads.append(is_asked)
        read(self, *of)

    def submitted(self: Engine, pieces: Any) -> None:
        nonlocal is_asked
        is_asked = True
        submit(self, pieces)

    def expected(self: Engine, pieces: Any) -> None:
        nonlocal is_asked
        is_asked = False
        expect(self, pieces)

    def window(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        for part in range(4):
            if part == 3 and step > 4 and isinstance(optimizer, OffloadedOptimizer):
                wait_until(lambda: reads[-1] is False)
            backward(model, 10 * step + part)
        optimizer.step()

    monkeypatch.setattr(DiskStates, "read", counted)
    monkeypatch.setattr(Engine, "submit", submitted)
    monkeypatch.setattr(Engine, "expect", expected)
    model, _, twin, moved = both(tied_model, "adamw", window, 12, [tmp_path / "a", tmp_path / "b"])
    with moved:
        assert weights_equal(model, twin)
        assert moved.report()["speculated_pieces"] > 0.8 * moved.report()["pieces"]


def wait_until(is_so: Callable[[], bool], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "nothing is read ahead"
        time.sleep(0.001)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_are_equal(kind: str, tmp_path: Path) -> None:
    model, optimizer, twin, moved = both(tied_model, kind, plain, 8, tmp_path)
    with moved:
        assert weights_equal(model, twin)
        assert states_equal(optimizer.state_dict(), moved.state_dict())


@pytest.mark.slow_except("tied_model-host")
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "host"])
@pytest.mark.parametrize("make", [tied_model, pytest.param(images_model, marks=pytest.mark.slow)])
def test_fifty_steps_of_a_disorderly_loop_are_equal(
    make: Callable[[], nn.Module], disk: bool, tmp_path: Path
) -> None:
    where = tmp_path if disk else None
    model, optimizer, twin, moved = both(make, "adamw", disorderly, 50, where, keep_gradients=True)
    with moved:
        assert moved.report()["redone_steps"] + moved.report()["restored_steps"] > 1
        assert weights_equal(model, twin)
        assert states_equal(optimizer.state_dict(), moved.state_dict())


def test_gradients_in_memory_where_it_is_large_enough(tmp_path: Path) -> None:
    model, _, twin, moved = both(tied_model, "adamw", clipped, 9, tmp_path, memory="120KB")
    with moved:
        assert not any(tmp_path.rglob("gradients")) or not next(tmp_path.rglob("gradients")).stat().st_size
        assert weights_equal(model, twin)


class Operators(TorchDispatchMode):
    """Counts operators, the elements that are copied, and the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.copied = self.largest = 0
        self.roots: list[int] = []
        """Places of the roots that an update takes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        if func is torch.ops.aten.copy_.default:
            self.copied += result.numel()
        elif func in (torch.ops.aten.sqrt.default, torch.ops.aten.div.Scalar, torch.ops.aten.div.Tensor):
            self.largest = max(self.largest, result.nbytes)
        elif func is torch.ops.aten.sqrt.out:
            self.roots.append(result.data_ptr())
        return result


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("is_plain", [True, False])
def test_an_update_copies_each_value_once_and_threads_share_few_operators(
    threads: int, is_plain: bool
) -> None:
    model = nn.Linear(500, 400)
    adamw = torch.optim.AdamW(model.parameters(), amsgrad=not is_plain)
    _, moved = offload_training(model, adamw, "1KB", mode="serial", activations="keep")
    for _ in range(3):
        model(torch.ones(2, 500)).sum().backward()
        with Operators() as counted:
            moved.step()
        moved.zero_grad()
    assert isinstance(moved, OffloadedOptimizer)
    moved.close()
    assert counted.copied == sum(parameter.numel() for parameter in model.parameters())
    if is_plain:
        assert counted.largest == 0, "nothing of a parameter's size is made"
        assert len(counted.roots) == 2 and len(set(counted.roots)) == 1
    elif threads == 1:
        assert 0 < counted.largest <= 4 * CACHED_ELEMENTS < 256 << 10
    assert threads == 1 or counted.operators < 100, "131 where parts are small"


@pytest.mark.slow_cases("2-526788-Adam", "2-526788-AdamW")
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("elements", [1, 63, 2 * ADAM_ELEMENTS + 2500])
def test_plain_steps_in_parts_are_torchs(kind: type[torch.optim.Adam], elements: int, threads: int) -> None:
    parameter = nn.Parameter(torch.randn(elements))
    decay = {"weight_decay": 0.3} if kind is torch.optim.AdamW else {}
    optimizer = kind([parameter], lr=3e-3, betas=(0.8, 0.97), eps=1e-7, **decay)
    ours, values = PlainAdam(kind), parameter.detach().clone()
    assert ours.takes(optimizer.param_groups[0])
    record = torch.empty(2 * elements).fill_(torch.nan)  # what lay there does not count
    states, copies = record.split(elements), (torch.empty(elements), torch.empty(elements).bfloat16())
    for steps in range(4):
        parameter.grad = torch.randn(elements) * 10.0 ** (3 - 4 * steps)
        optimizer.step()
        with torch.no_grad():
            left = ours.step(values, parameter.grad, states, optimizer.param_groups[0], steps, copies)
        assert not left
        kept = optimizer.state[parameter]
        for one, other in zip(
            (parameter, kept["exp_avg"], kept["exp_avg_sq"]), (values, *states), strict=True
        ):
            assert torch.equal(one, other)
        assert torch.equal(copies[0], values) and torch.equal(copies[1], values.bfloat16())


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"maximize": True},
        {"foreach": True},
        {"fused": True},
        {"lr": torch.tensor(1e-2)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.999))},
        {"weight_decay": 0.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_torch_computes_otherwise_is_left_to_it(options: dict[str, Any]) -> None:
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(1))], **options)
    assert not PlainAdam(torch.optim.Adam).takes(adam.param_groups[0])
    assert not PlainAdam(torch.optim.SGD).takes({})


@pytest.mark.slow_except("plain")
@pytest.mark.parametrize("loop", [plain, clipped, accumulated])
def test_half_precision_has_masters_in_fp32(loop: Loop, tmp_path: Path) -> None:
    model, twin = images_model().bfloat16(), images_model().bfloat16()
    moved = offloaded(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), tmp_path)
    reference = UpdatedOnHost([{"params": list(model.parameters())}], OPTIMIZERS["adamw"])
    train(model, reference, range(12), loop)
    train(twin, moved, range(12), loop)
    with moved:
        assert weights_equal(model, twin)
        states = moved.state_dict()["state"]
        assert all(torch.equal(states[i]["master"], master) for i, master in enumerate(reference.masters))


def test_a_gradient_scaler_works_and_a_skipped_step_is_skipped(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        scaler = scalers[id(model)]
        optimizer.zero_grad()
        inputs = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean() * (float("inf") if step in (4, 7) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()

    model, twin = images_model(), images_model()
    scalers = {id(one): torch.amp.GradScaler("cpu", init_scale=8.0) for one in (model, twin)}
    optimizer = torch.optim.AdamW(model.parameters())
    moved = offloaded(twin, torch.optim.AdamW(twin.parameters()), tmp_path)
    train(model, optimizer, range(12), loop)
    train(twin, moved, range(12), loop)
    with moved:
        assert weights_equal(model, twin)
        assert scalers[id(model)].state_dict() == scalers[id(twin)].state_dict()
        assert moved.steps == 10


def test_states_go_to_an_optimizer_in_memory_and_back(tmp_path: Path) -> None:
    model, optimizer, twin, moved = both(tied_model, "adamw", plain, 5, tmp_path / "one")
    third = tied_model()
    third.load_state_dict(twin.state_dict())
    other = offloaded(third, OPTIMIZERS["adamw"](groups_of(third)), tmp_path / "two")
    other.load_state_dict(moved.state_dict())
    moved.close()
    fourth = tied_model()
    fourth.load_state_dict(model.state_dict())
    started = OPTIMIZERS["adamw"](groups_of(fourth))
    started.load_state_dict(optimizer.state_dict())
    taken = offloaded(fourth, started, tmp_path / "three")
    for one, its in ((model, optimizer), (third, other), (fourth, taken)):
        torch.manual_seed(5)
        train(one, its, range(5, 10), plain)
    with other, taken:
        assert weights_equal(model, third)
        assert weights_equal(model, fourth)
        assert states_equal(optimizer.state_dict(), other.state_dict())


def test_schedulers_follow_the_same_groups(tmp_path: Path) -> None:
    model, twin = images_model(), images_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inner = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    before = torch.optim.lr_scheduler.StepLR(inner, 2)
    moved = offloaded(twin, inner, tmp_path)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(6):
        plain(model, optimizer, step)
        scheduler.step()
        plain(twin, moved, step)
        before.step()
    with moved:
        assert weights_equal(model, twin)
        assert moved.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 1e-4


def test_checkpointed_layers_are_computed_with_the_values_before_the_step(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        inputs = torch.randn(4, 20, generator=torch.Generator().manual_seed(step))
        for layer in model:  # type: ignore[attr-defined]
            inputs = torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=False)
        inputs.square().mean().backward()
        optimizer.step()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(5)])

    model, twin = make(), make()
    optimizer = torch.optim.AdamW(model.parameters())
    with offloaded(twin, torch.optim.AdamW(twin.parameters()), tmp_path) as moved:
        train(model, optimizer, range(8), loop)
        train(twin, moved, range(8), loop)
        assert weights_equal(model, twin)
        assert not moved.report()["restored_steps"]


@pytest.mark.slow_except("clipped-swap")
@pytest.mark.parametrize(
    ("loop", "activations"),
    [
        (clipped, "swap"),
        (accumulated, "auto"),
        (clipped, "recompute"),
        *(pytest.param(loop, activations, marks=pytest.mark.slow) for loop, activations in (
            (clipped, "auto"), (accumulated, "swap"), (accumulated, "recompute"),
        )),
    ],
)  # fmt: skip
def test_states_and_activations_go_together(
    loop: Loop, activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hapi.offload.training._LEAST_BYTES", 1 << 16)
    model, optimizer, twin, moved = both(images_model, "adamw", loop, 9, tmp_path, activations=activations)
    with moved:
        assert weights_equal(model, twin)
        assert states_equal(optimizer.state_dict(), moved.state_dict())
        report = moved.report()["activations"]
    assert report["state"] == "planned"
    assert report["bytes_written"] or activations == "recompute"


def test_what_fits_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = images_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with caplog.at_level("INFO", "hapi.offload"):
        assert offload_training(model, optimizer, memory="1GB") == (model, optimizer)
    assert "states stay in memory" in caplog.text


def test_a_loop_for_offloaded_states_runs_where_all_fits_too(tmp_path: Path) -> None:
    model = images_model()
    moved = offloaded(model, torch.optim.AdamW(model.parameters()), tmp_path)
    names = moved.report().keys()
    moved.close()
    for _ in range(2):
        _, optimizer = offload_training(model, torch.optim.AdamW(model.parameters()), memory="1GB")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(optimizer.steps):  # type: ignore[attr-defined]
            scheduler.step()
        for step in range(optimizer.steps, 4):  # type: ignore[attr-defined]
            plain(model, optimizer, step)
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
        report = optimizer.report()  # type: ignore[attr-defined]
        assert report.keys() == names and report["where"] == "memory" and report["bytes_read"] == 0
        assert report["activations"]["bytes_written"] == 0
        optimizer.close(remove=False)  # type: ignore[attr-defined]
        torch.optim.AdamW(model.parameters()).load_state_dict(copy.deepcopy(optimizer).state_dict())


def test_a_parameter_that_is_changed_between_backward_and_step_is_named(tmp_path: Path) -> None:
    model = images_model()
    moved = offloaded(model, torch.optim.AdamW(model.parameters()), tmp_path)
    train(model, moved, range(4), plain)
    moved.zero_grad()
    backward(model, 5)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # as code does that Python does not see
        next(iter(model[6].parameters())).mul_(2)  # type: ignore[index]
    with pytest.raises(UsageError, match=r"6\.weight was changed in place between backward and step"):
        moved.step()
    moved.close()
