"""What is known of a job before it runs."""

from __future__ import annotations

import pytest
from torch import nn

from hapi.models.graph.layers import LayeredModel, layered
from hapi.profiler.fit import Sizes, Tier
from hapi.profiler.sizes import sizes_of


@pytest.fixture(scope="module")
def model() -> LayeredModel:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    return layered(module, (3, 8, 8))


def sizes(model: LayeredModel, freeze: int = 1, stored: float = 99.6, **changes: object) -> Sizes:
    options = {"encoded": True, "client": Tier(), **changes}
    return sizes_of(model, "a model", freeze, stored_bytes=stored, **options)  # type: ignore[arg-type]


def test_layers_and_samples(model: LayeredModel) -> None:
    found = sizes(model)
    assert (found.model, found.freeze, found.last_split) == ("a model", 1, 4)  # candidates up to the flatten
    assert [x.name for x in found.layers] == [x.name for x in model.layers]
    assert [x.output_bytes for x in found.layers] == [2048, 2048, 512, 512, 40]
    assert [x.parameter_bytes for x in found.layers] == [(3 * 8 * 9 + 8) * 4, 0, 0, 0, (128 * 10 + 10) * 4]
    assert found.layers[0].flops >= 2 * 27 * 8 * 64 and found.layers[4].flops >= 2 * 1280
    assert all(x.working_bytes >= x.output_bytes for x in found.layers)
    assert all(x.server_seconds == x.client_seconds == 0 for x in found.layers)
    s = found.samples
    assert (s.stored_bytes, s.uint8_bytes, s.tensor_bytes, s.encoded) == (100, 192, 768, True)


def test_a_sample_has_at_least_one_byte(model: LayeredModel) -> None:
    assert sizes(model, stored=0.0, encoded=False).samples.stored_bytes == 1


def test_optimisers(model: LayeredModel) -> None:
    assert sizes(model, optimizer_bytes=2.0).optimizer_bytes_per_parameter_byte == 2
    assert sizes(model).optimizer_bytes_per_parameter_byte == 1


def test_the_freeze_moves_the_range(model: LayeredModel) -> None:
    assert sizes(model, freeze=0).last_split == 0
    assert sizes(model, freeze=3).last_split == 4
