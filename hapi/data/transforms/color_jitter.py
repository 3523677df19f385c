"""ColorJitter of torchvision's ``transforms.v2`` on uint8 images, with the same result on every processor.

Torchvision's own blending (contrast, saturation) fuses a multiplication and an addition where the processor can:
measured between torch's plain and AVX2 code, 75 of 240 images came out differently by saturation. Here every operation
is rounded by itself, which numpy does everywhere alike; so a pixel may be one level from torchvision's.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from hapi.lazy_torchvision import vision

F = vision("torchvision.transforms.v2.functional")

_Floats = npt.NDArray[np.float32]
_GREY = (np.float32(0.2989), np.float32(0.587), np.float32(0.114))
"""Shares of red, green and blue in grey: torchvision's, from ITU-R BT.601."""


def jittered(image: torch.Tensor, steps: Iterable[tuple[int, float]]) -> torch.Tensor:
    """uint8 ``image`` [3, H, W] after the steps of :func:`hapi.data.transforms.random_params.jitter`, one after the
    other."""
    for kind, factor in steps:
        image = _STEPS[kind](image, factor)
    return image


def _brightness(image: torch.Tensor, factor: float) -> torch.Tensor:
    return _levels(image.numpy() * np.float32(factor))


def _contrast(image: torch.Tensor, factor: float) -> torch.Tensor:
    """Towards the mean grey, or away from it. The sum is of whole numbers, so its order does not matter."""
    grey = _grey(image)
    mean = np.float32(int(grey.sum(dtype=np.int64)) / grey.size)
    return _blend(image, mean, factor)


def _saturation(image: torch.Tensor, factor: float) -> torch.Tensor:
    return _blend(image, _grey(image).astype(np.float32), factor)


def _hue(image: torch.Tensor, factor: float) -> torch.Tensor:
    """Torchvision's own: no operation of it can be fused."""
    changed: torch.Tensor = F.adjust_hue(image, factor)
    return changed


_STEPS = (_brightness, _contrast, _saturation, _hue)


def _grey(image: torch.Tensor) -> npt.NDArray[np.uint8]:
    red, green, blue = (
        channel * share for channel, share in zip(image.numpy().astype(np.float32), _GREY, strict=True)
    )
    grey: npt.NDArray[np.uint8] = (red + green + blue).astype(np.uint8)
    return grey


def _blend(image: torch.Tensor, other: _Floats | np.float32, factor: float) -> torch.Tensor:
    return _levels(image.numpy() * np.float32(factor) + other * np.float32(1.0 - factor))


def _levels(values: _Floats) -> torch.Tensor:
    """Whole levels 0 to 255, rounded down as in torchvision."""
    return torch.from_numpy(np.clip(values, 0, 255).astype(np.uint8))
