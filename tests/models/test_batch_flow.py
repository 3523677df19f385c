"""Layers that compute with all samples of a batch are found by their operators, those that take each alone are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hapi.models.graph.layers import layered
from hapi.models.graph.user_code import unidentified_layer

Compute = Callable[[torch.Tensor], torch.Tensor]
WHY = "computes with all samples of a batch, so what it gives for one depends on the others"


class Computing(nn.Module):
    """One function, in a module that torch.fx cannot trace if that is wanted."""

    def __init__(self, compute: Compute, *, opaque: bool = False) -> None:
        super().__init__()
        self.compute, self.opaque = compute, opaque

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.opaque and x.sum() > 1e9:
            return -x
        return self.compute(x)


class Tokens(nn.Module):
    """A token in front of each sample's, positions, and attention with the batch in the middle."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (
            torch.cat([self.token.expand(x.shape[0], -1, -1), x.reshape(x.shape[0], 4, 8)], dim=1)
            + self.places
        )
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.attention(x, x, x, need_weights=False)[0]
        x = x if self.batch_first else x.transpose(0, 1)
        return x[:, 0]


class AcrossSamples(nn.Module):
    """Attention whose user has forgotten that the batch comes first."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(8, 2), need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, 4, 8)
        return self.attention(x, x, x, need_weights=self.need_weights)[0].flatten(1)


COMBINING: dict[str, Compute] = {
    "mean": lambda x: x - x.mean(0),
    "mean with its dimension": lambda x: x - x.mean(0, keepdim=True),
    "largest": lambda x: x / x.abs().max(),
    "deviation": lambda x: x / (x.std() + 1e-5),
    "norm": lambda x: F.normalize(x, dim=0),
    "in place": lambda x: x.clone().sub_(x.mean()),
    "by a choice": lambda x: torch.where(x.mean() > 0, x, -x),
    "the first sample": lambda x: x + x[0],
    "into a tensor of zeros": lambda x: torch.zeros_like(x) + x.sum(0).expand(x.shape[0], -1),
    "by a matrix": lambda x: x @ (x.t() @ x),
    "softmax over the batch": lambda x: x.softmax(0),
    "softmax over the batch in the middle": lambda x: (
        x.reshape(-1, 4, 8).transpose(0, 1).log_softmax(1).transpose(0, 1).flatten(1)
    ),
    "sums so far": lambda x: x.cumsum(0),
    "samples in reverse": lambda x: x.flip(0),
    "the sample before": lambda x: x.roll(1, dims=[0]),
    "likeness": lambda x: (x @ x.t()).relu() @ x,
    "distances": lambda x: x * torch.cdist(x, x).mean(1, keepdim=True),
    "attention to other samples": lambda x: F.scaled_dot_product_attention(*[x[None]] * 3)[0],
}
ALONE: dict[str, Compute] = {
    "a sample's mean": lambda x: x - x.mean(1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "sums so far": lambda x: x.cumsum(1).flip(1).roll(1, dims=[1]),
    "in another order, and back": lambda x: x[x[:, 0].argsort()][x[:, 0].argsort().argsort()],
    "attention": lambda x: F.scaled_dot_product_attention(*[x.reshape(-1, 4, 8)] * 3).flatten(1),
    "likeness of places": lambda x: torch.einsum("bic,bjc->bij", x.reshape(-1, 4, 8), x.reshape(-1, 4, 8)),
    "norm": lambda x: F.normalize(x, dim=1),
    "layer norm": lambda x: F.layer_norm(x, (32,)),
    "group norm": lambda x: F.group_norm(x.reshape(-1, 8, 4), 2),
    "instance norm": lambda x: F.instance_norm(x.reshape(-1, 8, 4)),
    "zeros of a sample's form": lambda x: x + torch.zeros_like(x[0]) + x.new_zeros(x.shape[1:]),
    "places": lambda x: x * torch.arange(x.shape[1], device=x.device),
    "batch and places in one dimension": lambda x: x.reshape(-1, 4).relu().reshape(x.shape[0], -1),
    "the batch in the middle": lambda x: x.reshape(-1, 4, 8).permute(1, 0, 2).tanh().permute(1, 0, 2),
    "outer products": lambda x: torch.einsum("bi,bj->bij", x, x),
    "where values say so": lambda x: x.masked_fill(x > 0, 0.0),
    "checked": lambda x: x if x.shape[0] > 0 else -x,
}


@pytest.mark.parametrize("opaque", [False, True], ids=["traced", "opaque"])
@pytest.mark.parametrize("name", COMBINING)
def test_layers_that_combine(name: str, opaque: bool) -> None:
    compute = COMBINING[name]
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(compute(x)[2:5], compute(x[2:5])), "others of the batch are of meaning"
    model = layered(
        nn.Sequential(nn.Linear(32, 32), Computing(compute, opaque=opaque), nn.Linear(32, 2)), (32,)
    )
    (layer,) = (one for one in model.layers if one.combines)
    assert layer.name.startswith("1") and unidentified_layer(model, layer.index - 1) is None
    assert unidentified_layer(model, len(model)) == (layer, WHY)


@pytest.mark.parametrize("opaque", [False, True], ids=["traced", "opaque"])
@pytest.mark.parametrize("name", ALONE)
def test_layers_that_take_each_sample_alone(name: str, opaque: bool) -> None:
    compute = ALONE[name]
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(compute(x)[2:5], compute(x[2:5]))
    model = layered(nn.Sequential(nn.Linear(32, 32), Computing(compute, opaque=opaque), nn.Flatten()), (32,))
    assert not any(one.combines for one in model.layers) and unidentified_layer(model, len(model)) is None


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_that_takes_samples_for_places(need_weights: bool) -> None:
    model = layered(nn.Sequential(nn.Linear(32, 32), AcrossSamples(need_weights), nn.Linear(32, 2)), (32,))
    assert any(one.combines for one in model.layers)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention(batch_first: bool) -> None:
    model = layered(nn.Sequential(nn.Linear(32, 32), Tokens(batch_first=batch_first), nn.Linear(8, 2)), (32,))
    assert not any(one.combines for one in model.layers)


def test_a_choice_by_the_batch_alone_is_not_seen() -> None:
    """Which way code goes is no operator: such layers are for their user to know."""
    model = layered(nn.Sequential(Computing(lambda x: x, opaque=True), nn.Linear(32, 2)), (32,))
    assert not any(one.combines for one in model.layers)


def test_scales_of_a_batch_in_quantised_layers() -> None:
    first = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    torch.ao.quantization.quantize_dynamic(first, {nn.Linear}, inplace=True)
    model = layered(nn.Sequential(first, nn.Linear(32, 2)), (32,))
    assert model.layers[0].combines
