"""Model files by their path: a fine-tuned network, its transform and its classes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import nn

from hapi.data.transforms.decode import decode_image
from hapi.data.transforms.pipeline import transformed
from hapi.errors import DataError
from hapi.models.model_file import ModelCard
from hapi.models.zoo.architectures import ImportRule
from hapi.paths import open_file
from hapi.train.outputs.from_checkpoint import FrozenSource, read_network
from hapi.wire.references import TransformSpec

if TYPE_CHECKING:
    from PIL import Image

__all__ = ("FrozenSource", "ImageTransform", "LoadedModel", "load_model")


class ImageTransform:
    """From an image to a network's input, bit for bit as in training (without what was random there).

    >>> import PIL.Image
    >>> from hapi.api.model_files import ImageTransform
    >>> from hapi.wire.references import TransformSpec
    >>> to_input = ImageTransform(TransformSpec.for_image_size(64))
    >>> tuple(to_input(PIL.Image.new("RGB", (100, 80))).shape)
    (3, 64, 64)
    """

    def __init__(self, spec: TransformSpec) -> None:
        self.spec = spec
        """Sides in pixels, mean and standard deviation by channel."""

    def __call__(self, image: str | Path | bytes | Image.Image) -> torch.Tensor:
        """The input float32 [3, crop, crop] of an image file, its bytes or a PIL image.

        Raises:
            DataError: the image cannot be read or decoded; the message names the file.
        """
        if isinstance(image, bytes):
            return transformed(decode_image(image), self.spec)
        if isinstance(image, str | Path):
            try:
                return transformed(decode_image(_content(Path(image))), self.spec)
            except DataError as error:
                raise DataError(f"image {image}: {error}") from None
        pixels = np.array(image.convert("RGB"))
        return transformed(torch.from_numpy(pixels).permute(2, 0, 1), self.spec)

    def __repr__(self) -> str:
        return f"ImageTransform({self.spec})"


def _content(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}") from None


class LoadedModel(NamedTuple):
    """A fine-tuned network, ready for use; made by :func:`load_model`."""

    module: nn.Module
    """In eval mode, on the CPU."""
    transform: ImageTransform | None
    """From an image to its input; None for a network that takes arrays as they are."""
    classes: tuple[str, ...]
    """Names of its outputs."""
    card: ModelCard
    """All that the file says."""


def load_model(
    path: str | Path,
    *,
    source: FrozenSource | None = None,
    best: bool = False,
    allow_import: ImportRule = False,
) -> LoadedModel:
    """Load a fine-tuned network from a file that a training or ``hapi export`` wrote::

        model = hapi.load_model("run/model.safetensors")
        outputs = model.module(model.transform("rose.jpg")[None])
        print(model.classes[outputs.argmax()])

    Args:
        path: the model file, or a checkpoint.
        source: where the weights of a checkpoint's frozen layers are, if no longer where they were.
        best: for a checkpoint: as it was after the best epoch.
        allow_import: whether the network's factory (``package.module:factory``) may be imported and called, if one
            makes it: yes, no, or which.

    Raises:
        ModelError: the file is damaged, is none of Hapi's, does not fit the installed library, or a checkpoint's frozen
            layers are not in reach.
    """
    module, card = read_network(path, source, best=best, allow_import=allow_import)
    transform = None if card.transform is None else ImageTransform(card.transform)
    return LoadedModel(module, transform, card.classes, card)
