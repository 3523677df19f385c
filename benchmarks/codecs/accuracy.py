"""Held-out accuracy of the real job when its features are rounded on the wire, over several seeds.

The photographs go through the frozen layers up to a cut, cross in a codec, and go on to the last frozen layer, once for
each codec. The trained layers are then trained on these features as ``hapi-train`` does it: the same batches, draws and
optimiser, so the same losses as through the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks.codecs.settings import CodecsSettings
from benchmarks.epochs.jobs import OPTIMIZER, SOLAR_CLASSES, SOLAR_SIDE, pack_solar, solar_spec
from benchmarks.epochs.settings import REAL_JOB, REAL_JOBS
from benchmarks.testbed.cells import Results
from hapi.codecs.codec import decode_into, encode
from hapi.codecs.names import LOSSY, NONE
from hapi.data.epoch_order import epoch_sequence, trainer_batches
from hapi.data.mount import DatasetReader, open_dataset
from hapi.data.transforms.pipeline import input_batch
from hapi.models.graph.layers import LayeredModel
from hapi.models.tensors import tensor_bytes
from hapi.models.zoo.build import ModelSpec
from hapi.repository.sources.networks import build_network
from hapi.train.steps.gradient_step import step_seed
from hapi.wire.references import TransformSpec

SOLAR_FREEZE = REAL_JOBS[REAL_JOB]
CUTS = (SOLAR_FREEZE, "_blocks.4.add")
"""Cuts at which the features cross: the last frozen layer, and one in the middle of the frozen layers."""
CODECS = (NONE, *LOSSY)
PASS = 16
"""Samples of a forward pass of the frozen layers."""
BATCH = 64
Part = Literal["train", "test"]


@dataclass(frozen=True, eq=False)
class Features:
    """Features at the last frozen layer, float32 [N, ...], and labels [N]."""

    x: torch.Tensor
    labels: torch.Tensor


def measure_accuracy(
    settings: CodecsSettings, results: Results, folder: Path, tell: Callable[[str], None]
) -> None:
    """Train what ``results`` does not hold: each seed with each codec at each cut.

    Args:
        settings: seeds, epochs and images.
        results: a record is added as each training ends.
        folder: features are kept there.
        tell: gets a line after each training.

    Raises:
        UsageError: the real job's packages are missing.
    """
    done = {(r["cut"], r["codec"], r["seed"]) for r in results.records if r["kind"] == "accuracy"}
    for cut in CUTS:
        todo = [(s, c) for s in range(settings.seeds) for c in CODECS if (cut, c, s) not in done]
        if not todo:
            continue
        kept = {part: kept_features(folder, cut, part, tell) for part in ("train", "test")}
        for seed, codec in todo:
            train, test = (Features(kept[part][codec], kept[part]["labels"]) for part in ("train", "test"))
            spec = solar_spec(seed, SOLAR_CLASSES)
            trained, losses = train_head(spec, SOLAR_FREEZE, train, settings.epochs, BATCH, OPTIMIZER)
            accuracy, loss = held_out(trained, test)
            results.add(
                {"kind": "accuracy", "cut": cut, "codec": codec, "seed": seed, "accuracy": accuracy, "loss": loss,
                 "last_train_loss": losses[-1]}
            )  # fmt: skip
            tell(f"{cut}, {codec}, seed {seed}: held-out accuracy {accuracy:.2%}, loss {loss:.4f}")


def kept_features(folder: Path, cut: str, part: Part, tell: Callable[[str], None]) -> dict[str, torch.Tensor]:
    """Return the features of a part by codec, and ``labels``; from ``folder`` if they are there."""
    target = folder / f"solar-{part}-{cut}.pt"
    if not target.exists():
        model = build_network(solar_spec(0, SOLAR_CLASSES), allow_import=True)
        with open_dataset(solar_dataset(folder, part)) as reader:
            found = crossed_features(model, cut, SOLAR_FREEZE, solar_inputs(reader), CODECS)
            found["labels"] = torch.from_numpy(reader.dataset.labels(np.arange(reader.count))).long()
        temporary = target.with_suffix(".part")
        torch.save(found, temporary)
        temporary.replace(target)
        tell(f"{cut}: features of {len(found['labels'])} photographs ({part})")
    kept: dict[str, torch.Tensor] = torch.load(target, weights_only=True)
    return kept


def solar_dataset(folder: Path, part: Part) -> str:
    """Return the address of the packed part, which is made unless it is there."""
    store = folder / "store"
    address = store / ("solar" if part == "train" else "solar-test")
    if not (store / "datasets" / address.name / "manifest.json").exists():
        pack_solar(folder / "solar-data", store, part)
    return str(address)


def solar_inputs(reader: DatasetReader, count: int | None = None) -> Iterator[torch.Tensor]:
    """Yield the first ``count`` photographs (None: all) as the network's input, :data:`PASS` at a time."""
    transform = TransformSpec(resize=SOLAR_SIDE, crop=SOLAR_SIDE)
    stop = reader.count if count is None else min(count, reader.count)
    for start in range(0, stop, PASS):
        samples = reader.read(np.arange(start, min(start + PASS, stop), dtype=np.int64))
        yield input_batch(samples, reader.dataset.layout, transform)


