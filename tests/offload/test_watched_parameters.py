"""Between backward and step a loop reads and changes parameters as they were before the step, by whatever way."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.offload_loops import offloaded, train, weights_equal
from support.second_passes import Forced
from torch import nn

from hapi.offload import training
from hapi.offload.loop.read_watch import ReadWatch

STEPS, LATE = 9, 6
Use = Callable[[Any, int], Any]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss(model: nn.Module, step: int) -> torch.Tensor:
    rows = torch.randn(8, 9, generator=torch.Generator().manual_seed(step))
    found: torch.Tensor = model(rows).tanh().square().mean()
    return found


def norms(model: Any, step: int) -> list[float]:
    return [float(one.norm()) for one in model.parameters()]


def data_sums(model: Any, step: int) -> list[float]:
    return [one.data.sum().item() for one in model.parameters()]


def in_one_vector(model: Any, step: int) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def by_list(model: Any, step: int) -> list[torch.Tensor]:
    return [one.detach() for one in torch._foreach_norm(list(model.parameters()))]


def by_array(model: Any, step: int) -> list[float]:
    return [float(one.detach().numpy().sum()) for one in model.parameters()]


def by_address(model: Any, step: int) -> list[int]:
    return [one.untyped_storage()[3] for one in model.parameters()]


def copied(model: Any, step: int) -> list[torch.Tensor]:
    return [one.detach() for one in copy.deepcopy(model).parameters()]


def saved(model: Any, step: int) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)
    file.seek(0)
    return [one.detach() for one in torch.load(file, weights_only=False)]


def clipped(model: Any, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)


def clipped_by_weights(model: Any, step: int) -> None:
    """Adaptive clipping, of NFNets."""
    for one in model.parameters():
        with torch.no_grad():
            one.grad.mul_(torch.clamp(0.02 * one.norm() / one.grad.norm(), max=1.0))


def decayed(model: Any, step: int) -> None:
    for one in model.parameters():
        one.grad += 0.1 * one.data


def decayed_in_place(model: Any, step: int) -> None:
    with torch.no_grad():
        for one in model.parameters():
            one.grad.add_(one, alpha=0.1)


def penalised(model: Any, step: int) -> None:
    (0.01 * sum(one.square().sum() for one in model.parameters())).backward()


READS: list[Use] = [norms, data_sums, in_one_vector, by_list, by_array, by_address, copied, saved]
CHANGES: list[Use] = [clipped_by_weights, decayed, decayed_in_place, penalised]


def using(use: Use, first: int, seen: list[Any]) -> Callable[[Any, Any, int], None]:
    def loop(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        loss(model, step).backward()
        if step >= first:
            seen.append(use(model, step))
        optimizer.step()

    return loop


@pytest.mark.parametrize("first", [0, LATE])
@pytest.mark.parametrize("use", READS)
def test_reads_see_the_values_before_the_step(use: Use, first: int, tmp_path: Path) -> None:
    expected: list[Any] = []
    found: list[Any] = []
    model, twin = layers(), layers()
    train(model, adamw(model), range(STEPS), using(use, first, expected))
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        train(twin, moved, range(STEPS), using(use, first, found))
        assert weights_equal(model, twin)
        assert moved.report()["speculated_pieces"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("first", [0, LATE])
@pytest.mark.parametrize("use", CHANGES)
def test_gradients_are_changed_by_the_values_before_the_step(use: Use, first: int, tmp_path: Path) -> None:
    model, twin = layers(), layers()
    train(model, adamw(model), range(STEPS), using(use, first, []))
    keeps = True if first else None
    with offloaded(twin, adamw(twin), tmp_path, keep_gradients=keeps) as moved:
        train(twin, moved, range(STEPS), using(use, first, []))
        assert weights_equal(model, twin)


def test_parameters_look_as_ever_and_the_common_uses_cost_no_look(tmp_path: Path) -> None:
    model = layers()
    bias = model[0].bias
    with offloaded(model, adamw(model), tmp_path) as moved:
        train(model, moved, range(STEPS), using(clipped, 0, []))
        moved.zero_grad()
        loss(model, 9).backward()
        assert type(bias) is not nn.Parameter and type(bias).__name__ == "Parameter"
        assert isinstance(bias, nn.Parameter) and bias.requires_grad and bias.is_leaf and len(bias) == 40
        assert bias.shape == (40,) and bias.dtype == torch.float32 and torch.zeros_like(bias).sum() == 0
        clipped(model, 0)
        assert type(bias) is not nn.Parameter
        assert repr(bias).startswith("Parameter containing:") and type(bias) is nn.Parameter
        moved.step()
        assert all(type(one) is nn.Parameter for one in model.parameters())


class Own(nn.Parameter):
    """A class of a loop's own."""


