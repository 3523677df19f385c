"""ResNet18 with a quarter of its channels: the same layers under the same names, at a sixteenth of the work."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

THIN_RESNET = "support.thin_resnet:ThinResNet"
"""Its name as a model; a server must allow it."""
THIN_LAYERS = (
    "conv1", "bn1", "relu", "maxpool", *(f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)),
    "flatten", "fc",
)  # fmt: skip
"""The paper's list for ResNets, which only torchvision's own have by themselves."""
THIN_FEATURES = 128
"""Numbers of a sample before the head."""


class ThinResNet(ResNet):
    """ResNet18 whose stages have 16 to 128 channels."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2])
        self.conv1 = nn.Conv2d(3, 16, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(THIN_FEATURES, 1000)

    def _make_layer(self, block: Any, planes: int, blocks: int, stride: int = 1, dilate: bool = False) -> Any:
        if planes == 64:
            self.inplanes = 16
        return super()._make_layer(block, planes // 4, blocks, stride, dilate)
