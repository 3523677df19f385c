"""Random transforms: torchvision's pixels for what was drawn, whatever the batch, the order and the threads."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from hapi.data.manifest import SampleLayout
from hapi.data.transforms import pipeline as transform_module
from hapi.data.transforms.color_jitter import jittered
from hapi.data.transforms.pipeline import input_batch, input_shape
from hapi.data.transforms.random_params import FLIP, padded_crop, resized_crop, uniforms
from hapi.errors import BadRequestError, DataError, UnprocessableError, UsageError
from hapi.ingest.pack_options import PackOptions
from hapi.wire.references import Augmentation, Draw, TransformSpec
from hapi.wire.samples import Samples, offsets_of

ENCODED = SampleLayout(kind="encoded")
RESIZED = Augmentation(scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5)
PADDED = Augmentation(padding=4, flip=0.5)
ALL = replace(RESIZED, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)


def spec(augment: Augmentation, side: int = 24, seed: int = 3, epoch: int = 1) -> TransformSpec:
    return replace(TransformSpec.for_image_size(side), augment=augment, draw=Draw(seed=seed, epoch=epoch))


def make_samples(parts: list[bytes], ids: list[int] | None = None) -> Samples:
    known = np.array(range(100, 100 + len(parts)) if ids is None else ids, dtype=np.int64)
    offsets = offsets_of(np.array([len(p) for p in parts], dtype=np.int64))
    return Samples(ids=known, data=np.frombuffer(b"".join(parts), np.uint8), offsets=offsets, labels=known)


def encode(width: int, height: int, seed: int = 0, form: str = "PNG", mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, form)
    return out.getvalue()


def photos(count: int) -> list[bytes]:
    return [
        encode(40 + 5 * i, 80 - 3 * i, i, "JPEG" if i % 2 else "PNG", "L" if i % 3 else "RGB")
        for i in range(count)
    ]


def plain(data: bytes, asked: TransformSpec, sample: int) -> torch.Tensor:
    """What torchvision's functions make of what was drawn for this sample; no colours."""
    assert asked.augment is not None and asked.draw is not None
    augment, side = asked.augment, asked.crop
    numbers = uniforms(asked.draw.seed, asked.draw.epoch, np.array([sample]))[0]
    image = F.pil_to_tensor(Image.open(io.BytesIO(data)).convert("RGB"))
    if augment.scale is not None and augment.ratio is not None:
        box = resized_crop(numbers, image.shape[1], image.shape[2], augment.scale, augment.ratio)
        image = F.resized_crop(image, *box, [side, side])
    elif augment.padding is not None:
        image = F.pad(F.resize(image, [asked.resize]), [augment.padding])
        box = padded_crop(numbers, image.shape[1] - 2 * augment.padding, image.shape[2] - 2 * augment.padding,
                          augment.padding, side)  # fmt: skip
        image = F.crop(image, box.top + augment.padding, box.left + augment.padding, side, side)
    else:
        image = F.center_crop(F.resize(image, [asked.resize]), [side, side])
    if numbers[FLIP] < augment.flip:
        image = F.horizontal_flip(image)
    return v2.Normalize(asked.mean, asked.std)(image.float() / 255)


@given(
    st.sampled_from([RESIZED, PADDED, Augmentation(flip=0.7), Augmentation(padding=0), replace(PADDED, padding=11)]),
    st.integers(1, 120), st.integers(1, 120), st.integers(12, 60), st.integers(0, 1 << 40), st.sampled_from("LP"),
)  # fmt: skip
def test_bit_identical_to_torchvision(
    augment: Augmentation, width: int, height: int, side: int, sample: int, mode: str
) -> None:
    asked, data = spec(augment, side), encode(width, height, mode=mode)
    got = input_batch(make_samples([data], [sample]), ENCODED, asked)
    assert torch.equal(got[0], plain(data, asked, sample))


@pytest.mark.parametrize("augment", [RESIZED, PADDED, ALL], ids=["resized", "padded", "all"])
def test_neighbours_order_and_threads_have_no_influence(augment: Augmentation) -> None:
    parts, asked = photos(11), spec(augment)
    alone = [input_batch(make_samples([p], [100 + i]), ENCODED, asked)[0] for i, p in enumerate(parts)]
    for threads in (1, 2, 5):
        assert torch.equal(input_batch(make_samples(parts), ENCODED, asked, threads), torch.stack(alone))
    backwards = make_samples(parts[::-1], list(range(110, 99, -1)))
    assert torch.equal(input_batch(backwards, ENCODED, asked), torch.stack(alone[::-1]))