@torch.inference_mode()
def crossed_features(
    model: LayeredModel, cut: int | str, freeze: int | str, inputs: Iterator[torch.Tensor], codecs: Any
) -> dict[str, torch.Tensor]:
    """Return the features at ``freeze`` of inputs that crossed at ``cut`` in each codec, by its name."""
    at, last = model.resolve(cut), model.resolve(freeze)
    before = model.segment(0, at, frozen=True)
    after = model.segment(at, last, frozen=True) if at < last else nn.Identity()
    found: dict[str, list[torch.Tensor]] = {codec: [] for codec in codecs}
    for part in inputs:
        features = before(part).contiguous()
        for codec in codecs:
            found[codec].append(after(_crossed(features, codec)).clone())
    return {codec: torch.cat(parts) for codec, parts in found.items()}


def _crossed(features: torch.Tensor, codec: str) -> torch.Tensor:
    buffers = encode(codec, tensor_bytes(features), 4, len(features))
    if buffers is None:
        return features
    decoded = torch.empty_like(features)
    decode_into(codec, b"".join(buffers), tensor_bytes(decoded), 4, len(features))
    return decoded


def train_head(
    spec: ModelSpec, freeze: int | str, features: Features, epochs: int, batch: int, optimizer: Any
) -> tuple[nn.Module, list[float]]:
    """Train the layers after ``freeze`` as ``hapi-train --shuffle full --drop-last`` does with the same settings.

    Args:
        spec: the network; its ``head_seed`` is the seed of the training.
        freeze: last frozen layer.
        features: of all training samples, by id.
        epochs: number of epochs.
        batch: samples of a batch.
        optimizer: numbers of SGD, by name.

    Returns:
        The trained layers and the loss of each step.
    """
    model = build_network(spec, allow_import=True)
    trained = model.segment(model.resolve(freeze), len(model))
    steps, losses = torch.optim.SGD(trained.parameters(), **optimizer), []
    for epoch in range(epochs):
        order = epoch_sequence(spec.head_seed, epoch, len(features.labels))
        for number, ids in enumerate(trainer_batches(order, batch, drop_last=True)):
            torch.manual_seed(step_seed(spec.head_seed, epoch, number))
            chosen = torch.from_numpy(ids)
            loss = nn.functional.cross_entropy(trained(features.x[chosen]), features.labels[chosen])
            steps.zero_grad(set_to_none=True)
            loss.backward()
            steps.step()
            losses.append(loss.item())
    return trained, losses


@torch.inference_mode()
def held_out(trained: nn.Module, features: Features) -> tuple[float, float]:
    """Return accuracy and mean loss of the trained layers on ``features``."""
    trained.eval()
    logits = torch.cat([trained(part) for part in features.x.split(BATCH)])
    accuracy = (logits.argmax(1) == features.labels).double().mean()
    return float(accuracy), float(nn.functional.cross_entropy(logits, features.labels))
