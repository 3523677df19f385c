"""Loops beside the usual ones: they take the steps that they take in memory, bit by bit, or one line refuses them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import images_model, offloaded, plain, train, weights_equal
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hapi.errors import UsageError
from hapi.offload.loop import values
from hapi.offload.training import offload_training

STEPS, LATE = 9, 6
Loop = Callable[[Any, Any, int], Any]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


class Listed(nn.Module):
    """Parameters in a list, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(9, 40) / 3, torch.randn(40, 3) / 6])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (rows @ self.weights[0]).tanh() @ self.weights[1]
        return found


class Borrows(nn.Module):
    """Reads the weights of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(9, 40)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.inner.weight, self.inner.bias)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def normed() -> nn.Module:
    """Weights that a hook of the module sets before each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(9, 40)), nn.Tanh(), nn.Linear(40, 3))


def inputs(step: int) -> torch.Tensor:
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    found: torch.Tensor = model(inputs(step)).tanh().square().mean()
    return found


def usual(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss(model, step).backward()
    optimizer.step()


def late_pass(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss(model, step).backward()
    if step >= LATE:
        loss(model, step + 100).backward()
    optimizer.step()


def validated(model: nn.Module, optimizer: Any, step: int) -> float:
    optimizer.zero_grad()
    loss(model, step).backward()
    with torch.inference_mode():
        found = loss(model, 99).item()
    optimizer.step()
    return found


def carried(model: nn.Module, optimizer: Any, step: int) -> None:
    """Gradients are added up over steps."""
    loss(model, step).backward()
    optimizer.step()
    if step % 3 == 2:
        model.zero_grad()


def adversarial(model: nn.Module, optimizer: Any, step: int) -> None:
    """A critic's step, and then a generator's loss, which gives the critic gradients that it never uses."""
    for part in range(2):
        optimizer.zero_grad()
        loss(model, 2 * step + part).backward()
        optimizer.step()
    (-model(inputs(500 + step).requires_grad_()).mean()).backward()


class Experts(nn.Module):
    """Layers of which each step uses others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(9, 40)
        self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        found: torch.Tensor = self.experts[int(rows.detach().sum().abs() * 10) % 3](rows)
        return found


def clipped_graph(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss(model, step).backward(create_graph=True)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    """Hooks of a step clip before, and shrink after."""
    optimizer = adamw(model)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def shrink(*_: object) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(shrink)
    return optimizer


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer], Loop]] = {
    "hooks of the optimizer": (layers, hooked, usual),
    "list, late pass": (Listed, adamw, late_pass),
    "borrowed, late pass": (Borrows, adamw, late_pass),
    "hook, late pass": (normed, adamw, late_pass),
    "list, validated": (Listed, adamw, validated),
    "hook, validated": (normed, adamw, validated),
    "gradients carried": (layers, adamw, carried),
    "adversarial": (layers, adamw, adversarial),
    "experts": (Experts, adamw, usual),
    "graph clipped": (layers, adamw, clipped_graph),
}


@pytest.mark.parametrize("keeps", [True, None])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore")
def test_loops_are_exact(name: str, keeps: bool | None, tmp_path: Path) -> None:
    make, kind, loop = LOOPS[name]
    if loop is late_pass and keeps is None:
        pytest.skip("told by one line, as in test_late_surprises")
    model, twin = make(), make()
    optimizer = kind(model)
    expected = [loop(model, optimizer, step) for step in range(STEPS)]
    with offloaded(twin, kind(twin), tmp_path, keep_gradients=keeps) as moved:
        found = [loop(twin, moved, step) for step in range(STEPS)]
        assert weights_equal(model, twin)
    assert found == expected


def test_a_hook_that_its_user_removes_is_gone(tmp_path: Path) -> None:
    model = layers()
    optimizer, calls = adamw(model), []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with offloaded(model, optimizer, tmp_path) as moved:
        train(model, moved, range(2), usual)
        handle.remove()
        train(model, moved, range(2, 4), usual)
    assert len(calls) == 2


def test_the_end_leaves_the_values_of_the_last_step(tmp_path: Path) -> None:
    """A critic's last gradients are never used."""
    model, twin = layers(), layers()
    train(model, adamw(model), range(STEPS), adversarial)
    moved = offloaded(twin, adamw(twin), tmp_path)
    train(twin, moved, range(STEPS), adversarial)
    moved.close()
    assert weights_equal(model, twin)


def change_parts(one: torch.Tensor, other: torch.Tensor) -> None:
    one[3, 2] = 0.5
    other[30:31] = 0.25


@pytest.mark.parametrize("half", [False, True])
def test_a_late_change_of_some_values_that_no_version_tells_is_never_lost(
    half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the step is computed as expected it counts; where it has to be undone one line says so."""
    monkeypatch.setattr(values, "_SAMPLE", 1)

    def loop(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        kind = next(model.parameters()).dtype
        model(inputs(step).to(kind)).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if step == clips_at else 1e9)
        optimizer.step()
        if step == LATE:
            if model is known:
                with torch.no_grad():
                    change_parts(model[0].weight, model[2].weight)
            else:
                change_parts(model[0].weight.data, model[2].weight.data)

    clips_at = -1
    known, twin = (layers().bfloat16() if half else layers() for _ in range(2))
    with (
        offloaded(known, adamw(known), tmp_path / "one", keep_gradients=True) as told,
        offloaded(twin, adamw(twin), tmp_path / "two", keep_gradients=True) as moved,
    ):
        train(known, told, range(STEPS), loop)
        train(twin, moved, range(STEPS), loop)
        assert weights_equal(known, twin)
    clips_at = LATE + 1
    last = layers().bfloat16() if half else layers()
    with (
        offloaded(last, adamw(last), tmp_path / "three", keep_gradients=True) as moved,
        pytest.raises(UsageError, match=r"was changed through \.data before a step"),
    ):
        train(last, moved, range(STEPS), loop)


def test_memory_formats_are_those_of_the_beginning(tmp_path: Path) -> None:
    """The order of values in memory is that of the states."""
    model: Any = images_model()
    model.to(memory_format=torch.contiguous_format)
    moved = offloaded(model, adamw(model), tmp_path)
    train(model, moved, range(3), plain)
    model.to(memory_format=torch.channels_last)
    with pytest.raises(UsageError, match=r"0\.weight is .* with strides .* change a model before"):
        train(model, moved, range(3, 4), plain)
    moved.close(remove=False)
    other = images_model()
    with pytest.raises(UsageError, match="holds the states of another job"):
        offloaded(other, adamw(other), tmp_path)


class SharesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 9), nn.Linear(9, 9)
        self.last.weight.data = self.first.weight.data


def twice(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.parameters(), next(model.parameters())])


def wrapping() -> nn.Module:
    """A parameter that keeps its values in two halves."""
    model = nn.Module()
    model.weight = nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3)))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "kind", "line"),
    [
        (SharesMemory, adamw, r"first\.weight and last\.weight are two parameters in the same memory|last\.weight and"),
        (layers, twice, r"0\.weight and 0\.weight are two parameters in the same memory"),
        (wrapping, adamw, "weight is a TwoTensor, whose values lie in other tensors"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), adamw, "parameters of a lazy layer.*run the model once"),
        (layers, lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS cannot be offloaded"),
    ],
    ids=["shared", "twice", "wrapped", "lazy", "LBFGS"],
)  # fmt: skip
def test_parameters_that_cannot_be_exact_are_refused(
    make: Callable[[], nn.Module],
    kind: Callable[[nn.Module], torch.optim.Optimizer],
    line: str,
    tmp_path: Path,
) -> None:
    model = make()
    with pytest.raises(UsageError, match=line) as raised:
        offload_training(model, kind(model), "1B", tmp_path)
    assert "\n" not in str(raised.value)


def take_out(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"] = groups[0]["params"][:2]


def put_in(groups: list[dict[str, Any]]) -> None:
    groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(3))]})


@pytest.mark.parametrize("act", [take_out, put_in])
def test_groups_keep_their_parameters(act: Callable[[list[dict[str, Any]]], None], tmp_path: Path) -> None:
    model = layers()
    with offloaded(model, adamw(model), tmp_path) as moved:
        train(model, moved, range(5), usual)
        act(moved.param_groups)
        with pytest.raises(UsageError, match="are not those of the beginning"):
            train(model, moved, range(5, 6), usual)


def test_averages_of_weights_in_the_model_are_told_to_be_lost_by_a_kill(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in momentum contrast: a teacher follows, which the optimizer does not train."""
    model = nn.ModuleDict({"student": layers(), "teacher": layers().requires_grad_(False)})

    def loop(model: Any, optimizer: Any, step: int) -> None:
        usual(model["student"], optimizer, step)
        for one, other in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
            one.data.lerp_(other.data, 0.1)

    with offloaded(model, adamw(model["student"]), tmp_path) as moved:
        train(model, moved, range(4), loop)
    said = [record.message for record in caplog.records if "not trained by this optimizer" in record.message]
    assert len(said) == 1 and said[0].startswith("teacher.0.weight changes")
    caplog.clear()
    halves = nn.ModuleDict({"one": layers(), "two": layers()})
    with (
        offloaded(halves, adamw(halves["one"]), tmp_path / "one") as first,
        offloaded(halves, adamw(halves["two"]), tmp_path / "two") as second,
    ):
        for step in range(4):
            usual(halves["one"], first, step)
            usual(halves["two"], second, step)
    assert not [record for record in caplog.records if "not trained by this" in record.message]


def test_gradients_of_steps_before_are_told_to_be_lost_by_a_kill(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = layers()
    with offloaded(model, adamw(model), tmp_path) as moved:
        train(model, moved, range(5), carried)
    assert sum("gradients of steps before, which a kill loses" in r.message for r in caplog.records) == 1


def test_a_copy_of_a_model_in_training_trains_by_itself(tmp_path: Path) -> None:
    model = layers()
    with offloaded(model, adamw(model), tmp_path) as moved:
        train(model, moved, range(5), usual)
        twin = copy.deepcopy(model)
        optimizer = adamw(twin)
        train(twin, optimizer, range(5, 7), usual)
        train(model, moved, range(5, 7), usual)
        assert moved.report()["steps"] == 7
