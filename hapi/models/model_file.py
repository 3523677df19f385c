"""Model files: a whole network as safetensors, with what is needed to build it and to use it.

The tensors have the names that the architecture's own library gives them, so that plain PyTorch reads the file:

    model = torchvision.models.resnet18(num_classes=5)
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

What makes it more than a state dict stands in the file's metadata, as JSON under one key for each field of
:class:`ModelCard`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from hapi import __version__
from hapi.atomic import replacing
from hapi.errors import BadRequestError, HapiError, ModelError
from hapi.models.graph.digest import content_digest
from hapi.models.tensors import STORED_NAMES, tensor_bytes
from hapi.models.zoo.architectures import ImportRule, build_module
from hapi.models.zoo.build import ModelSpec, architecture_of, layers_of
from hapi.models.zoo.head import retarget
from hapi.models.zoo.weights import load_state
from hapi.paths import user_path
from hapi.store.safetensors import encode_header
from hapi.wire.documents import parse_document
from hapi.wire.labels import LabelKind, check_label_kind
from hapi.wire.references import DatasetReference, TransformSpec, check_model

_FORMAT = "pt"
"""The library's word for tensors of PyTorch; others' readers ask for it."""
_FIELDS = (
    "spec",
    "pushed",
    "classes",
    "label_kind",
    "transform",
    "freeze",
    "dataset",
    "epoch",
    "metrics",
    "hapi",
)
MAX_HEADER_BYTES = 100 << 20
"""Longest header that the library itself accepts."""


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Facts of a model file about its network."""

    spec: ModelSpec
    """How it is built; ``weights`` is where training began."""
    pushed: str | None = None
    """Name of the pushed model with those weights; None for weights that the architecture's library has."""
    classes: tuple[str, ...]
    """Names of the outputs, in their order; empty when they have none."""
    label_kind: LabelKind = "single"
    """Meaning of the outputs: scores of which the largest is the class, of classes one by one, or numbers."""
    transform: TransformSpec | None
    """From an image to its input; None for a network that takes arrays as they are."""
    freeze: int
    """Layers 1 to ``freeze`` are as they were when training began."""
    dataset: DatasetReference | None = None
    """The dataset that it was trained on."""
    epoch: int = 0
    """Epochs of training that the weights have seen."""
    metrics: Mapping[str, float] | None = None
    """Measurements of the last of them."""

    def to_metadata(self) -> dict[str, str]:
        """JSON text by field, all but the digest of the tensors."""
        own = {"spec": self.spec.to_json(), "pushed": self.pushed}
        return {name: json.dumps(value) for name, value in {**own, **self.facts()}.items()}

    def facts(self) -> dict[str, Any]:
        """Return the fields that do not say how the network is built, as JSON values."""
        return {
            "classes": list(self.classes),
            "label_kind": self.label_kind,
            "transform": None if self.transform is None else self.transform.to_json(),
            "freeze": self.freeze,
            "dataset": None if self.dataset is None else self.dataset.to_json(),
            "epoch": self.epoch,
            "metrics": dict(self.metrics or {}),
            "hapi": __version__,
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        """Parse :meth:`to_metadata`'s form; :class:`BadRequestError` names what is wrong or missing."""
        absent = next((name for name in _FIELDS if name not in metadata), None)
        if absent is not None:
            raise BadRequestError(f"its metadata have no {absent!r}")
        found = {name: _parsed(metadata[name], name) for name in _FIELDS}
        classes, metrics = found["classes"], found["metrics"]
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise BadRequestError("metadata classes: expected a list of names")
        if not isinstance(metrics, dict) or not all(type(v) in (int, float) for v in metrics.values()):
            raise BadRequestError("metadata metrics: expected numbers by name")
        for name in ("freeze", "epoch"):
            if type(found[name]) is not int or found[name] < 0:
                raise BadRequestError(f"metadata {name}: expected a number from 0 on")
        return cls(
            spec=ModelSpec.from_json(found["spec"]),
            pushed=None if found["pushed"] is None else check_model(found["pushed"], "metadata pushed"),
            classes=tuple(classes),
            label_kind=check_label_kind(found["label_kind"], "metadata label_kind"),
            transform=None if found["transform"] is None else TransformSpec.from_json(found["transform"]),
            freeze=found["freeze"],
            dataset=None if found["dataset"] is None else DatasetReference.from_json(found["dataset"]),
            epoch=found["epoch"],
            metrics=metrics,
        )


def write_model(path: str | Path, state: Mapping[str, torch.Tensor], card: ModelCard) -> None:
    """Write the network of ``state`` (name to tensor, all of them) to ``path``, whole or not at all.

    Raises:
        HapiError: the file cannot be written; what was there before stays.
        ModelError: a tensor is not loaded.
    """
    for name, tensor in state.items():
        if tensor.is_meta:
            raise ModelError(f"tensor {name!r} is not loaded, so the model cannot be written")
        if tensor.dtype not in STORED_NAMES:
            raise ModelError(f"tensor {name!r} is {tensor.dtype}, which a model file cannot hold")
    metadata = {"format": _FORMAT, **card.to_metadata(), "digest": json.dumps(_digest(state))}
    # The widest types first, so that each tensor is aligned. One with two names (tied weights) is written twice.
    ordered = sorted(state.items(), key=lambda named: (-named[1].itemsize, named[0]))
    entries = ((n, STORED_NAMES[t.dtype], t.shape, t.numel() * t.itemsize) for n, t in ordered)
    head = encode_header(entries, metadata)
    try:
        # Not by the library, which puts a file of its own in the place of this one: private, and not made durable.
        with replacing(path) as file:
            file.write(head)
            for _, tensor in ordered:
                file.write(tensor_bytes(tensor))
    except OSError as error:
        raise HapiError(f"model file {path}: cannot be written: {error.strerror or error}") from None


def read_card(path: str | Path) -> ModelCard:
    """Return the facts of a model file; its tensors are not read."""
    return _read(path, with_tensors=False)[0]


def read_model(path: str | Path, *, allow_import: ImportRule = False) -> tuple[nn.Module, ModelCard]:
    """The network of a model file in eval mode, on the CPU, and its card. Every byte is checked.

    Args:
        path: the file, as a training or ``hapi export`` wrote it.
        allow_import: may a network of a ``package.module:factory`` be built by importing it: yes, no, or only these.

    Raises:
        ModelError: the file is damaged, is none that Hapi wrote, or does not fit the installed library.
    """
    card, state = _read(path, with_tensors=True)
    module = untrained(card.spec, allow_import)
    load_state(module, state, f"model file {path}")
    return module.eval(), card


def untrained(spec: ModelSpec, allow_import: ImportRule = False) -> nn.Module:
    """Return the module of ``spec`` with random weights, since those that it names need not be within reach."""
    architecture = architecture_of(spec, allow_import)
    model = layers_of(architecture, spec, build_module(architecture, 0))
    return retarget(model, spec.num_classes, 0, lambda module: layers_of(architecture, spec, module)).module


def _read(path: str | Path, *, with_tensors: bool) -> tuple[ModelCard, dict[str, torch.Tensor]]:
    file = user_path(path, "model file")
    try:
        if file.is_dir():
            raise ModelError(
                f"{path} is a folder; give a model file in it, such as {Path(path, 'best.safetensors')}"
            )
        if not file.is_file():
            problem = "is not a plain file" if file.exists() else "does not exist"
            raise ModelError(f"model file {path} {problem}")
        # Read, not mapped: whoever shortens a mapped file ends this process.
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if not 2 <= size <= MAX_HEADER_BYTES:
                raise ModelError(f"{path} is not a safetensors file; {_ADVICE}")
            header = parse_document(opened.read(size))
        metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ModelError(f"{path} is not a safetensors file; {_ADVICE}")
        if "digest" not in metadata:
            raise BadRequestError("its metadata have no 'digest'")
        card = ModelCard.from_metadata(metadata)
        state = load(file.read_bytes()) if with_tensors else {}
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ModelError(f"model file {path} cannot be read: {reason}") from None
    except (BadRequestError, ValueError) as error:
        raise ModelError(f"{path} is not a model file of Hapi ({error}); {_ADVICE}") from None
    if with_tensors and json.dumps(_digest(state)) != metadata["digest"]:
        raise ModelError(f"model file {path} is damaged: its tensors are not those that were written")
    return card, state


_ADVICE = "give a file that hapi-train or 'hapi export' wrote"


def _parsed(text: str, name: str) -> Any:
    try:
        return parse_document(text.encode())
    except ValueError as error:
        raise BadRequestError(f"metadata {name}: {error}") from None


def state_digest(forms: Mapping[str, tuple[torch.dtype, Sequence[int], str]]) -> str:
    """Return the SHA-256 (hex) over names, types, shapes and digests of content, in the order of names.

    Args:
        forms: element type, shape and :func:`hapi.models.graph.digest.content_digest` of each tensor, by name.
    """
    digest = hashlib.sha256()
    for name in sorted(forms):
        dtype, shape, content = forms[name]
        digest.update(f"{name}\0{dtype}\0{list(shape)}\0{content}".encode())
    return digest.hexdigest()


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    return state_digest(
        {name: (t.dtype, tuple(t.shape), content_digest(tensor_bytes(t))) for name, t in tensors.items()}
    )
