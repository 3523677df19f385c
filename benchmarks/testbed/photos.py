"""The evaluation's data: crops of real photographs in each form in which samples can be stored, and pushed models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.testbed.cells import Form
from hapi.errors import UsageError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions, Preprocess
from hapi.ingest.sources.open import open_source
from hapi.models.zoo.build import ModelSpec, build
from hapi.models.zoo.freeze import choose_freeze
from hapi.repository.built import prefix_bytes
from hapi.repository.push import push
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec

_PREPROCESS: Mapping[Form, Preprocess] = {"images": "none", "uint8": "uint8", "float32": "float32"}
FORMS: tuple[Form, ...] = tuple(_PREPROCESS)


def make_store(folder: Path, samples: int, side: int, forms: Sequence[Form] = FORMS) -> Path:
    """A store with ``samples`` crops of scikit-learn's photographs: a dataset for each form, of its name."""
    crops = folder / "crops"
    write_crops(crops, samples, side)
    store, transform = folder / "store", TransformSpec.for_image_size(side)
    for form in forms:
        options = PackOptions(transform=transform, preprocess=_PREPROCESS[form])
        pack(open_source(str(crops)), open_store(str(store)), form, options)
    return store


def push_model(store: Path, model: str, side: int) -> None:
    """Put ``model`` with random weights into the store, under its own name."""
    spec = ModelSpec(architecture=model, weights="random:0", input_shape=(3, side, side))
    push(open_store(str(store)), model, build(spec), spec)


def push_twins(store: Path, model: str, side: int, names: tuple[str, str], shared: int) -> tuple[int, int]:
    """Two models that differ in every layer from ``shared`` + 1 on, as two jobs' from one backbone do.

    (bytes of the layers up to the freeze, bytes of those among them that differ).
    """
    spec = ModelSpec(architecture=model, weights="random:0", input_shape=(3, side, side))
    layers, target = build(spec), open_store(str(store))
    freeze = choose_freeze(layers, None)
    push(target, names[0], layers, spec)
    state = layers.module.state_dict()
    with torch.no_grad():
        for tensor in layers.tensor_names(shared, len(layers)):
            if state[tensor].is_floating_point():
                state[tensor].add_(0.001)
    push(target, names[1], layers, spec)
    return prefix_bytes(layers, freeze), prefix_bytes(layers, freeze) - prefix_bytes(layers, shared)


def write_crops(target: Path, samples: int, side: int) -> None:
    """PNG files, one folder a class: about a fifth of a float32 tensor's bytes, as ImageNet's JPEGs are."""
    import numpy as np
    from PIL import Image

    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise UsageError(
            f"the benchmark's data are scikit-learn's photographs: pip install 'hapi-split[quickstart]' ({error})"
        ) from error
    photos = load_sample_images().images
    generator = np.random.default_rng(0)
    for number in range(samples):
        photo = photos[number % len(photos)]
        top = generator.integers(0, photo.shape[0] - side + 1)
        left = generator.integers(0, photo.shape[1] - side + 1)
        class_folder = target / f"photo{number % len(photos)}"
        class_folder.mkdir(parents=True, exist_ok=True)
        crop = np.ascontiguousarray(photo[top : top + side, left : left + side])
        Image.fromarray(crop).save(class_folder / f"{number:06d}.png")
