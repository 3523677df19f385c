"""``optimizer.state`` and ``state_dict()`` give the states as in memory, and changes of them count."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import images_model, offloaded, plain, states_equal, train, weights_equal
from torch import nn

from hapi.errors import UsageError
from hapi.offload.states.base import Commit
from hapi.offload.states.commit_file import CommitFile

STEPS = 9
Act = Callable[[Any, Any], Any]


def clear(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def replace(model: Any, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def forget_one(model: Any, optimizer: Any) -> None:
    del optimizer.state[model[0].weight]


def empty_one(model: Any, optimizer: Any) -> None:
    optimizer.state[model[0].weight] = {}


def change(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].data.mul_(0.5)


def reset_rows(model: Any, optimizer: Any) -> None:
    """Dead neurons begin anew."""
    with torch.no_grad():
        model[4].weight[3:6] = 0.01
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[model[4].weight][name][3:6] = 0


def change_by_data(model: Any, optimizer: Any) -> None:
    optimizer.state[model[0].weight]["exp_avg"].data[2] = 0.5


def change_packed(model: Any, optimizer: Any) -> None:
    for state in optimizer.state_dict()["state"].values():
        state["exp_avg"].zero_()


def load_changed(model: Any, optimizer: Any) -> None:
    packed = optimizer.state_dict()
    for state in packed["state"].values():
        state["exp_avg"].zero_()
    optimizer.load_state_dict(packed)


def load_as_it_is(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def move(model: Any, optimizer: Any) -> None:
    """As Lightning does before it trains."""
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = {name: value.to("cpu") for name, value in state.items()}


def read(model: Any, optimizer: Any) -> list[float]:
    assert len(optimizer.state) == len(list(model.parameters()))
    return [float(state["exp_avg"].norm()) for state in optimizer.state.values()]


ACTS: list[Act] = [
    clear, replace, forget_one, empty_one, change, reset_rows, change_by_data, change_packed, load_changed,
    load_as_it_is, move, read,
]  # fmt: skip


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_what_a_loop_does_to_states_counts(act: Act, between: bool, tmp_path: Path) -> None:
    """After a step, and between backward and step."""

    def loop(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        inputs = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        if between and step in (2, 6):
            seen.append(act(model, optimizer))
        optimizer.step()
        if not between and step in (2, 6):
            seen.append(act(model, optimizer))

    seen: list[Any] = []
    model, twin = images_model(), images_model()
    optimizer = adamw(model)
    train(model, optimizer, range(STEPS), loop)
    expected, seen = seen, []
    with offloaded(twin, adamw(twin), tmp_path, keep_gradients=True) as moved:
        train(twin, moved, range(STEPS), loop)
        assert weights_equal(model, twin)
        assert states_equal(optimizer.state_dict(), moved.state_dict())
        assert moved.steps == STEPS
    assert seen == expected


def test_a_reset_survives_a_kill(tmp_path: Path) -> None:
    def loop(model: Any, optimizer: Any, step: int) -> None:
        plain(model, optimizer, step)
        if step == 3:
            clear(model, optimizer)

    model, twin, again = images_model(), images_model(), images_model()
    train(model, adamw(model), range(STEPS), loop)
    moved = offloaded(twin, adamw(twin), tmp_path)
    train(twin, moved, range(5), loop)
    moved.close(remove=False)
    with offloaded(again, adamw(again), tmp_path) as found:
        assert found.steps == 5
        train(again, found, range(5, STEPS), loop)
        assert weights_equal(model, again)


def test_momentum_is_reset_too(tmp_path: Path) -> None:
    def loop(model: Any, optimizer: Any, step: int) -> None:
        plain(model, optimizer, step)
        if step == 4:
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.5)

    model, twin = images_model(), images_model()
    made = [torch.optim.SGD(one.parameters(), lr=1e-2, momentum=0.9) for one in (model, twin)]
    train(model, made[0], range(STEPS), loop)
    with offloaded(twin, made[1], tmp_path) as moved:
        train(twin, moved, range(STEPS), loop)
        assert weights_equal(model, twin)


@pytest.mark.parametrize("act", ["change", "load"])
def test_states_of_steps_before_are_refused(act: str, tmp_path: Path) -> None:
    """In memory they would be the present ones: a loop that holds them without a copy holds no snapshot."""
    model = images_model()
    with offloaded(model, adamw(model), tmp_path) as moved:
        train(model, moved, range(3), plain)
        held = moved.state_dict()
        train(model, moved, range(3, 5), plain)
        with pytest.raises(UsageError, match="anew, or keep a copy"):
            if act == "load":
                moved.load_state_dict(held)
            held["state"][0]["exp_avg"].zero_()
            train(model, moved, range(5, 6), plain)


def test_a_checkpoint_of_torch_takes_no_step(tmp_path: Path) -> None:
    """It takes one with zeros where an optimizer seems to have no states."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def loop(model: Any, optimizer: Any, step: int) -> None:
        plain(model, optimizer, step)
        optimizer.zero_grad()
        if step in (2, 6):
            get_optimizer_state_dict(model, optimizer)

    model, twin = images_model(), images_model()
    train(model, adamw(model), range(STEPS), loop)
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        train(twin, moved, range(STEPS), loop)
        assert weights_equal(model, twin)
        assert moved.steps == STEPS


def test_states_go_by_the_order_of_parameters_whatever_they_are_called(tmp_path: Path) -> None:
    """Checkpoints of torch name them, as ``torch.distributed.checkpoint`` does; hooks may change what is loaded."""

    def loop(model: Any, optimizer: Any, step: int) -> None:
        if step == 4:
            packed = copy.deepcopy(optimizer.state_dict())
            names = [name for name, _ in model.named_parameters()]
            packed["state"] = {names[number]: state for number, state in packed["state"].items()}
            packed["param_groups"][0]["params"] = names
            handle = optimizer.register_load_state_dict_pre_hook(halve)
            optimizer.load_state_dict(packed)
            handle.remove()
        plain(model, optimizer, step)

    def halve(optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
        calls.append(1)
        for state in packed["state"].values():
            state["exp_avg"].mul_(0.5)
        return packed

    calls: list[int] = []
    model, twin = images_model(), images_model()
    train(model, adamw(model), range(STEPS), loop)
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        train(twin, moved, range(STEPS), loop)
        assert weights_equal(model, twin)
    assert len(calls) == 2


def test_of_two_commits_of_a_step_the_newer_one_counts(tmp_path: Path) -> None:
    """States that were changed after a step are committed with its number."""
    with (tmp_path / "commit").open("w+b") as file:
        commits = CommitFile(file.fileno(), 1, 1, 4)
        for number in (1, 2):
            commits.write(Commit(number, 7, bytes([number % 2]), (7,), b"text"))
        again = CommitFile(file.fileno(), 1, 1, 4)
        assert again.go_back(7) and again.newest is not None and again.newest.number == 2
