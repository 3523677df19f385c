"""Random parameters of a sample in an epoch: a pure function of (seed, epoch, sample id).

They do not depend on the order of samples, the batch or any library's generator. As for the epoch order, a
fixed integer mix is used instead of a generator, and only operations that IEEE 754 and ``decimal`` define to
the last bit, so that all machines and versions draw the same.

The distributions are those of torchvision's ``RandomResizedCrop``, ``RandomCrop``, ``RandomHorizontalFlip``
and ``ColorJitter``. A sample has :data:`SLOTS` numbers, each for one purpose (``ATTEMPTS`` and the rest),
used or not: one transform's draws do not depend on which others are on.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hapi.arrays import Floats, IntArray
from hapi.data.epoch_order import mix64

ATTEMPTS = 10
"""Boxes that are tried before the centre is taken, as in torchvision: slot k has the k-th area, 10 + k its ratio."""
TOP, LEFT, FLIP = 20, 21, 22
JITTER, ORDER = 23, 27
"""First of four slots each: brightness, contrast, saturation, hue; and by whose order these are applied."""
SLOTS = 31

_GAMMA = 0x9E3779B97F4A7C15
"""SplitMix64's step, see :mod:`hapi.data.epoch_order`."""
_PURPOSE = 0x7472616E73666F72
"""Makes these numbers others than those that order an epoch ("transfor" in ASCII)."""
_MASK = (1 << 64) - 1
_EXACT = Context(prec=20)


class Box(NamedTuple):
    """Part that is cut out of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def uniforms(seed: int, epoch: int, ids: IntArray) -> Floats:
    """Return the random numbers of samples, float64 [n, SLOTS] in [0, 1), 53 random bits each.

    SplitMix64 as a counter: number k of a sample is ``mix(s + (k + 1) gamma)`` with ``s = mix(e + (id + 1)
    gamma)`` and e made from seed, epoch and purpose in the same way.

    Args:
        seed: 0 to 2**63 - 1.
        epoch: 0 to 2**63 - 1.
        ids: of the samples, int64 [n].
    """
    state = 0
    for value in (seed, epoch, _PURPOSE):
        state = int(mix64(np.array([(state + value + _GAMMA) & _MASK], dtype=np.uint64))[0])
    step = np.uint64(_GAMMA)
    samples = mix64((ids.astype(np.uint64) + np.uint64(1)) * step + np.array([state], dtype=np.uint64))
    counters = np.arange(1, SLOTS + 1, dtype=np.uint64) * step
    bits = mix64(samples[:, None] + counters)
    # The upper 53 bits fill a float64's mantissa exactly, so that no rounding can give 1.0.
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def resized_crop(
    numbers: Floats, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """Return the part of an image that ``RandomResizedCrop(scale, ratio)`` would cut out.

    The share of the area is uniform within ``scale``, the logarithm of width by height is uniform within
    ``ratio``. The centre is cut out when :data:`ATTEMPTS` of these do not fit into the image.

    Args:
        numbers: the sample's random numbers, [SLOTS].
        height: of the image, in pixels.
        width: of the image, in pixels.
        scale: smallest and largest share of the area.
        ratio: smallest and largest width by height.
    """
    logs = _logarithms(ratio)
    for attempt in range(ATTEMPTS):
        area = height * width * _between(numbers[attempt], *scale)
        aspect = float(_EXACT.exp(Decimal(_between(numbers[ATTEMPTS + attempt], *logs))))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = _below(numbers[TOP], height - box_height + 1)
            return Box(top, _below(numbers[LEFT], width - box_width + 1), box_height, box_width)
    box_height, box_width = height, width
    if width / height < ratio[0]:
        box_height = round(width / ratio[0])
    elif width / height > ratio[1]:
        box_width = round(height * ratio[1])
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def padded_crop(numbers: Floats, height: int, width: int, padding: int, side: int) -> Box:
    """Return the part that ``RandomCrop(side, padding)`` would cut out; it may begin at -``padding``.

    Args:
        numbers: the sample's random numbers, [SLOTS].
        height: of the image, at least ``side``.
        width: of the image, at least ``side``.
        padding: black pixels around the image.
        side: of the square part, in pixels.
    """
    top = _below(numbers[TOP], height + 2 * padding - side + 1) - padding
    return Box(top, _below(numbers[LEFT], width + 2 * padding - side + 1) - padding, side, side)


def flips(numbers: Floats, probability: float) -> bool:
    """Return whether ``RandomHorizontalFlip(probability)`` would mirror."""
    return bool(numbers[FLIP] < probability)


def jitter(numbers: Floats, amounts: tuple[float, float, float, float]) -> list[tuple[int, float]]:
    """Return the steps of ``ColorJitter(brightness, contrast, saturation, hue)``: (place of the amount,
    factor), in order.

    Factors are uniform within 1 - amount and 1 + amount, those of hue within plus and minus the amount.
    """
    order = np.argsort(numbers[ORDER : ORDER + 4], kind="stable").tolist()
    centres = (1.0, 1.0, 1.0, 0.0)
    return [
        (k, _between(numbers[JITTER + k], centres[k] - amounts[k], centres[k] + amounts[k]))
        for k in order
        if amounts[k]
    ]


def _between(number: float, low: float, high: float) -> float:
    return float(low + number * (high - low))


def _below(number: float, count: int) -> int:
    """One of 0 to ``count`` - 1, each as likely up to 2**-53."""
    return int(number * count)


@lru_cache(maxsize=64)
def _logarithms(ratio: tuple[float, float]) -> tuple[float, float]:
    low, high = (float(_EXACT.ln(Decimal(side))) for side in ratio)
    return low, high
