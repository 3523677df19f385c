"""The identity of a front."""

from __future__ import annotations

import torch
from torch import nn

from hapi.models.layers import layered
from hapi.models.zoo import ModelSpec, build


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
    assert base.front_digests(last) == other_head.front_digests(last)
    assert base.front_digest(len(base)) != other_head.front_digest(len(base))
    assert len(set(base.front_digests())) == len(base) + 1
    assert build(small(weights="random:2")).front_digest(1) != base.front_digest(1)
    assert build(small(side=65)).front_digest(1) != base.front_digest(1)
    assert base.with_all_cuts().front_digest(1) == base.front_digest(1)


def test_digest_follows_content_and_settings() -> None:
    def make(stride: int = 1) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, stride=stride, padding=stride), nn.ReLU(), nn.Conv2d(4, 4, 3))

    one, two = layered(make(), (3, 8, 8)), layered(make(), (3, 8, 8))
    assert one.front_digests() == two.front_digests()
    assert layered(make(2), (3, 8, 8)).front_digest(1) != one.front_digest(1)
    before = one.front_digests()
    with torch.no_grad():
        one.module[2].weight[0, 0, 0, 0] += 1  # an in-place change is noticed in spite of the cache
    after = one.front_digests()
    assert after[:3] == before[:3] and after[3] != before[3]
    one.module.train()
    assert one.front_digests() == after


def test_number_of_heads_of_an_attention_is_part_of_it() -> None:
    def make(heads: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.TransformerEncoderLayer(8, heads, 16, batch_first=True), nn.Flatten(), nn.Linear(32, 2)
        )

    assert layered(make(2), (4, 8)).front_digest(1) != layered(make(4), (4, 8)).front_digest(1)
