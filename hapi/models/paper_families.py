"""The paper's seven families: its own layer numbering and default freeze (HAPI, section 5.1, table 2).

The lists are names over the automatic cut points, so that a layer's index means the same as in the paper.
Other members of a family (resnet34, vgg16, densenet169, vit_l_16) are numbered by the same rule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Block:
    """One layer of a list: it ends at the cut named ``end``, or at the last cut inside module path ``end``.

    ``end`` None is a layer without operations: it ends where the layer before it does.
    """

    name: str
    end: str | None


PAPER_FREEZE = {
    "alexnet": 17,
    "resnet18": 11,
    "resnet50": 21,
    "densenet121": 20,
    "vgg11": 25,
    "vgg19": 36,
    "vit_b_16": 17,
}
"""Default freeze index per model, the paper's table 2; "Transformer" is torchvision's vit_b_16."""


def family_blocks(architecture: str, module: nn.Module) -> list[Block] | None:
    """The paper's list for a torchvision ``architecture``; None outside the seven families."""
    if architecture == "alexnet":
        return _blocks(
            [*_children(module, "features"), "avgpool", "flatten", *_children(module, "classifier")]
        )
    if re.fullmatch(r"resnet\d+", architecture):
        return _blocks(_resnet(module))
    if re.fullmatch(r"densenet\d+", architecture):
        return _blocks(_densenet(module))
    if re.fullmatch(r"vgg\d+(_bn)?", architecture):
        # The paper counts vgg11 without avgpool and flatten (they belong to classifier.0 here),
        # but vgg19 with them as one layer.
        own = [] if architecture == "vgg11" else ["flatten"]
        return _blocks([*_children(module, "features"), *own, *_children(module, "classifier")])
    if re.fullmatch(r"vit_[a-z]_\d+", architecture):
        return _vision_transformer(module)
    return None


def _blocks(paths: Sequence[str]) -> list[Block]:
    return [Block(path, path) for path in paths]


def _children(module: nn.Module, path: str) -> list[str]:
    return [f"{path}.{name}" for name, _ in module.get_submodule(path).named_children()]


def _resnet(module: nn.Module) -> list[str]:
    stages = [block for stage in range(1, 5) for block in _children(module, f"layer{stage}")]
    return ["conv1", "bn1", "relu", "maxpool", *stages, "flatten", "fc"]


def _densenet(module: nn.Module) -> list[str]:
    paths: list[str] = []
    for path in _children(module, "features"):
        # A dense block is one layer; a transition counts as its four modules.
        paths.extend(_children(module, path) if "transition" in path else [path])
    return [*paths, "classifier"]


def _vision_transformer(module: nn.Module) -> list[Block]:
    blocks = _blocks(["conv_proj", "reshape", "permute", "cat", "encoder.dropout"])
    blocks += _blocks(_children(module, "encoder.layers"))
    # The paper's list comes from timm, which has a dropout (rate 0) before the head: an empty layer here,
    # kept so that the count of 21 is the paper's.
    return [
        *blocks,
        *_blocks(["encoder.ln", "getitem"]),
        Block("head_drop", None),
        Block("heads.head", "heads.head"),
    ]
