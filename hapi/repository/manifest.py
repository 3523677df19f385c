"""``model.json``: description of a pushed model, and the location of each tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import xxhash

from hapi.errors import BadRequestError, DataError
from hapi.models.graph.architecture import LayerIdentity
from hapi.models.zoo.build import ModelSpec
from hapi.repository.weights_file import TensorEntry
from hapi.wire.documents import check_int, parse_document, strict_fields
from hapi.wire.references import check_digest, check_name

FORMAT = 3
_FIELDS = (
    "format", "name", "push", "architecture", "spec", "digest", "digests", "identities", "bytes", "classes",
    "default_freeze", "layers", "tensors", "checksum",
)  # fmt: skip


@dataclass(frozen=True)
class LayerEntry:
    """One layer as it was when the model was pushed."""

    name: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ModelManifest:
    """Everything about a pushed model but its weights."""

    name: str
    push: str
    """Id of this push; replacing a model writes another."""
    spec: ModelSpec
    digests: tuple[str, ...]
    """Front digest per split, 0 to L."""
    identities: tuple[LayerIdentity, ...]
    """Identity of splits 0 to L, whatever the names in the model (DStore, Algorithm 1)."""
    classes: int | None
    """Outputs of the head; None when they cannot be told."""
    default_freeze: int | None
    layers: tuple[LayerEntry, ...]
    tensors: Mapping[str, TensorEntry]
    """Tensors by name, in file order, which is layer order."""

    @property
    def digest(self) -> str:
        """Identity of the whole model: the digest of all layers."""
        return self.digests[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def weights_key(self) -> str:
        """Key of the weights file."""
        return f"{model_prefix(self.name)}/{self.push}/weights.safetensors"

    def to_json(self) -> dict[str, Any]:
        """The document; its ``checksum`` covers everything else in it."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "push": self.push,
            "architecture": self.spec.architecture,
            "spec": self.spec.to_json(),
            "digest": self.digest,
            "digests": list(self.digests),
            "identities": [list(identity) for identity in self.identities],
            "bytes": self.nbytes,
            "classes": self.classes,
            "default_freeze": self.default_freeze,
            "layers": [
                {"name": la.name, "shape": list(la.shape), "tensors": list(la.tensors)} for la in self.layers
            ],
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
        }
        return {**document, "checksum": _checksum(document)}

    def to_bytes(self) -> bytes:
        """Return the document as UTF-8 JSON."""
        return json.dumps(self.to_json(), indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Parse and verify; :class:`DataError` naming ``where`` on anything unexpected."""
        try:
            document = parse_document(data)
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {error}; push the model again") from error
        try:
            return cls.from_json(document)
        except BadRequestError as error:
            raise DataError(f"{where} is damaged or from another version of hapi: {error}") from error

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse and verify; :class:`BadRequestError` on anything unexpected."""
        d = strict_fields(document, dict.fromkeys(_FIELDS, True), "model.json")
        if d["format"] != FORMAT:
            raise BadRequestError(
                f"format {d['format']!r:.20} is not {FORMAT}, it is of another version of Hapi"
            )
        if _checksum({k: v for k, v in d.items() if k != "checksum"}) != d["checksum"]:
            raise BadRequestError("its checksum does not fit its content")
        layers, tensors, digests = d["layers"], d["tensors"], d["digests"]
        if not isinstance(layers, list) or not isinstance(tensors, dict) or not isinstance(digests, list):
            raise BadRequestError("layers, digests or tensors have the wrong type")
        if len(digests) != len(layers) + 1:
            raise BadRequestError(f"{len(digests)} digests for {len(layers)} layers")
        identities = d["identities"]
        if not isinstance(identities, list) or len(identities) != len(digests):
            raise BadRequestError(f"identities are no list of {len(digests)}")
        entries = {name: TensorEntry.from_json(name, entry) for name, entry in tensors.items()}
        freeze, classes = d["default_freeze"], d["classes"]
        return cls(
            name=check_name(d["name"], "name"),
            push=check_name(d["push"], "push"),
            spec=ModelSpec.from_json(d["spec"]),
            digests=tuple(check_digest(digest, "digests") for digest in digests),
            identities=tuple(map(_identity, identities)),
            classes=None if classes is None else check_int(classes, 1, 2**31, "classes"),
            default_freeze=None if freeze is None else check_int(freeze, 0, len(layers), "default_freeze"),
            layers=tuple(_layer(layer, entries) for layer in layers),
            tensors=entries,
        )


def _identity(document: Any) -> LayerIdentity:
    if not isinstance(document, list) or len(document) != len(LayerIdentity._fields):
        raise BadRequestError("an identity is no pair of structure and content")
    return LayerIdentity(*(check_digest(digest, "identities") for digest in document))


def _layer(document: Any, tensors: Mapping[str, TensorEntry]) -> LayerEntry:
    d = strict_fields(document, dict.fromkeys(("name", "shape", "tensors"), True), "layer")
    if (
        not isinstance(d["name"], str)
        or not isinstance(d["shape"], list)
        or not isinstance(d["tensors"], list)
    ):
        raise BadRequestError("layer: name, shape or tensors have the wrong type")
    unknown = [name for name in d["tensors"] if not isinstance(name, str) or name not in tensors]
    if unknown:
        raise BadRequestError(f"layer {d['name'][:80]!r}: tensor {unknown[0]!r:.80} is not in the file")
    shape = tuple(check_int(side, 0, 2**40, "layer.shape") for side in d["shape"])
    return LayerEntry(d["name"], shape, tuple(d["tensors"]))


def model_prefix(name: str) -> str:
    """Return the key prefix of everything that belongs to model ``name``."""
    return f"models/{check_name(name, 'model')}"


def manifest_key(name: str) -> str:
    """Return the key of the manifest, which is written last."""
    return f"{model_prefix(name)}/model.json"


def _checksum(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode())
