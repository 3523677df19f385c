"""The path from stored bytes to the model's input, the same on both tiers, sample by sample.

It is bit-identical to the pipeline that a user would write with torchvision's ``transforms.v2``:
``Image.open().convert("RGB")``, ``PILToTensor``, ``Resize(antialias=True)``, ``CenterCrop``, ``float() /
255``, ``Normalize``. Neither neighbours in the batch nor the number of threads influence a sample. With a
random transform the same holds for ``v2.RandomResizedCrop`` and the others, given the draws of
:mod:`hapi.data.transforms.random_params`; ``v2.ColorJitter`` differs by a level, see
:mod:`hapi.data.transforms.color_jitter`.

Three things differ from it by a rounding: ``v2.ToDtype(scale=True)`` (multiplies by 1/255), the resize of the
older ``transforms``, and v2's own resize on a processor without AVX2, where torchvision resizes in float32.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from hapi.arrays import Floats
from hapi.data.manifest import SampleLayout
from hapi.data.transforms.color_jitter import jittered
from hapi.data.transforms.decode import MAX_PIXELS, decode_image
from hapi.data.transforms.decode_limits import NO_LIMITS, DecodeLimits, Held
from hapi.data.transforms.random_params import flips, jitter, padded_crop, resized_crop, uniforms
from hapi.errors import DataError, UnprocessableError
from hapi.lazy_torchvision import vision
from hapi.wire.references import Augmentation, TransformSpec
from hapi.wire.samples import Samples

F = vision("torchvision.transforms.v2.functional")

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_pools_guard = threading.Lock()


def input_shape(layout: SampleLayout, transform: TransformSpec | None) -> tuple[int, ...]:
    """Return the shape of one sample of :func:`input_batch`; :class:`UnprocessableError` when it is not
    determined.
    """
    shape = layout.sample_shape or ()
    if transform is None:
        if layout.kind == "encoded":
            raise UnprocessableError("encoded images need a transform: give an image size")
        return shape
    if layout.kind == "tensor" and (len(shape) != 3 or shape[0] not in (1, 3)):
        raise UnprocessableError(
            f"a transform needs samples of shape [3, H, W] or [1, H, W], not {list(shape)}"
        )
    if transform.augment is not None:
        _check_augment(layout, transform.augment, transform.crop)
    return transform.output_shape


def _check_augment(layout: SampleLayout, augment: Augmentation, side: int) -> None:
    if augment.jitters and layout.kind == "tensor" and layout.sample_dtype != "uint8":
        raise UnprocessableError(
            f"colours can be changed of images and of uint8 samples, these are {layout.sample_dtype}: "
            "leave jitter out, or pack images or uint8"
        )
    if augment.padding is not None and augment.padding >= side:
        raise UnprocessableError(
            f"a padding of {augment.padding} leaves nothing of an image in some crops of {side} x {side}: choose less"
        )


def input_batch(
    samples: Samples,
    layout: SampleLayout,
    transform: TransformSpec | None,
    threads: int = 1,
    out: _Floats | None = None,
    limits: DecodeLimits = NO_LIMITS,
) -> torch.Tensor:
    """Return the samples as a model's input, float32 [n, C, H, W].

    Encoded images are decoded, made RGB and transformed. Tensors of floats are taken as they are, uint8 is
    scaled to 0..1; with a transform they are resized and cropped where the size differs (grey becomes RGB)
    and normalised.

    Args:
        samples: stored samples.
        layout: form of each.
        transform: None for tensors that need none. A random one needs its ``draw``, which with the sample's
            id decides the outcome.
        threads: that work side by side.
        out: buffer for the result, float32; None for new memory.
        limits: bounds of every image that is decoded.

    Raises:
        DataError: a sample cannot be decoded; the message names it.
        UnprocessableError: the transform does not fit the layout.
    """
    if out is None:
        out = np.empty((len(samples), *input_shape(layout, transform)), dtype=np.float32)
    parts = max(1, min(threads * 4, len(samples))) if threads > 1 else 1
    bounds = np.linspace(0, len(samples), parts + 1).astype(int).tolist()
    drawn = _drawn(samples, transform)

    def work(part: int) -> None:
        """Transform one piece of the samples."""
        for position in range(bounds[part], bounds[part + 1]):
            numbers = None if drawn is None else drawn[position]
            _one(samples, position, layout, transform, numbers, out[position], limits)

    if parts == 1:
        work(0)
    else:
        for _ in _pool(threads).map(work, range(parts)):
            pass
    return torch.from_numpy(out)


def _drawn(samples: Samples, transform: TransformSpec | None) -> Floats | None:
    if transform is None or not transform.random:
        return None
    if transform.draw is None:
        raise UnprocessableError("a random transform needs a seed and an epoch")
    return uniforms(transform.draw.seed, transform.draw.epoch, samples.ids)


def _one(
    samples: Samples,
    position: int,
    layout: SampleLayout,
    transform: TransformSpec | None,
    numbers: Floats | None,
    out: _Floats,
    limits: DecodeLimits,
) -> None:
    data = samples.sample(position)
    held = Held(limits, transform)
    try:
        if transform is None:
            _as_stored(data, layout, out)
            return
        encoded = layout.kind == "encoded"
        image = decode_image(data, held) if encoded else _image_tensor(data, layout)
        # A tensor that has the size already, as --preprocess stores it, was resized before.
        sized = not encoded and tuple(image.shape) == transform.output_shape
        if transform.augment is not None and numbers is not None:
            image = _augmented(image, transform, transform.augment, numbers, sized)
        elif not sized:
            image = resize_and_crop(image, transform)
        _normalised(image, transform, out)
        del image
    except DataError as error:
        raise DataError(
            f"sample {samples.ids[position]}: {error}; "
            "'hapi pack' or 'hapi index' with --decode --skip-bad leaves such out"
        ) from error
    finally:
        held.leave()


def _as_stored(data: _Bytes, layout: SampleLayout, out: _Floats) -> None:
    if layout.kind == "encoded":
        raise UnprocessableError("encoded images need a transform: give an image size")
    tensor = _tensor(data, layout)
    out[...] = tensor.numpy()
    if tensor.dtype == torch.uint8:
        np.divide(out, np.float32(255), out=out)


def _tensor(data: _Bytes, layout: SampleLayout) -> torch.Tensor:
    dtype, shape = np.dtype(layout.sample_dtype), layout.sample_shape or ()
    if data.size != int(np.prod(shape)) * dtype.itemsize:
        raise DataError(f"{data.size} bytes are no {dtype} tensor of shape {list(shape)}")
    # The copy aligns the bytes: a sample may start anywhere in the buffer.
    return torch.from_numpy(np.frombuffer(data.tobytes(), dtype=dtype).reshape(shape).copy())


def _image_tensor(data: _Bytes, layout: SampleLayout) -> torch.Tensor:
    """A stored tensor as an image [3, H, W]."""
    tensor = _tensor(data, layout)
    if tensor.dtype == torch.float64:
        tensor = tensor.float()
    return tensor.expand(3, -1, -1) if tensor.shape[0] == 1 else tensor


def _augmented(
    image: torch.Tensor, transform: TransformSpec, augment: Augmentation, numbers: Floats, sized: bool
) -> torch.Tensor:
    """``image`` [3, H, W] after the random transforms; ``sized``: it needs no resizing but theirs."""
    side = transform.crop
    if augment.scale is not None and augment.ratio is not None:
        box = resized_crop(numbers, image.shape[-2], image.shape[-1], augment.scale, augment.ratio)
        if side * max(box.height, box.width) > MAX_PIXELS:  # between its two passes a resize holds so many
            raise DataError(f"a part of {box.width} x {box.height} is too long to be resized to {side}")
        image = F.resized_crop(image, *box, [side, side], F.InterpolationMode.BILINEAR, antialias=True)
    else:
        image = image if sized else _resized(image, transform)
        if augment.padding is None:
            image = F.center_crop(image, [side, side])
        else:
            shape = int(image.shape[-2]), int(image.shape[-1])
            image = F.crop(image, *padded_crop(numbers, *shape, augment.padding, side))
    if flips(numbers, augment.flip):
        image = F.horizontal_flip(image)
    amounts = (augment.brightness, augment.contrast, augment.saturation, augment.hue)
    return jittered(image, jitter(numbers, amounts))


def _normalised(image: torch.Tensor, transform: TransformSpec, out: _Floats) -> None:
    """Scale (uint8 only) and normalise ``image`` [3, H, W] into ``out``.

    In numpy, since torch would start threads of its own. Division and subtraction are exactly
    rounded in both, so the result is torch's.
    """
    out[...] = image.numpy()
    if image.dtype == torch.uint8:
        np.divide(out, np.float32(255), out=out)
    mean = np.array(transform.mean, dtype=np.float32)[:, None, None]
    std = np.array(transform.std, dtype=np.float32)[:, None, None]
    np.subtract(out, mean, out=out)
    np.divide(out, std, out=out)


def transformed(image: torch.Tensor, transform: TransformSpec) -> torch.Tensor:
    """One decoded image (uint8 [3, H, W]) as a model's input, float32 [3, crop, crop]: that of :func:`input_batch`."""
    out = np.empty(transform.output_shape, dtype=np.float32)
    _normalised(resize_and_crop(image, transform), transform, out)
    return torch.from_numpy(out)


def resize_and_crop(image: torch.Tensor, transform: TransformSpec) -> torch.Tensor:
    """Resize the short side of ``image`` [3, H, W] to ``transform.resize`` and cut its centre out."""
    cropped: torch.Tensor = F.center_crop(_resized(image, transform), [transform.crop, transform.crop])
    return cropped


def check_resize(image: torch.Tensor, transform: TransformSpec) -> None:
    """Raise :class:`DataError` for an ``image`` [3, H, W] whose long side would be too long."""
    height, width = int(image.shape[-2]), int(image.shape[-1])
    if transform.resize**2 * max(height, width) // min(height, width) > MAX_PIXELS:
        raise DataError(f"an image of {width} x {height} is too long to be resized to {transform.resize}")


def _resized(image: torch.Tensor, transform: TransformSpec) -> torch.Tensor:
    check_resize(image, transform)
    resized: torch.Tensor = F.resize(
        image, [transform.resize], interpolation=F.InterpolationMode.BILINEAR, antialias=True
    )
    return resized


def _pool(threads: int) -> ThreadPoolExecutor:
    """The shared pool of this many threads; a forked child gets its own."""
    key = (os.getpid(), threads)
    with _pools_guard:
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="hapi-decode")
        return _pools[key]
