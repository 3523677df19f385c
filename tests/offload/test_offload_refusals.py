"""Uses of hapi.offload_training that go wrong: one clear line each, or they work."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import backward, batch, images_model, offloaded, plain, train, weights_equal
from torch import nn

import hapi
from hapi.errors import UsageError
from hapi.offload.activations.offload import ActivationOffload
from hapi.offload.loop.gradients import OffloadedGradient
from hapi.offload.optimizer import OffloadedOptimizer


def adamw(model: nn.Module, **more: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **more)


@pytest.fixture
def moved(tmp_path: Path) -> Any:
    """A small model whose states are on a disk, after five steps."""
    model = images_model()
    with offloaded(model, adamw(model), tmp_path) as optimizer:
        train(model, optimizer, range(5), plain)
        yield model, optimizer


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"memory": -1}, "memory: -1 is negative"),
        ({"memory": "much"}, "memory: cannot read"),
        ({"memory": [1]}, "memory: expected something like"),
        ({"disk": 7}, "disk=7: name a folder"),
        ({"disk": "/proc/nothing"}, "/proc/nothing: .*; name a folder that can be written"),
        ({"disk": __file__}, "Not a directory; name a folder|File exists; name a folder"),
        ({"mode": "fast"}, "mode='fast': take one of active"),
        ({"activations": None}, "activations=None: take one of"),
        ({"keep_gradients": "no"}, "keep_gradients='no': give True, False"),
    ],
)
def test_arguments_are_refused_in_one_line(options: dict[str, Any], line: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UsageError, match=line) as raised:
        hapi.offload_training(model, adamw(model), **{"memory": 10, **options})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: (nn.Linear(3, 3), "adamw"), "str cannot be offloaded: take one of torch's"),
        (lambda: (nn.Linear(3, 3), None), "NoneType cannot be offloaded"),
        (lambda: (None, adamw(nn.Linear(3, 3))), "model: expected a torch.nn.Module"),
        (lambda: with_(torch.optim.RMSprop), "RMSprop cannot be offloaded"),
        (lambda: with_(torch.optim.Adam, capturable=True), "capturable=True cannot be offloaded"),
        (lambda: with_(torch.optim.AdamW, dtype=torch.float64), "is float64: .* float32"),
        (lambda: with_(torch.optim.AdamW, device="meta"), "is on the device meta"),
        (lambda: scripted(nn.Linear(3, 3)), "the model is a ScriptModule: give .* the module that"),
        (lambda: scripted(nn.Sequential(nn.Linear(3, 3))), "the layer 0 is a ScriptModule"),
    ],
)
def test_models_and_optimizers_are_refused_in_one_line(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        hapi.offload_training(*make(), memory=10)


def scripted(model: nn.Module) -> tuple[nn.Module, Any]:
    if isinstance(model, nn.Sequential):
        model[0] = torch.jit.script(model[0])
        return model, adamw(model)
    made: Any = torch.jit.script(model)
    return made, adamw(made)


def with_(kind: Any, *, capturable: bool = False, **more: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 3, **more)
    return model, kind(model.parameters(), **({"capturable": True} if capturable else {}))


def test_copies_and_pickles_are_refused(moved: tuple[nn.Module, OffloadedOptimizer]) -> None:
    model, optimizer = moved
    for act in (copy.deepcopy, copy.copy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
        with pytest.raises(UsageError, match=r"is not copied or pickled.*save its state_dict\(\)"):
            act(optimizer)
    with pytest.raises(UsageError, match=r"not pickled whole: save its state_dict\(\)"):
        torch.save(model, io.BytesIO())
    with ActivationOffload(nn.Sequential(nn.Linear(2, 2)), 1 << 20) as offload:
        with pytest.raises(UsageError, match="not pickled whole"):
            pickle.dumps(offload._model)
        copy.deepcopy(offload._model)(torch.ones(2)).sum().backward()


def test_a_copied_model_is_free_of_the_training(moved: tuple[nn.Module, OffloadedOptimizer]) -> None:
    """Averages of weights are kept in copies, which are used between backward and step too."""
    model, optimizer = moved
    copied = copy.deepcopy(model)
    optimizer.zero_grad()
    backward(model, 5)
    copied(torch.randn(2, 3, 8, 8)).sum().backward()
    assert not any(isinstance(parameter.grad, OffloadedGradient) for parameter in copied.parameters())
    assert optimizer.report()["restored_steps"] == 0


def test_parameters_are_those_of_the_beginning(moved: tuple[nn.Module, OffloadedOptimizer]) -> None:
    model, optimizer = moved
    with pytest.raises(UsageError, match="takes no further parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1
    optimizer.zero_grad()
    model.bfloat16()
    with pytest.raises(UsageError, match=r"0\.weight is .* in torch.bfloat16 on cpu now, and was .*float32"):
        optimizer.step()


def test_the_optimizer_that_was_handed_over_is_not_used(tmp_path: Path) -> None:
    model = images_model()
    optimizer = adamw(model)
    with offloaded(model, optimizer, tmp_path / "one"):
        backward(model, 0)
        with pytest.raises(
            UsageError, match=r"handed over to hapi\.offload_training: use the one that it returned"
        ):
            optimizer.step()
        with pytest.raises(
            UsageError, match=r"is trained by another offloaded optimizer: close\(\) that one first"
        ):
            offloaded(model, adamw(model), tmp_path / "two")
    assert not (tmp_path / "two").exists()
    with offloaded(model, adamw(model), tmp_path / "two") as third:
        train(model, third, range(2), plain)


class Broken(RuntimeError):
    """An error in the middle of backward."""


@pytest.mark.parametrize(
    ("way", "layer"),
    [("model.zero_grad()", 4), ("optimizer.zero_grad()", 4), ("optimizer.zero_grad()", 6), ("no zeros", 4)],
)
def test_a_loop_goes_on_after_an_error_in_backward(way: str, layer: int, tmp_path: Path) -> None:
    """A pass that an error cut short leaves what it leaves in memory too; files are removed at a good end."""

    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        if way == "model.zero_grad()":
            model.zero_grad()
        elif way == "optimizer.zero_grad()" or step % 2:
            optimizer.zero_grad()
        if step == 5:
            handle = model[layer].register_full_backward_hook(fail)  # type: ignore[index]
            with pytest.raises(Broken):
                backward(model, step)
            handle.remove()
            return
        backward(model, step)
        optimizer.step()

    def fail(*_: object) -> None:
        raise Broken

    model, twin = images_model(), images_model()
    optimizer, inner = adamw(model), adamw(twin)
    train(model, optimizer, range(9), loop)
    moved = offloaded(twin, inner, tmp_path, keep_gradients=True)
    train(twin, moved, range(9), loop)
    assert weights_equal(model, twin)
    moved.close()
    assert not any(tmp_path.iterdir())


def test_an_error_that_was_caught_leaves_no_files(
    moved: tuple[nn.Module, OffloadedOptimizer], tmp_path: Path
) -> None:
    model, optimizer = moved
    with pytest.raises((UsageError, ValueError)):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    train(model, optimizer, range(5, 7), plain)
    optimizer.close()
    assert not any(tmp_path.iterdir())


def test_gradients_that_cannot_be_used_before_the_step_leave_the_memory(tmp_path: Path) -> None:
    """A loop that changes biases within the pass: nothing of them can be computed ahead."""

    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        inputs, labels = batch(model, step)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        biases = [layer.bias for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        with torch.no_grad():
            for bias in biases:
                bias.mul_(0.99)  # type: ignore[union-attr]
        loss.backward()
        if optimizer is moved and step > 4:
            changed = [known for known in moved._parameters if any(known.parameter is one for one in biases)]
            assert len(changed) == 3 and not any(known.bytes_in_memory for known in changed)
        optimizer.step()

    model, twin = images_model(), images_model()
    optimizer = adamw(model)
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        train(model, optimizer, range(7), loop)
        train(twin, moved, range(7), loop)
        assert weights_equal(model, twin)


class Shared(nn.Module):
    """Gradients of several parameters are one tensor, or parts of one, which other layers still use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Parameter(torch.randn(50, 90)), nn.Parameter(torch.randn(50, 90))
        self.flat, self.wide = nn.Parameter(torch.randn(4500)), nn.Parameter(torch.randn(100, 90))

    def forward(self, factor: float) -> torch.Tensor:
        both = torch.cat([self.first + self.second, self.flat.view(50, 90)]) + self.wide
        return (both * factor).square().mean() + self.second.tanh().sum()


