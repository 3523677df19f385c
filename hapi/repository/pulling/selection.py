"""Tensors of a pushed model for a file: all that its network's state dict has, or some."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch

from hapi.errors import UsageError
from hapi.models.graph.digest import content_digest
from hapi.models.model_file import ModelCard, state_digest
from hapi.models.tensors import STORED_NAMES, tensor_bytes
from hapi.models.zoo.architectures import ImportRule
from hapi.repository.entries import DTYPES, TensorEntry
from hapi.repository.manifest import ModelManifest
from hapi.repository.side_files import FILES_PREFIX, side_files_of
from hapi.repository.stored import StoredModel
from hapi.wire.references import TransformSpec

_PLAIN = {"format": "pt"}
"""Others' readers ask for it."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor under its name in a file: from the store, or, where no layer reads it, a first value."""

    name: str
    entry: TensorEntry | None
    value: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Its element type."""
        return DTYPES[self.entry.dtype] if self.entry is not None else self._first.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.entry.shape if self.entry is not None else tuple(self._first.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.entry.nbytes if self.entry is not None else self._first.nbytes

    @property
    def digest(self) -> str:
        """Digest of its bytes."""
        return self.entry.digest if self.entry is not None else content_digest(tensor_bytes(self._first))

    @property
    def form(self) -> tuple[str, str, tuple[int, ...], int]:
        """Name, safetensors' name of the type, shape and bytes, as a file's header has them."""
        return self.name, STORED_NAMES[self.dtype], self.shape, self.nbytes

    @property
    def _first(self) -> torch.Tensor:
        if self.value is None:
            raise ValueError(f"tensor {self.name!r} has neither an entry nor a value")
        return self.value


@dataclass(frozen=True)
class FileContent:
    """Tensors and metadata for files."""

    tensors: tuple[FileTensor, ...]
    """In the order of the file: the widest types first, so that each is aligned, and else in layer order."""
    metadata: Mapping[str, str]
    files: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Small files that a folder gets beside them, by name."""


def whole(stored: StoredModel, allow_import: ImportRule = False) -> FileContent:
    """Return all tensors of the model's network, by the names of its own library, and the facts of a model file.

    A model of tensors only has the names with which it was pushed, and no facts.

    Args:
        stored: the model.
        allow_import: whether its factory may be imported, if one makes its network.

    Raises:
        ModelError: the network cannot be built here.
        ConflictError: the installed code makes another network than was pushed.
    """
    manifest = stored.manifest
    if manifest.spec is None:
        tensors = _content((FileTensor(name, entry) for name, entry in _weights(manifest).items()), _PLAIN)
        return replace(tensors, files=side_files_of(manifest))
    model = stored.layered(allow_import=allow_import)
    names = list(model.module.state_dict())
    homes = {name: model.tensors.first_name(name) for name in names}
    unread = [name for name in names if homes[name] not in manifest.tensors]
    values = stored.state(stored.tensors, model, unread, allow_import)
    found = [FileTensor(name, manifest.tensors.get(homes[name]), values.get(name)) for name in names]
    digest = state_digest({t.name: (t.dtype, t.shape, t.digest) for t in found})
    return _content(found, {**_PLAIN, **card_of(manifest).to_metadata(), "digest": json.dumps(digest)})


def layers(stored: StoredModel, first: int, last: int) -> FileContent:
    """Return the tensors of layers ``first`` to ``last`` (both included), by the names with which they were pushed.

    Raises:
        UsageError: there are no such layers, or they have no tensors.
    """
    own = stored.manifest.layers
    if not 1 <= first <= last <= len(own):
        raise UsageError(f"layers {first}..{last}: model {stored.reference!r} has layers 1..{len(own)}")
    weights = _weights(stored.manifest)
    names = dict.fromkeys(
        name for layer in own[first - 1 : last] for name in layer.tensors if name in weights
    )
    if not names:
        raise UsageError(f"layers {first}..{last} of model {stored.reference!r} have no tensors")
    return _content((FileTensor(name, weights[name]) for name in names), _PLAIN)


def matching(stored: StoredModel, pattern: str) -> FileContent:
    """Return the tensors whose names match a pattern with ``*``, ``?`` and ``[...]``.

    Raises:
        UsageError: no name matches.
    """
    tensors = _weights(stored.manifest)
    found = [FileTensor(name, entry) for name, entry in tensors.items() if fnmatchcase(name, pattern)]
    if not found:
        some = ", ".join(list(tensors)[:3])
        raise UsageError(f"no tensor of model {stored.reference!r} matches {pattern!r}; it has {some}, ...")
    return _content(found, _PLAIN)


def card_of(manifest: ModelManifest) -> ModelCard:
    """Return the facts for a model file of a pushed model; for one that was pushed without, what its build tells.

    Such outputs have no names, so they are numbered.
    """
    spec = manifest.build_spec()
    if manifest.card is not None:
        fields = {name: json.dumps(value) for name, value in manifest.card.items()}
        own = {"spec": json.dumps(spec.to_json()), "pushed": json.dumps(manifest.parent)}
        return ModelCard.from_metadata({**fields, **own})
    channels, *sides = spec.input_shape
    is_image = channels == 3 and len(sides) == 2 and sides[0] == sides[1]
    return ModelCard(
        spec=spec,
        pushed=manifest.parent,
        classes=tuple(map(str, range(manifest.classes or 0))),
        transform=TransformSpec.for_image_size(sides[0]) if is_image else None,
        freeze=len(manifest.layers),
    )


def _weights(manifest: ModelManifest) -> Mapping[str, TensorEntry]:
    """All tensors but those that are files."""
    files = {f"{FILES_PREFIX}{name}" for name in side_files_of(manifest)}
    return {name: entry for name, entry in manifest.tensors.items() if name not in files}


def _content(tensors: Iterable[FileTensor], metadata: Mapping[str, str]) -> FileContent:
    return FileContent(tuple(sorted(tensors, key=lambda t: -t.dtype.itemsize)), metadata)
