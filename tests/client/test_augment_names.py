"""``--augment``: the names that torchvision's users know, and one line for what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchvision.transforms import v2

from hapi.cli.train import parser
from hapi.client.augment import parsed
from hapi.client.dataset_choice import augmented
from hapi.config.settings import load, overrides_of
from hapi.data.manifest import SampleLayout
from hapi.errors import UsageError
from hapi.train.settings import TrainSettings
from hapi.wire.references import Augmentation, TransformSpec

SPEC = TransformSpec.for_image_size(32)
IMAGES = SampleLayout(kind="encoded")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("imagenet",), Augmentation(scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5)),
        (("crop-flip",), Augmentation(padding=4, flip=0.5)),
        (("crop:padding=0",), Augmentation(padding=0)),
        (("crop:padding=8", "flip:p=1"), Augmentation(padding=8, flip=1.0)),
        (("resized-crop:scale=0.2-1",), Augmentation(scale=(0.2, 1.0), ratio=(3 / 4, 4 / 3))),
        (
            ("resized-crop:ratio=1-1:scale=0.5-0.5", "jitter:hue=0.1:brightness=0.4"),
            Augmentation(scale=(0.5, 0.5), ratio=(1.0, 1.0), brightness=0.4, hue=0.1),
        ),
        (("crop-flip", "jitter:contrast=0.4"), Augmentation(padding=4, flip=0.5, contrast=0.4)),
    ],
    ids=str,
)  # fmt: skip
def test_names(texts: tuple[str, ...], expected: Augmentation) -> None:
    assert parsed(texts) == expected
    assert augmented(SPEC, IMAGES, texts) == TransformSpec(resize=SPEC.resize, crop=32, augment=expected)


def test_defaults_are_torchvisions() -> None:
    crop, flip = v2.RandomResizedCrop(8), v2.RandomHorizontalFlip()
    assert parsed(("imagenet",)) == Augmentation(
        scale=tuple(crop.scale), ratio=tuple(crop.ratio), flip=flip.p
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("texts", "match"),
    [
        (("imagnet",), "no 'imagnet'; did you mean 'imagenet'"),
        (("rotate",), "no 'rotate'; known are imagenet, crop-flip, resized-crop, crop, flip, jitter"),
        (("flip:p=2",), "--augment.flip: expected a number from 0 to 1, got 2.0"),
        (("flip:p=nan",), "--augment.flip: expected a number from 0 to 1, got nan"),
        (("flip:p=0",), "--augment: nothing in it is random"),
        (("flip:p",), "flip has no option 'p'; write flip:p="),
        (("flip:q=1",), "flip has no option 'q=1'; write flip:p="),
        (("flip:p=x",), "flip:p=x: expected a number"),
        (("crop:padding=1.5",), "expected a whole number"),
        (("crop:padding=-1",), "--augment.padding: expected an integer from 0 to"),
        (("resized-crop:scale=0.5",), "expected two numbers such as 0.2-1"),
        (("resized-crop:scale=0-1",), "--augment.scale: expected a number from"),
        (("resized-crop:scale=0.5-0.1",), "--augment.scale: 0.5 to 0.1 is the wrong way round"),
        (("resized-crop:ratio=nan-nan",), "--augment.ratio: expected a number from 0.1 to 10, got nan"),
        (("jitter",), "jitter needs what to change"),
        (("jitter:hue=1",), "--augment.hue: expected a number from 0 to 0.5"),
        (("imagenet", "flip"), "flip is given twice"),
        (
            ("imagenet", "crop"),
            "--augment: scale belongs to a resized crop, padding to a plain one; give one of them",
        ),
        (("",), "no ''"),
    ],
    ids=str,
)
def test_wrong_names(texts: tuple[str, ...], match: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(texts)
    assert match in str(caught.value) and "\n" not in str(caught.value)


def test_samples_that_cannot_be_augmented() -> None:
    ready = SampleLayout(kind="tensor", sample_shape=(3, 32, 32), sample_dtype="float32")
    with pytest.raises(UsageError, match="--augment: these samples are stored ready for the model"):
        augmented(None, ready, ("imagenet",))
    with pytest.raises(UsageError, match="--augment: colours can be changed of images and of uint8 samples"):
        augmented(SPEC, ready, ("jitter:hue=0.1",))
    rows = SampleLayout(kind="tensor", sample_shape=(32,), sample_dtype="uint8")
    with pytest.raises(UsageError, match="--augment: a transform needs samples of shape"):
        augmented(SPEC, rows, ("flip",))
    assert augmented(None, rows, ()) is None and augmented(SPEC, IMAGES, ()) is SPEC


def test_as_flags_and_as_a_file(tmp_path: Path) -> None:
    def settings(*flags: str) -> Any:
        args = parser().parse_args([*flags])
        return load(TrainSettings, args.experiment, overrides_of(args, TrainSettings)).value.augment

    assert settings() == ()
    given = ("resized-crop:scale=0.2-1", "flip")
    assert settings("--augment", "resized-crop:scale=0.2-1,flip") == given
    assert settings("--augment", given[0], "--augment", given[1]) == given
    file = tmp_path / "exp.yaml"
    file.write_text("augment: [resized-crop:scale=0.2-1, flip]\n")
    assert settings(str(file)) == given
    file.write_text("augment: imagenet\n")
    assert settings(str(file)) == ("imagenet",)