def test_other_epochs_seeds_and_samples_look_different_and_torchs_generator_is_left_alone() -> None:
    data = encode(60, 50)
    state = torch.get_rng_state()
    seen = {
        input_batch(make_samples([data], [sample]), ENCODED, spec(ALL, seed=seed, epoch=epoch))
        .numpy()
        .tobytes()
        for seed, epoch, sample in [(3, 1, 5), (3, 2, 5), (4, 1, 5), (3, 1, 6)]
    }
    assert len(seen) == 4 and torch.equal(torch.get_rng_state(), state)


# -- colours -----------------------------------------------------------------------------------------------------

_THEIRS = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


@given(
    st.integers(0, 3),
    st.floats(0, 2),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(0, 1 << 30),
    st.booleans(),
)
def test_colours_are_torchvisions_within_a_level(
    kind: int, factor: float, width: int, height: int, seed: int, grey: bool
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (1 if grey else 3, height, width), dtype=np.uint8)
    image = torch.from_numpy(np.repeat(pixels, 3, axis=0) if grey else pixels)
    before = image.clone()
    factor = (factor - 1) / 2 if kind == 3 else factor
    mine, theirs = jittered(image, [(kind, factor)]), _THEIRS[kind](image, factor)
    assert mine.dtype == torch.uint8 and mine.shape == image.shape and torch.equal(image, before)
    difference = (mine.int() - theirs.int()).abs()
    if kind in (0, 3):
        assert not difference.any()
    elif kind == 1:  # one grey that is rounded otherwise may move the mean, and with it pixels at a border
        assert difference.max() <= 1
    else:
        assert difference.max() <= 1 and (grey or (difference > 0).float().mean() <= 0.2)


def test_colours_of_a_photo_are_nearly_all_torchvisions() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 224, 224), dtype=np.uint8)
    image = torch.from_numpy(pixels)
    for kind, theirs in enumerate(_THEIRS):
        factor = 0.07 if kind == 3 else 1.31
        assert (jittered(image, [(kind, factor)]) == theirs(image, factor)).float().mean() > 0.999


_JITTERED = """
import hashlib, numpy as np, torch
from hapi.data.transforms.color_jitter import jittered
rng, digest = np.random.default_rng(1), hashlib.sha256()
for side in (61, 224, 301):
    ramp = np.add.outer(np.arange(side), np.arange(side)) * 255 / (2 * side)
    noise, one = rng.integers(0, 256, (3, side, side)), rng.integers(0, 256, (1, side, side))
    for values in (noise, np.repeat(one, 3, axis=0), 250 + noise % 6, np.stack([ramp, ramp * 0.9, ramp * 0.8])):
        for kind, factor in ((0, 1.3), (1, 0.7), (1, 1.21), (2, 0.6), (2, 1.37), (3, 0.07)):
            image = torch.from_numpy(values.astype(np.uint8))
            digest.update(jittered(image, [(kind, float(factor))]).numpy().tobytes())
print(torch.backends.cpu.get_cpu_capability(), digest.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.long
def test_colours_are_the_same_on_every_processor() -> None:
    """With torch's code for any processor and for this one, and with other numbers of threads."""
    found = [
        subprocess.run(
            [sys.executable, "-c", f"import torch; torch.set_num_threads({threads})\n{_JITTERED}"],
            capture_output=True, text=True, check=True, timeout=240, env={**os.environ, **more},
        ).stdout.split()
        for threads, more in ((1, {}), (3, {}), (1, {"ATEN_CPU_CAPABILITY": "default"}))
    ]  # fmt: skip
    assert found[2][0] in ("DEFAULT", "NO")
    assert len({digest for _, digest in (line[-2:] for line in found)}) == 1


def test_the_order_of_colour_steps_matters() -> None:
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 9, 9), dtype=np.uint8))
    steps = [(0, 1.4), (1, 0.6)]
    expected = F.adjust_contrast(F.adjust_brightness(image, 1.4), 0.6)
    assert (jittered(image, steps).int() - expected.int()).abs().max() <= 1
    assert not torch.equal(jittered(image, steps), jittered(image, steps[::-1]))


# -- stored tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augment", [RESIZED, PADDED, Augmentation(flip=1.0)], ids=["resized", "padded", "flip"]
)
def test_uint8_tensors_are_treated_as_the_images_they_were(channels: int, augment: Augmentation) -> None:
    values = np.random.default_rng(0).integers(0, 256, (5, channels, 24, 24), dtype=np.uint8)
    layout = SampleLayout(kind="tensor", sample_shape=(channels, 24, 24), sample_dtype="uint8")
    asked = replace(spec(augment), resize=24)
    got = input_batch(make_samples([v.tobytes() for v in values]), layout, asked, threads=2)
    for position, value in enumerate(values):
        out = io.BytesIO()
        Image.fromarray(value[0] if channels == 1 else value.transpose(1, 2, 0)).save(out, "PNG")
        assert torch.equal(got[position], plain(out.getvalue(), asked, 100 + position))


