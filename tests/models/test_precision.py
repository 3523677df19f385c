"""Frozen layers in 16 bits: the same numbers at every cut, close to float32, with the sizes that they say."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from hapi.errors import ModelError
from hapi.models.graph import precision
from hapi.models.graph.layers import LayeredModel, layered
from hapi.models.graph.precision import check_kernels, in_precision, take_weights
from hapi.models.zoo.build import ModelSpec, build
from hapi.profiler.work import layer_work
from hapi.repository.built import prefix_bytes
from hapi.wire.references import Precision

CPU = torch.device("cpu")
NETS = {"resnet18": 12, "mobilenet_v2": 12, "vit_b_16": 6, "densenet121": 9}
"""Networks with their freezes: with random weights what comes after is too small for fp16."""
OFF = {"bf16": 0.03, "fp16": 0.004}
"""Largest difference of features from float32, over the largest feature: eps of the type times a few layers."""


def spec_of(name: str) -> ModelSpec:
    return ModelSpec(architecture=name, num_classes=5, weights="random:0", input_shape=(3, 32, 32))


@cache
def net(name: str) -> LayeredModel:
    """Built once for all types, to be copied: rounding gives its weights away. The transformer is a narrow one."""
    if name == "vit_b_16":
        torch.manual_seed(0)
        return layered(
            VisionTransformer(32, 8, 12, 4, 64, 256, num_classes=5), (3, 32, 32), architecture=name
        )
    return build(spec_of(name))


def rounded(model: LayeredModel, name: Precision, last: int) -> LayeredModel:
    twin = in_precision(model, name, CPU, last)
    take_weights(twin, 0, last, CPU)
    return twin


@pytest.fixture
def half_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has units for 16 bits, as far as Hapi can see."""
    monkeypatch.setattr(precision, "arithmetic_type", lambda features, device: features)


@pytest.mark.long_cases("densenet121-bf16", "mobilenet_v2-bf16")
@pytest.mark.slow_except("vit_b_16-fp16")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind) if (number + (kind == "fp16")) % 2 else pytest.param(name, kind, marks=pytest.mark.slow)
        for number, name in enumerate(NETS)
        for kind in ("bf16", "fp16")
    ],
)
def test_every_cut_gives_the_same_bits_and_stays_close_to_float32(name: str, kind: Precision) -> None:
    model = net(name).over(copy.deepcopy(net(name).module))
    last = model.last_split(NETS[name])
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    exact = model.segment(0, last, frozen=True)(x)
    twin = rounded(model, kind, last)
    whole = twin.segment(0, last, frozen=True)(x)
    for cut in range(1, last):
        features = twin.segment(0, cut, frozen=True)(x)
        assert features.dtype == twin.output_dtypes()[cut] == precision.TYPES[kind]
        assert features[0].nbytes == twin.output_bytes()[cut] == model.output_bytes()[cut] // 2
        assert torch.equal(twin.segment(cut, last, frozen=True)(features), whole), f"cut after layer {cut}"
    off = (whole.float() - exact).abs().max() / exact.abs().max()
    assert 0 < off < OFF[kind]
    assert twin.output_dtypes()[last + 1 :] == model.output_dtypes()[last + 1 :]


@pytest.mark.slow
def test_every_cut_gives_the_same_bits_where_layers_compute_in_the_type(half_units: None) -> None:
    model = build(spec_of("resnet18"))
    twin, x = in_precision(model, "bf16", CPU, 8), torch.randn(2, 3, 32, 32)
    check_kernels(twin, 0, 8, CPU)
    take_weights(twin, 0, 8, CPU)
    assert twin.tensors.get("conv1.weight").dtype == torch.bfloat16
    assert twin.tensors.get("bn1.running_var").dtype == torch.float32
    whole = twin.segment(0, 8, frozen=True)(x)
    for cut in range(1, 8):
        assert torch.equal(twin.segment(cut, 8, frozen=True)(twin.segment(0, cut, frozen=True)(x)), whole)


def test_float32_is_the_model_itself() -> None:
    model = layered(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (4,))
    assert in_precision(model, "fp32", CPU) is model


def test_sizes_are_those_of_the_type_that_layers_compute_in(half_units: None) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4, bias=False))
    model = layered(net, (3, 5, 5))
    twin = in_precision(model, "bf16", CPU, 2)
    assert prefix_bytes(twin, 2) * 2 == prefix_bytes(model, 2)
    exact, half = layer_work(model, 2), layer_work(twin, 2)
    assert half[0].working_bytes * 2 == exact[0].working_bytes
    assert half[0].workspace_bytes * 2 == exact[0].workspace_bytes
    assert half[3] == exact[3] and twin.layers[3] == model.layers[3]


def test_weights_stay_as_large_where_layers_compute_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "arithmetic_type", lambda features, device: torch.float32)
    model = layered(nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()), (4,))
    weight = model.tensors.get("0.weight").detach().clone()
    twin = in_precision(model, "fp16", CPU, 1)
    assert prefix_bytes(twin, 1) == prefix_bytes(model, 1)
    take_weights(twin, 0, 1, CPU)
    assert torch.equal(twin.tensors.get("0.weight"), weight.half().float())
    assert model.tensors.get("0.weight").is_meta, "the float32 ones are given up"


def test_weights_that_trained_layers_read_are_kept() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) * self.scale) * self.scale

    model = layered(Tied(), (4,))
    last = len(model) - 2
    rounded(model, "bf16", last)
    assert not model.tensors.get("scale").is_meta
    assert model.segment(last, len(model))(torch.ones(2, 4)).dtype == torch.float32


def test_digests_and_the_first_model_stay_as_they_were() -> None:
    model = layered(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (4,))
    before, state = model.prefix_digests(), copy.deepcopy(model.module.state_dict())
    in_precision(model, "bf16", CPU, 2)
    assert model.prefix_digests() == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.module.state_dict().items())


def test_an_operation_that_a_device_lacks_is_told_with_its_layer(half_units: None) -> None:
    class Solve(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x + torch.eye(4, dtype=x.dtype))

    net = nn.Sequential(nn.ReLU(), Solve(), nn.Flatten(), nn.Linear(16, 2))
    twin = in_precision(layered(net, (4, 4), blocks=("0", "1", "2", "3")), "bf16", CPU, 3)
    with pytest.raises(
        ModelError, match=r"layer 2 \(1\) cannot compute in bf16 on cpu: .*--frozen-precision fp32"
    ):
        check_kernels(twin, 0, 3, CPU)
