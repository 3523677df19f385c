"""The evaluation's data: crops of real photographs, packed by Hapi's own command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hapi.bench.cells import Form
from hapi.bench.tiers import environment, last_line
from hapi.errors import UsageError

_COMMAND_SECONDS = 1800.0
_PREPROCESS: Mapping[Form, str] = {"images": "none", "uint8": "uint8", "float32": "float32"}
FORMS: tuple[Form, ...] = tuple(_PREPROCESS)


def make_store(folder: Path, samples: int, side: int, forms: Sequence[Form] = FORMS) -> Path:
    """A store with ``samples`` crops of scikit-learn's photographs: a data set for each form, of its name."""
    source = folder / "crops"
    _write_crops(source, samples, side)
    store = folder / "store"
    for form in forms:
        size = ["--image-size", str(side), "--preprocess", _PREPROCESS[form]]
        run_hapi("pack", str(source), f"{store}/{form}", "--quiet", *size)
    return store


def push_model(store: Path, model: str, side: int) -> None:
    """Put ``model`` with random weights into the store, under its own name."""
    run_hapi("push", model, f"{store}/{model}", "--weights", "random:0", "--input-size", str(side))


def run_hapi(*arguments: str) -> None:
    """Run ``hapi ARGUMENTS``; :class:`UsageError` with its last line when that fails."""
    command = [sys.executable, "-m", "hapi.cli.main", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, env=environment("")
    )
    if done.returncode != 0:
        raise UsageError(f"the benchmark's hapi {arguments[0]} failed: {last_line(done.stderr)}")


def _write_crops(target: Path, samples: int, side: int) -> None:
    """PNG files, one folder a class: about a fifth of a float32 tensor's bytes, as ImageNet's JPEGs are."""
    import numpy as np
    from PIL import Image

    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise UsageError(
            f"the benchmark's data are scikit-learn's photographs: pip install scikit-learn ({error})"
        ) from error
    photos = load_sample_images().images
    generator = np.random.default_rng(0)
    for number in range(samples):
        photo = photos[number % len(photos)]
        top = generator.integers(0, photo.shape[0] - side + 1)
        left = generator.integers(0, photo.shape[1] - side + 1)
        place = target / f"photo{number % len(photos)}"
        place.mkdir(parents=True, exist_ok=True)
        crop = np.ascontiguousarray(photo[top : top + side, left : left + side])
        Image.fromarray(crop).save(place / f"{number:06d}.png")
