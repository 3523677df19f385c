"""What a model's own code does around its operations: gradients off, autocast on, buffers assigned anew."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hapi.errors import ModelError
from hapi.models.graph.layers import layered


class Gated(nn.Module):
    """A gate without gradients, a running mean that is changed in place, and a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(6))

    @torch.no_grad()
    def gated(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return torch.sigmoid(self.gate(x) - self.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        y: torch.Tensor = self.head(x * self.gated(x))
        return y


def trained(module: nn.Module, run: nn.Module) -> dict[str, torch.Tensor]:
    """State of ``module`` after three steps through ``run``."""
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    run.train()
    for step in range(3):
        optimizer.zero_grad()
        run(torch.rand(5, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return module.state_dict()


def test_what_the_model_runs_without_gradients_has_none_in_the_trained_part() -> None:
    torch.manual_seed(0)
    plain = Gated()
    split = copy.deepcopy(plain)
    model = layered(split, (6,))
    segment = model.segment(0, len(model))
    expected, found = trained(plain, plain), trained(split, segment)
    assert torch.equal(split.gate.weight, plain.gate.weight)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert float(split.mean.abs().max()) > 0 and split.head.weight.grad is not None
    assert torch.is_grad_enabled()


def test_gradients_stay_off_where_the_caller_has_them_off_and_on_after_a_layer_that_failed() -> None:
    model = layered(Gated(), (6,))
    segment = model.segment(0, len(model)).eval()
    with torch.no_grad():
        assert not segment(torch.rand(2, 6)).requires_grad and not torch.is_grad_enabled()
    segment.get_submodule("gate").weight = nn.Parameter(torch.rand(6, 5))
    with pytest.raises(RuntimeError):
        segment(torch.rand(2, 6))
    assert torch.is_grad_enabled()


def test_a_trace_does_not_take_over_the_modes_of_its_caller() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model = layered(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), (6,))
    assert model.segment(0, 2)(torch.rand(2, 6)).requires_grad


class Narrow(nn.Module):
    """Computes in 16 bits by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = self.inner(x)
        return y.float()


class Counting(nn.Module):
    """Assigns its buffer anew in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen + 1
        y: torch.Tensor = self.inner(x) + self.seen
        return y


@pytest.mark.parametrize("kind", [Narrow, Counting])
def test_a_submodule_whose_code_no_graph_can_hold_runs_as_it_is(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 3))
    split = copy.deepcopy(plain)
    model = layered(split, (6,))
    assert model.traced.opaque == ("1",)
    expected, found = trained(plain, plain), trained(split, model.segment(0, 3))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Narrow, "forward turns autocast on, which its graph cannot hold at .*test_torch_modes.py"),
        (Counting, "forward assigns its buffer 'seen' anew; change it in place, as in self.seen.copy_"),
    ],
)
def test_a_whole_model_whose_code_no_graph_can_hold_is_refused(kind: type[nn.Module], words: str) -> None:
    module = kind()
    before = module.state_dict()
    with pytest.raises(
        ModelError, match=f"{kind.__name__} cannot be traced: RuntimeError: {words}"
    ) as caught:
        layered(module, (6,))
    assert "\n" not in str(caught.value) and module.state_dict().keys() == before.keys()
    assert all(type(buffer) is torch.Tensor for buffer in module.buffers())


def test_frozen_layers_take_no_autocast_of_their_caller() -> None:
    """Else a loop's features would differ with the split, as the server runs no such block, and be kept so."""
    model = layered(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), (6,))
    frozen, x = model.segment(0, 1, frozen=True), torch.rand(4, 6)
    expected = frozen(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = frozen(x)
        assert torch.is_autocast_enabled("cpu")
        assert model.segment(1, 2)(found).dtype == torch.bfloat16, "the trained part does"
    assert found.dtype == torch.float32 and torch.equal(found, expected)
