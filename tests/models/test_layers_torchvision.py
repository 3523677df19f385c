"""All of torchvision's classification models, at every cut.

A composition front(1..s) then back(s+1..L) is a chain of layers in two pieces. So the layers are run one by
one, each on the output of the one before: that the last output equals the whole model's proves every cut's
values (each one is the input of all that follows). What pieces of several layers add (plain values that
cross, the order of in-place operations) is checked by cutting in two at a sample of the cuts.
"""

from __future__ import annotations

import pytest
import torch

from hapi.models.graph.layers import LayeredModel
from hapi.models.zoo.architectures import torchvision_names
from hapi.models.zoo.build import ModelSpec, structure

SIDES = {"alexnet": 64, "googlenet": 64, "inception_v3": 80, "maxvit_t": 224, "vit_h_14": 28}
"""Smallest convenient inputs; 32 for the others."""

TOLERANCE = 0.0
"""The same operators on the same values in the same order: bit-equal on one machine."""

TOO_LARGE = {"vit_h_14", "regnet_y_128gf"}
"""2.5 GB of weights each: their splits are checked in memory-less form below."""


def spec_of(name: str) -> ModelSpec:
    side = SIDES.get(name, 32)
    return ModelSpec(architecture=name, input_shape=(3, side, side))


VALUES = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))


def filled(model: LayeredModel) -> LayeredModel:
    """A structure with weights: the same numbers over and over, since drawing hundreds of millions takes seconds.

    As large as random ones are: activations stay finite.
    """
    for name in model.tensors.names():
        tensor = model.tensors.get(name)
        if tensor.is_meta:
            count = tensor.numel()
            values = VALUES.repeat(-(-count // len(VALUES)))[:count].reshape(tensor.shape)
            if tensor.dim() > 1:
                values = values / (count / len(tensor)) ** 0.5
            elif not name.endswith("bias"):
                values = 1 + values / 10
            model.assign(name, values)
    return model


SMALLEST = {"alexnet", "googlenet", "mobilenet_v3_small", "resnet18", "squeezenet1_1", "vit_b_32"}
"""Chains, branches, residuals and attention at their smallest; the others are long."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SMALLEST else pytest.mark.long)
        for name in torchvision_names()
        if name not in TOO_LARGE
    ],
)
def test_every_cut_composes(name: str) -> None:
    listed = filled(structure(spec_of(name)))
    model = listed.with_all_cuts()
    x = torch.rand(2, *model.input_shape, generator=torch.Generator().manual_seed(0))
    module = model.module.eval()
    with torch.no_grad():
        whole = module(x.clone())
    assert len(model) >= 22
    value = x
    cuts = sorted({1, len(model) // 3, len(model) // 2, len(model) - 1})
    kept: dict[int, torch.Tensor] = {}
    for index in range(len(model)):
        if index in cuts:
            kept[index] = value.clone()
        value = model.segment(index, index + 1, frozen=True)(value)
        assert tuple(value.shape) == (2, *model.output_shapes()[index + 1])
    assert whole.isfinite().all() and whole.std() > 0
    assert (value - whole).abs().max().item() <= TOLERANCE
    for cut in cuts:
        middle = model.segment(0, cut, frozen=True)(x)
        assert torch.equal(middle, kept[cut])
        out = model.segment(cut, len(model), frozen=True)(middle)
        assert (out - whole).abs().max().item() <= TOLERANCE
    freeze = listed.default_freeze
    assert freeze is not None and 0 < freeze < len(listed)
    listed.check_freeze(freeze)


@pytest.mark.slow
@pytest.mark.long_except("regnet_y_128gf")
@pytest.mark.parametrize("name", sorted(TOO_LARGE))
def test_every_cut_of_the_largest_composes_in_shape(name: str) -> None:
    model = structure(spec_of(name)).with_all_cuts()
    model.tensors.release([])
    x = value = torch.empty(2, *model.input_shape, device="meta")
    for index in range(len(model)):
        if index in (0, 1, len(model) // 2):
            assert model.segment(0, index, frozen=True)(x).shape == value.shape
            out = model.segment(index, len(model), frozen=True)(value)
            assert tuple(out.shape) == (2, *model.output_shapes()[-1])
        value = model.segment(index, index + 1, frozen=True)(value)
        assert tuple(value.shape) == (2, *model.output_shapes()[index + 1])
