"""From stored bytes to the model's input, the same on both tiers, sample by sample.

Bit-identical to the pipeline that a user would write with torchvision's ``transforms.v2``:
``Image.open().convert("RGB")``, ``PILToTensor``, ``Resize(antialias=True)``, ``CenterCrop``, ``float() / 255``,
``Normalize``. Neither neighbours in the batch nor the number of threads have any influence on a sample.
What differs from it by a rounding: ``v2.ToDtype(scale=True)`` (multiplies by 1/255), the resize of the older
``transforms``, and v2's own resize on a processor without AVX2, where torchvision resizes in float32.
"""

from __future__ import annotations

import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from hapi.errors import DataError, UnprocessableError
from hapi.storage.dataset import Samples
from hapi.storage.manifest import SampleLayout
from hapi.storage.vision import vision
from hapi.wire.references import TransformSpec

F = vision("torchvision.transforms.v2.functional")

__all__ = [
    "SampleLayout",
    "TransformSpec",
    "check_image",
    "decode_image",
    "input_batch",
    "input_shape",
    "resize_and_crop",
]

MAX_PIXELS = 89_478_485
"""Largest image that is decoded, and largest result of a resize: Pillow's own limit, 256 MiB of RGB."""

FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP", "GIF")
"""What is decoded. Pillow knows more, some of which start other programs (EPS)."""

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_pools_guard = threading.Lock()


def input_shape(layout: SampleLayout, transform: TransformSpec | None) -> tuple[int, ...]:
    """Shape of one sample of :func:`input_batch`; :class:`UnprocessableError` when it is not determined."""
    if layout.kind == "encoded":
        if transform is None:
            raise UnprocessableError("encoded images need a transform: give an image size")
        return transform.output_shape
    shape = layout.sample_shape or ()
    if transform is None:
        return shape
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UnprocessableError(
            f"a transform needs samples of shape [3, H, W] or [1, H, W], not {list(shape)}"
        )
    return transform.output_shape


def input_batch(
    samples: Samples,
    layout: SampleLayout,
    transform: TransformSpec | None,
    threads: int = 1,
    out: _Floats | None = None,
) -> torch.Tensor:
    """The samples as a model's input, float32 [n, C, H, W], in memory of its own or in ``out``.

    Encoded images are decoded, made RGB and transformed. Tensors: floats are taken as they are, uint8 is
    scaled to 0..1; with a transform they are resized and cropped where the size differs (grey becomes RGB)
    and normalised. Raises :class:`DataError` naming the sample that cannot be decoded, and
    :class:`UnprocessableError` for a transform that does not fit the layout.
    """
    if out is None:
        out = np.empty((len(samples), *input_shape(layout, transform)), dtype=np.float32)
    pieces = max(1, min(threads * 4, len(samples))) if threads > 1 else 1
    bounds = np.linspace(0, len(samples), pieces + 1).astype(int).tolist()

    def work(piece: int) -> None:
        for position in range(bounds[piece], bounds[piece + 1]):
            _one(samples, position, layout, transform, out[position])

    if pieces == 1:
        work(0)
    else:
        for _ in _pool(threads).map(work, range(pieces)):
            pass
    return torch.from_numpy(out)


def _one(
    samples: Samples, position: int, layout: SampleLayout, transform: TransformSpec | None, out: _Floats
) -> None:
    data = samples.sample(position)
    try:
        if layout.kind == "encoded":
            if transform is None:
                raise UnprocessableError("encoded images need a transform: give an image size")
            _normalised(resize_and_crop(decode_image(data), transform), transform, out)
        else:
            _tensor_sample(data, layout, transform, out)
    except DataError as error:
        raise DataError(f"sample {samples.ids[position]}: {error}") from error


def _tensor_sample(data: _Bytes, layout: SampleLayout, transform: TransformSpec | None, out: _Floats) -> None:
    dtype, shape = np.dtype(layout.sample_dtype), layout.sample_shape or ()
    if data.size != int(np.prod(shape)) * dtype.itemsize:
        raise DataError(f"{data.size} bytes are no {dtype} tensor of shape {list(shape)}")
    # The copy aligns the bytes: a sample may start anywhere in the buffer.
    tensor = torch.from_numpy(np.frombuffer(data.tobytes(), dtype=dtype).reshape(shape).copy())
    if transform is None:
        out[...] = tensor.numpy()
        if dtype == np.uint8:
            np.divide(out, np.float32(255), out=out)
        return
    if dtype == np.float64:
        tensor = tensor.float()
    if shape[0] == 1:
        tensor = tensor.expand(3, -1, -1)
    if tuple(tensor.shape) != transform.output_shape:
        tensor = resize_and_crop(tensor, transform)
    _normalised(tensor, transform, out)


def _normalised(image: torch.Tensor, transform: TransformSpec, out: _Floats) -> None:
    """Scale (uint8 only) and normalise ``image`` [3, H, W] into ``out``.

    In numpy, since torch would start threads of its own.     Division and subtraction are exactly
    rounded in both, so the result is torch's.
    """
    out[...] = image.numpy()
    if image.dtype == torch.uint8:
        np.divide(out, np.float32(255), out=out)
    mean = np.array(transform.mean, dtype=np.float32)[:, None, None]
    std = np.array(transform.std, dtype=np.float32)[:, None, None]
    np.subtract(out, mean, out=out)
    np.divide(out, std, out=out)


def resize_and_crop(image: torch.Tensor, transform: TransformSpec) -> torch.Tensor:
    """``image`` [3, H, W] with its short side resized to ``transform.resize`` and its centre cut out."""
    height, width = int(image.shape[-2]), int(image.shape[-1])
    if transform.resize**2 * max(height, width) // min(height, width) > MAX_PIXELS:
        raise DataError(f"an image of {width} x {height} is too long to be resized to {transform.resize}")
    resized = F.resize(image, [transform.resize], interpolation=F.InterpolationMode.BILINEAR, antialias=True)
    cropped: torch.Tensor = F.center_crop(resized, [transform.crop, transform.crop])
    return cropped


def check_image(data: bytes | memoryview) -> None:
    """:class:`DataError` when the bytes do not begin like an image; cheap, the pixels are not decoded."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    # As in decode_image: Pillow raises nearly anything on a damaged file.
    except Exception as error:
        raise DataError(f"cannot be decoded as an image: {str(error)[:200]}") from error
    _check_size(image)


def _check_size(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"an image of {image.width} x {image.height} is too large (limit {MAX_PIXELS} pixels)"
        )


def decode_image(data: bytes | _Bytes) -> torch.Tensor:
    """An encoded image as uint8 RGB [3, H, W]; :class:`DataError` when it is none or too large."""
    try:
        image = Image.open(io.BytesIO(bytes(data)), formats=FORMATS)
        _check_size(image)
        rgb = image.convert("RGB")
    except DataError:
        raise
    # A damaged file makes Pillow raise nearly anything (SyntaxError, struct.error, IndexError ...).
    except Exception as error:
        raise DataError(f"cannot be decoded as an image: {str(error)[:200]}") from error
    tensor: torch.Tensor = F.pil_to_tensor(rgb)
    return tensor


def _pool(threads: int) -> ThreadPoolExecutor:
    """The shared pool of this many threads; a forked child gets its own."""
    key = (os.getpid(), threads)
    with _pools_guard:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="hapi-decode")
        return _pools[key]