def test_a_stored_tensor_of_the_right_size_is_not_resized_before_a_padded_crop() -> None:
    """CIFAR's recipe on what --preprocess stores: the pixels stay as they are."""
    value = np.random.default_rng(0).integers(1, 256, (3, 24, 24), dtype=np.uint8)
    layout = SampleLayout(kind="tensor", sample_shape=(3, 24, 24), sample_dtype="uint8")
    asked = replace(spec(Augmentation(padding=4)), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert asked.resize > 24
    got = (input_batch(make_samples([value.tobytes()]), layout, asked)[0] * 255).round().to(torch.uint8)
    padded = np.pad(value, ((0, 0), (4, 4), (4, 4)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 24, 24))[0]
    assert (windows == got.numpy()).all(axis=(2, 3, 4)).any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_float_tensors_are_cropped_and_flipped_but_keep_their_colours(dtype: str) -> None:
    value = np.random.default_rng(0).normal(size=(3, 30, 40)).astype(dtype)
    layout = SampleLayout(kind="tensor", sample_shape=(3, 30, 40), sample_dtype=dtype)
    asked = spec(replace(RESIZED, flip=1.0))
    got = input_batch(make_samples([value.tobytes()]), layout, asked)[0]
    box = resized_crop(uniforms(3, 1, np.array([100]))[0], 30, 40, (0.08, 1.0), (3 / 4, 4 / 3))
    image = torch.from_numpy(value if dtype == "float16" else value.astype(np.float32))
    image = F.horizontal_flip(F.resized_crop(image, *box, [24, 24])).float()
    torch.testing.assert_close(got, v2.Normalize(asked.mean, asked.std)(image), rtol=1e-6, atol=1e-6)
    with pytest.raises(UnprocessableError, match=f"these are {dtype}: leave jitter out"):
        input_shape(layout, spec(ALL))


# -- what cannot be ----------------------------------------------------------------------------------------------


def test_a_random_transform_without_its_draw_is_refused() -> None:
    with pytest.raises(UnprocessableError, match="needs a seed and an epoch"):
        input_batch(make_samples([encode(9, 9)]), ENCODED, replace(spec(RESIZED), draw=None))
    with pytest.raises(UnprocessableError, match=r"a padding of 24 leaves nothing.*24 x 24: choose less"):
        input_shape(ENCODED, spec(replace(PADDED, padding=24)))
    flat = SampleLayout(kind="tensor", sample_shape=(8,), sample_dtype="uint8")
    with pytest.raises(UnprocessableError, match="a transform needs samples of shape"):
        input_shape(flat, spec(RESIZED))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = io.BytesIO()
    Image.new("1", (10_000, 9_000)).save(bomb, "PNG")
    for augment in (RESIZED, PADDED, Augmentation(flip=0.5)):
        with pytest.raises(DataError, match=r"sample 100: .*too large"):
            input_batch(make_samples([bomb.getvalue()]), ENCODED, spec(augment))
    thin = encode(1, 30_000)
    with pytest.raises(DataError, match=r"sample 100.*too long"):
        input_batch(make_samples([thin]), ENCODED, spec(PADDED, 224))
    assert input_batch(make_samples([thin]), ENCODED, spec(RESIZED, 224)).shape == (1, 3, 224, 224)
    monkeypatch.setattr(transform_module, "MAX_PIXELS", 900)
    with pytest.raises(DataError, match=r"sample 100: a part of \d+ x \d+ is too long to be resized to 40"):
        input_batch(make_samples([encode(29, 30)]), ENCODED, spec(replace(RESIZED, scale=(1.0, 1.0)), 40))


def test_a_damaged_sample_is_named() -> None:
    parts = [encode(20, 20), encode(20, 20, form="JPEG")[:200], encode(20, 20)]
    with pytest.raises(DataError, match="sample 101: cannot be decoded"):
        input_batch(make_samples(parts), ENCODED, spec(ALL), 2)


def test_a_data_sets_own_transform_is_not_random() -> None:
    for asked in (spec(RESIZED), replace(spec(RESIZED), draw=None)):
        with pytest.raises(UsageError, match="not random; give --augment"):
            PackOptions(transform=asked).checked()
        with pytest.raises(BadRequestError, match="unknown field 'augment'"):
            TransformSpec.from_json(asked.to_json())


def test_what_a_transform_says_of_itself() -> None:
    fixed: Any = TransformSpec.for_image_size(24)
    assert not fixed.random and fixed.at(3, 1) is fixed
    drawn = replace(fixed, augment=RESIZED).at(3, 1)
    assert drawn == spec(RESIZED) and drawn.random and drawn != drawn.at(3, 2)
