"""Fronts and backs on the GPU: every tensor moves along, constants of the graph included."""

from __future__ import annotations

import pytest
import torch

from hapi.models.devices import resolve_device
from hapi.models.zoo.build import ModelSpec, build

pytestmark = pytest.mark.gpu

# One of every kind of architecture: what they build inside forward (shapes, masks, positions) differs.
MODELS = {
    "convnext_tiny": 64, "densenet121": 64, "efficientnet_v2_s": 64, "googlenet": 64, "inception_v3": 96,
    "maxvit_t": 224, "mnasnet0_5": 64, "mobilenet_v3_small": 64, "regnet_y_400mf": 64, "resnext50_32x4d": 64,
    "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64, "swin_t": 64, "swin_v2_t": 64, "vgg11_bn": 64, "vit_b_32": 64,
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), MODELS.items())
def test_front_then_back_is_the_whole(name: str, size: int, place: str) -> None:
    device = resolve_device(place)
    model = build(ModelSpec(architecture=name, input_shape=(3, size, size))).to(device)
    x = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    whole = model.module.eval()
    with torch.no_grad():
        expected = whole(x)
        for split in {1, len(model) // 3, 2 * len(model) // 3, len(model) - 1}:
            features = model.segment(0, split, frozen=True)(x)
            assert features.device == device and tuple(features.shape[1:]) == model.output_shapes()[split]
            back = model.segment(split, len(model), frozen=True)(features)
            # The same kernels on the same batch: equal but for the order of a few additions.
            torch.testing.assert_close(back, expected, rtol=1e-4, atol=1e-5)