@pytest.mark.parametrize("asks", [False, True])
def test_gradients_that_share_memory_are_added_up(asks: bool, tmp_path: Path) -> None:
    """Kept gradients are added to what autograd gives away, and to nothing that it still needs."""

    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        for part in range(3):
            if asks and part == 2:
                found = torch.autograd.grad(model(2.0), list(model.parameters()))
                assert all(parameter.grad is not None for parameter in model.parameters())
                assert all(one.isfinite().all() for one in found)
            model(float(step + part)).backward()
        optimizer.step()

    model, twin = Shared(), Shared()
    optimizer = adamw(model)
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        train(model, optimizer, range(6), loop)
        train(twin, moved, range(6), loop)
        assert weights_equal(model, twin)


@pytest.mark.slow
def test_autocast_and_compiled_models_train_the_same(tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (
                model(torch.randn(4, 20, generator=torch.Generator().manual_seed(step)))
                .float()
                .square()
                .mean()
            )
        loss.backward()
        optimizer.step()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return torch.compile(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3)), backend="eager")  # type: ignore[return-value]

    model, twin = make(), make()
    optimizer = adamw(model)
    with offloaded(twin, adamw(twin), tmp_path, activations="auto") as moved:
        train(model, optimizer, range(6), loop)
        train(twin, moved, range(6), loop)
        assert weights_equal(model, twin)
        assert moved.report()["activations"]["policy"] == "keep"


def test_a_forked_process_leaves_the_states_alone(
    moved: tuple[nn.Module, OffloadedOptimizer], tmp_path: Path
) -> None:
    _, optimizer = moved
    child = os.fork()
    if not child:
        optimizer._lifetime._at_exit()  # as Python does when it ends
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert any(tmp_path.rglob("states"))


def test_a_forked_process_takes_no_step_and_may_use_the_model(
    moved: tuple[nn.Module, OffloadedOptimizer], tmp_path: Path
) -> None:
    model, optimizer = moved
    child = os.fork()
    if not child:
        refused = 0
        try:
            model(torch.zeros(2, 3, 8, 8))
            optimizer.close()
            for use in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
                with pytest.raises(UsageError, match="belongs to the process that made it"):
                    use()
                refused += 1
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert any(tmp_path.rglob("states"))
    train(model, optimizer, range(5, 7), plain)
    assert optimizer.steps == 7


def test_two_threads_take_their_turns(moved: tuple[nn.Module, OffloadedOptimizer]) -> None:
    """Backward has a thread for each device, and a loop may have one of its own."""
    model, optimizer = moved
    errors: list[BaseException] = []

    def work() -> None:
        try:
            train(model, optimizer, range(5, 8), plain)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    train(model, optimizer, range(8, 10), plain)
    assert optimizer.steps == 10
