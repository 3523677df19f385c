"""Settings and figures that trainings save beside weights, read as objects that can do nothing.

Reference scripts of torchvision, DeiT, DETR and others save their ``argparse.Namespace``, and NumPy's numbers, beside
the state dict. torch's reader without code refuses the whole file for them. Here their classes are never looked up:
what stands under these names becomes an :class:`Inert` object, which takes any arguments and keeps none. So no code of
theirs runs, and any other name is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

_NAMES = (
    "argparse.Namespace", "types.SimpleNamespace", "numpy.dtype", "numpy.ndarray", "typing.Any",
    *map(".".join, product(("numpy.core.multiarray", "numpy._core.multiarray"), ("scalar", "_reconstruct"))),
    *map(".".join, product(("pathlib", "pathlib._local"), ("PosixPath", "PurePosixPath", "WindowsPath"))),
    *map("datetime.{}".format, ("datetime", "date", "time", "timedelta", "timezone")),
    "omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig",
    *map("omegaconf.base.{}".format, ("ContainerMetadata", "Metadata")),
    *map("omegaconf.nodes.{}".format, ("AnyNode", "StringNode", "IntegerNode", "FloatNode", "BooleanNode")),
)  # fmt: skip
"""Names of data without code, as pickles of several versions of Python and NumPy have them."""
_reading = threading.Lock()
"""torch keeps what is allowed for the whole process."""


class Inert:
    """An object of which nothing is kept."""

    def __new__(cls, *values: Any, **named: Any) -> Inert:
        """Return an object, whatever it was to be made of."""
        del values, named
        return super().__new__(cls)

    def __init__(self, *values: Any, **named: Any) -> None:
        """Keep nothing."""

    def __setstate__(self, state: Any) -> None:
        """Keep nothing."""


@contextmanager
def inert_objects() -> Iterator[None]:
    """Let ``torch.load(..., weights_only=True)`` read such objects in the block; one thread at a time."""
    with _reading, torch.serialization.safe_globals([(Inert, name) for name in _NAMES]):
        yield
