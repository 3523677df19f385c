"""What is measured on this machine, and what is predicted where measuring would take too long."""

from __future__ import annotations

import pytest
import torch

from hapi.models.layers import LayeredModel
from hapi.models.zoo import ModelSpec, structure
from hapi.profiler.measure import Conditions, measure
from hapi.profiler.work import layer_work


def model(name: str, side: int) -> LayeredModel:
    return structure(ModelSpec(architecture=name, weights="random:0", input_shape=(3, side, side)))


def test_operations_are_the_published_ones() -> None:
    # torchvision gives 1.814 and 7.609 GFLOPS, counting a multiplication and its addition as one.
    for name, published in (("resnet18", 1.814e9), ("vgg11", 7.609e9)):
        work = layer_work(model(name, 224))
        assert sum(w.flops for w in work) == pytest.approx(2 * published, rel=2e-3)


def test_bytes_of_single_operations() -> None:
    work = layer_work(model("alexnet", 224))
    inputs, conv = 3 * 224 * 224 * 4, 64 * 55 * 55 * 4
    assert (
        work[0].working_bytes == inputs + inputs + conv
    )  # its input, and the convolution's input and output
    assert work[0].traffic_bytes == inputs + conv and work[0].saved_bytes == conv
    assert work[0].flops == 2 * 64 * 55 * 55 * 3 * 11 * 11


@pytest.mark.slow
def test_attention_and_constants_can_be_sized() -> None:
    for name in ("swin_v2_t", "vit_b_32"):
        layered = model(name, 224)
        assert len(layer_work(layered)) == len(layered) > 10


def test_a_budget_of_nothing_predicts_everything() -> None:
    layered = model("resnet18", 64)
    profile = measure(layered, "resnet18", 11, Conditions(stored_bytes=None), budget=0.0)
    assert profile.notes[0].startswith("forward seconds: 0 of 14 layers timed (0% of the work), the others")
    assert profile.notes[1].startswith("trained part: three times its forward pass")
    assert all(layer.client_seconds > 0 for layer in profile.layers)
    assert profile.step_seconds == pytest.approx(3 * sum(x.client_seconds for x in profile.layers[11:]))
    assert not profile.samples.encoded and profile.client_tier.decode_seconds == 0


def test_measuring_leaves_the_model_as_it_was() -> None:
    layered = model("resnet18", 32)
    profile = measure(layered, "resnet18", 11, Conditions(stored_bytes=1000, server_speed=2.0))
    assert all(p.is_meta for p in layered.module.parameters())
    assert all(x.server_seconds == x.client_seconds / 2 for x in profile.layers)
    assert profile.server_tier.decode_seconds == profile.client_tier.decode_seconds / 2
    assert profile.client_tier.device == torch.device("cpu").type
