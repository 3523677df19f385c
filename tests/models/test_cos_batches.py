"""How far features depend on the COS batch: not at all in exact arithmetic, and in floating point within a bound."""

from __future__ import annotations

import pytest
import torch

from hapi.models.zoo.build import ModelSpec, build

BOUND = 1e-5
"""Share of the largest feature (docs/decisions/0009-same-numbers.md); the largest difference seen is 3e-6."""
SAMPLES = 33


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alexnet", "resnet18", "transformer"])
def test_features_hardly_depend_on_the_cos_batch(name: str) -> None:
    """Sizes that other kernels serve, and remainders; the same size twice gives the same bits."""
    model = build(ModelSpec(architecture=name, weights="random:0", input_shape=(3, 64, 64)))
    assert model.default_freeze is not None
    front = model.segment(0, model.default_freeze, frozen=True)
    inputs = torch.rand((SAMPLES, 3, 64, 64), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def features(batch: int) -> torch.Tensor:
        return torch.cat([front(part) for part in inputs.split(batch)])

    expected = features(16)
    assert torch.equal(expected, features(16))
    for batch in (1, 5, 32):
        assert (features(batch) - expected).abs().max() <= BOUND * expected.abs().max()
