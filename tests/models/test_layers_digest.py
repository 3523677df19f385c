"""The identity of a front."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hapi.models.graph.layers import layered
from hapi.models.zoo.build import ModelSpec, build


def small(
    num_classes: int | None = None, weights: str = "random:1", side: int = 64, **more: object
) -> ModelSpec:
    return ModelSpec(
        architecture="squeezenet1_1",
        num_classes=num_classes,
        weights=weights,
        input_shape=(3, side, side),
        **more,
    )


def test_digest_does_not_depend_on_the_head_but_on_everything_in_front() -> None:
    base = build(small())
    other_head = build(small(10, head_seed=3))
    last = len(base) - 4  # the head's convolution is followed by ReLU, pooling and flatten
    assert base.prefix_digests(last) == other_head.prefix_digests(last)
    assert base.prefix_digest(len(base)) != other_head.prefix_digest(len(base))
    assert len(set(base.prefix_digests())) == len(base) + 1
    assert build(small(weights="random:2")).prefix_digest(1) != base.prefix_digest(1)
    assert build(small(side=65)).prefix_digest(1) != base.prefix_digest(1)
    assert base.with_all_cuts().prefix_digest(1) == base.prefix_digest(1)


def test_digest_follows_content_and_settings() -> None:
    def make(stride: int = 1) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, stride=stride, padding=stride), nn.ReLU(), nn.Conv2d(4, 4, 3))

    one, two = layered(make(), (3, 8, 8)), layered(make(), (3, 8, 8))
    assert one.prefix_digests() == two.prefix_digests()
    assert layered(make(2), (3, 8, 8)).prefix_digest(1) != one.prefix_digest(1)
    before = one.prefix_digests()
    with torch.no_grad():
        one.module[2].weight[0, 0, 0, 0] += 1  # an in-place change is noticed in spite of the cache
    after = one.prefix_digests()
    assert after[:3] == before[:3] and after[3] != before[3]
    one.module.train()
    assert one.prefix_digests() == after


def test_what_forward_keeps_is_no_part_of_it_and_stays_in_its_segment() -> None:
    """As timm's TinyViT: the bias of its attention is gathered once for each device."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(2, 4))
            self.kept: dict[str, torch.Tensor] = {}
            self.sizes = [[torch.ones(2)], 3]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x == x).all()):  # cannot be traced: a leaf
                x = x + self.kept.setdefault(str(x.device), self.bias.sum(0))
            return x

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Biased(), nn.Linear(4, 2))

    ran, fresh = layered(make(), (4,)), layered(make(), (4,))
    assert ran.module[1].kept == {}  # nor does the analysis leave anything behind
    ran.segment(0, 3, frozen=True)(torch.rand(2, 4))
    assert ran.module[1].kept == {}
    ran.segment(0, 3).eval()(torch.rand(2, 4))
    assert set(ran.module[1].kept) == {"cpu"}
    assert ran.prefix_digests() == fresh.prefix_digests()


class Untraceable(nn.Module):
    """What cannot be traced, and keeps tensors that are neither parameters nor buffers."""

    def __init__(self, inner: torch.Tensor | None = None, **kept: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = nn.Identity()
        self.inner.table = inner
        for name, tensor in kept.items():
            setattr(self, name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.shape[1] == 4 else x  # what torch.fx cannot decide


@pytest.mark.slow
def test_tensors_that_are_plain_attributes_of_what_cannot_be_traced_are_part_of_it() -> None:
    def digests(inner: torch.Tensor | None = None, **kept: torch.Tensor) -> list[str]:
        torch.manual_seed(0)
        model = layered(nn.Sequential(nn.Linear(4, 4), Untraceable(inner, **kept), nn.Linear(4, 2)), (4,))
        assert model.traced.opaque == ("1",)
        return model.prefix_digests()

    ones = torch.ones(4)
    variants = [
        digests(), digests(scale=ones), digests(scale=2 * ones), digests(scale=ones.double()),
        digests(scale=ones.reshape(2, 2)), digests(other=ones), digests(_scale=ones), digests(ones),
        digests(scale=torch.polar(ones, ones)), digests(scale=torch.polar(ones, -ones)),
        digests(scale=torch.eye(2)), digests(scale=torch.eye(2).to_sparse()), digests(scale=torch.empty(0)),
    ]  # fmt: skip
    assert {tuple(found[:2]) for found in variants} == {tuple(variants[0][:2])}
    assert len({found[2] for found in variants}) == len(variants)
    assert digests(scale=torch.ones(4), _more=torch.zeros(1)) == digests(_more=torch.zeros(1), scale=ones)


def test_what_is_computed_from_parameters_is_no_part_of_its_own() -> None:
    """As torch's older weight_norm keeps it: the parameters say all, and may come later."""

    def make(weight: float) -> nn.Module:
        torch.manual_seed(0)
        module = Untraceable()
        module.product = module.linear.weight * weight
        return nn.Sequential(module, nn.Linear(4, 2))

    assert layered(make(1.0), (4,)).prefix_digests() == layered(make(2.0), (4,)).prefix_digests()


def test_number_of_heads_of_an_attention_is_part_of_it() -> None:
    def make(heads: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.TransformerEncoderLayer(8, heads, 16, batch_first=True), nn.Flatten(), nn.Linear(32, 2)
        )

    assert layered(make(2), (4, 8)).prefix_digest(1) != layered(make(4), (4, 8)).prefix_digest(1)
