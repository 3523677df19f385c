"""EfficientNet-Lite0 as ``--model solar_model:lite0`` names it: a function that makes the network."""

from efficientnet_lite_pytorch import EfficientNet
from torch import nn


def lite0() -> nn.Module:
    """The network with its own 1000 classes.

    Its package drops whole blocks at random in training, and adapts the statistics of its BatchNorms by one percent a
    step. That suits millions of steps; a fine-tuning has a hundred.
    """
    network: nn.Module = EfficientNet.from_name(
        "efficientnet-lite0", drop_connect_rate=0.0, batch_norm_momentum=0.9
    )
    return network
