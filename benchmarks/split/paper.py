"""Figures that the HAPI texts report, for comparison with those measured here.

Their setting: two machines with T4 GPUs, 12 Gbit/s, inputs of 224 x 224. "Later" is the SoCC'24 text,
"earlier" the one before it. Only figures that the texts give as numbers are here; bars of their plots are not
read off.
"""

from __future__ import annotations

from collections.abc import Mapping

OPTIMALITY: Mapping[str, tuple[float, float, float, float, float, float]] = {
    "hapi": (59.2, 27.6, 9.2, 2.0, 2.0, 0.0),
    "nsg": (14.8, 29.3, 8.5, 6.4, 41.0, 0.0),
    "freeze": (8.2, 26.5, 12.2, 4.1, 49.0, 0.0),
    "min": (4.1, 28.6, 8.2, 6.1, 40.8, 12.2),
    "none": (12.2, 0.0, 0.0, 0.0, 34.7, 53.1),
}
"""Later text, Table 3: % of 49 cases optimal, within 5, 10, 15%, beyond, out of memory."""

MODEL_LOAD: Mapping[str, tuple[float, float]] = {
    "alexnet": (0.387, 0.500),
    "resnet18": (0.048, 0.242),
    "resnet50": (0.113, 0.346),
    "densenet121": (0.096, 0.481),
    "vgg11": (0.838, 1.511),
    "vgg19": (0.811, 1.499),
    "transformer": (0.382, 0.906),
}
"""Later text, Table 4: seconds of a request of 128 in loading the model, and in all, at HAPI's split for batch 128."""

BANDWIDTH_SPLITS: Mapping[float, int] = {
    0.05: 17, 0.1: 17, 0.5: 16, 1.0: 13, 2.0: 13, 3.0: 5, 5.0: 5, 10.0: 5, 12.0: 5,
}  # fmt: skip
"""Earlier text, Table 2: Gbit/s to HAPI's split of AlexNet at batch 8000."""

CPU_SPEEDUP = (5.05, 9.95)
"""Earlier text, section 5.2: HAPI's average and largest speed-up over its baseline on a client without GPUs."""

LARGEST_SPEEDUP = 2.5
"""Later text, section 5.2: over NoSplit."""

SMALL_LAYERS: Mapping[str, tuple[int, ...]] = {
    "alexnet": (3, 6), "resnet18": (4,), "resnet50": (4,), "densenet121": (9, 19),
}  # fmt: skip
"""Later text, sections 3 and 5.7: layers that it names for their small outputs."""