def test_other_classes_of_parameters_are_watched_too() -> None:
    used: list[int] = []
    watch = ReadWatch(lambda: used.append(1))
    found: list[torch.Tensor] = [
        nn.Parameter(torch.zeros(3)),
        Own(torch.zeros(3)),
        torch.zeros(3, requires_grad=True),
    ]
    kinds = [type(one) for one in found]
    for one in found:
        for other in found:
            watch.begin(other)
        assert one.requires_grad and not used
        assert float((one + 1).sum()) == 3 and used == [1]
        assert [type(other) for other in found] == kinds
        used.clear()


def views_held(model: Any) -> Callable[[], list[float]]:
    views = [one.data.view(-1) for one in model.parameters()]
    return lambda: [float(one.sum()) for one in views]


def arrays_held(model: Any) -> Callable[[], list[float]]:
    arrays = [one.detach().numpy() for one in model.parameters()]
    return lambda: [float(one.sum()) for one in arrays]


def states_held(model: Any) -> Callable[[], list[float]]:
    states = model.state_dict()
    return lambda: [float(one.sum()) for one in states.values()]


@pytest.mark.parametrize("hold", [views_held, arrays_held, states_held])
def test_whoever_holds_the_memory_sees_the_values_before_the_step(
    hold: Callable[[Any], Callable[[], list[float]]], tmp_path: Path
) -> None:
    def run(model: Any, optimizer: Any) -> list[Any]:
        look, seen = hold(model), []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, step).backward()
            seen.append(look())
            optimizer.step()
        return seen

    model, twin = layers(), layers()
    expected = run(model, adamw(model))
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        assert run(twin, moved) == expected
        assert weights_equal(model, twin)


class Unsaved(torch.autograd.Function):
    """Keeps a weight for backward where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.weight, None


class UsesTwice(nn.Module):
    """Backward needs a weight once more after its gradient is there."""

    def __init__(self, first: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.weight, self.last = (
            nn.Linear(9, 40),
            nn.Parameter(torch.randn(40, 40) / 6),
            nn.Linear(40, 3),
        )
        self.first = first

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(self.inner(rows), self.weight).tanh()
        return self.last(nn.functional.linear(rows, self.weight).tanh())  # type: ignore[no-any-return]


FIRST_USES: dict[str, Callable[[Any, Any], Any]] = {
    "data": lambda rows, weight: nn.functional.linear(rows, weight.data),
    "detached": lambda rows, weight: nn.functional.linear(rows, weight.detach()),
    "function": Unsaved.apply,
}


@pytest.mark.parametrize("name", FIRST_USES)
def test_a_graph_that_still_needs_a_weight_finds_it(name: str, tmp_path: Path) -> None:
    def loop(model: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()

    model, twin = UsesTwice(FIRST_USES[name]), UsesTwice(FIRST_USES[name])
    train(model, adamw(model), range(STEPS), loop)
    with offloaded(twin, adamw(twin), tmp_path) as moved:
        train(twin, moved, range(STEPS), loop)
        assert weights_equal(model, twin)


def retained(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    found = model(torch.ones(8, 9) * step)
    found.square().mean().backward(retain_graph=True)
    if step >= LATE:
        found.tanh().mean().backward()
    optimizer.step()


def of_two_graphs(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    first = loss(model, step)
    second = loss(model, step + 100) if step >= LATE else None
    first.backward()
    if second is not None:
        second.backward()
    optimizer.step()


@pytest.mark.parametrize("way", ["keep", "swap", "recompute"])
@pytest.mark.parametrize("loop", [retained, of_two_graphs])
def test_late_gradients_of_graphs_from_before_are_added(
    loop: Callable[[Any, Any, int], None], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever still needs a weight keeps its step from being computed ahead."""
    monkeypatch.setattr(training, "ActivationOffload", Forced)
    model, twin = layers(), layers()
    train(model, adamw(model), range(STEPS), loop)
    with offloaded(twin, adamw(twin), tmp_path, activations=way) as moved:
        train(twin, moved, range(STEPS), loop)
        assert weights_equal(model, twin)


def test_a_network_beside_the_model_is_read_as_it_is(tmp_path: Path) -> None:
    """The optimizer trains a decoder, too, which the call does not name."""

    def run(give: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> list[Any]:
        model, other = layers(), nn.Sequential(nn.Linear(3, 30), nn.Linear(30, 9))
        optimizer = give(model, torch.optim.AdamW([*model.parameters(), *other.parameters()], lr=1e-2))
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(nn.Sequential(model, other), step).backward()
            with torch.no_grad():
                seen.append(other(torch.ones(1, 3)).sum().item())
            optimizer.step()
        return [seen, [one.detach().clone() for one in (*model.parameters(), *other.parameters())]]

    expected = run(lambda model, optimizer: optimizer)
    found = run(lambda model, optimizer: offloaded(model, optimizer, tmp_path))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
