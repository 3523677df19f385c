"""The structure of a pushed model: layers, forms of tensors and the compact architecture graph, stored once.

All fine-tunes of one network with one head have the same structure. It is named by its content, so that a client that
knows it need not ask for it again (DStore, section 3, "Client-side cached mapping of leaf layer and unique IDs").
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from hapi.errors import BadRequestError, DataError
from hapi.models.graph.architecture import ArchitectureGraph
from hapi.models.graph.digest import content_digest
from hapi.repository.entries import TensorForm
from hapi.repository.packs.structure_key import structure_key
from hapi.repository.versions import decompressed
from hapi.wire.documents import check_int, parse_document, strict_fields
from hapi.wire.references import check_digest

FORMAT = 1
_FIELDS = ("format", "layers", "tensors", "identities", "graph")


@dataclass(frozen=True)
class LayerEntry:
    """One layer as it was when the model was pushed."""

    name: str
    shape: tuple[int, ...]
    """Shape of one sample's output; empty in a model of tensors only."""
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """Everything about a pushed model that does not depend on its weights, its name or its head's meaning."""

    layers: tuple[LayerEntry, ...]
    forms: tuple[TensorForm, ...]
    """Its tensors, each once, in layer order."""
    identities: tuple[str, ...]
    """Identity of the structure of splits 0 to L (DStore, Algorithm 1)."""
    graph: ArchitectureGraph | None
    """None for a model of tensors only."""

    @cached_property
    def digest(self) -> str:
        """Name of the structure: the digest of its bytes."""
        return content_digest(self.to_bytes())

    @property
    def key(self) -> str:
        """Key of its object."""
        return structure_key(self.digest)

    def to_json(self) -> dict[str, Any]:
        """Return the document that :meth:`from_json` reads."""
        return {
            "format": FORMAT,
            "layers": [[la.name, list(la.shape), list(la.tensors)] for la in self.layers],
            "tensors": [form.to_json() for form in self.forms],
            "identities": list(self.identities),
            "graph": None if self.graph is None else self.graph.to_json(),
        }

    def to_stored(self) -> bytes:
        """Return the document as a store has it: by gzip, which takes names and shapes to a tenth."""
        return gzip.compress(self.to_bytes(), mtime=0)

    @classmethod
    def from_stored(cls, data: bytes, digest: str, where: str) -> Self:
        """Do as :meth:`from_bytes` with the bytes that a store has."""
        try:
            text = decompressed(data)
        except ValueError as error:
            raise DataError(f"{where} is damaged: {error}; push the model again") from error
        return cls.from_bytes(text, digest, where)

    def to_bytes(self) -> bytes:
        """Return the document as JSON, the same bytes for the same structure."""
        return json.dumps(self.to_json(), separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes, digest: str, where: str) -> Self:
        """Parse and verify the structure of this digest; :class:`DataError` naming ``where`` if it is another one."""
        if content_digest(data) != digest:
            raise DataError(f"{where} is damaged: its digest is another one; push the model again")
        try:
            return cls.from_json(parse_document(data))
        except (BadRequestError, ValueError) as error:
            raise DataError(f"{where} is damaged or from another version of hapi: {error}") from error

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse; :class:`BadRequestError` on anything unexpected."""
        d = strict_fields(document, dict.fromkeys(_FIELDS, True), "structure")
        if d["format"] != FORMAT:
            raise BadRequestError(f"structure: format {d['format']!r:.20} is not {FORMAT}")
        layers, tensors, identities = d["layers"], d["tensors"], d["identities"]
        if not all(isinstance(value, list) for value in (layers, tensors, identities)):
            raise BadRequestError("structure: layers, tensors or identities are no list")
        if len(identities) != len(layers) + 1:
            raise BadRequestError(f"structure: {len(identities)} identities for {len(layers)} layers")
        forms = tuple(TensorForm.from_json(form) for form in tensors)
        known = {form.name: form for form in forms}
        if len(known) < len(forms):
            raise BadRequestError("structure: two tensors have the same name")
        graph = d["graph"]
        return cls(
            layers=tuple(_layer(layer, known) for layer in layers),
            forms=forms,
            identities=tuple(check_digest(identity, "structure.identities") for identity in identities),
            graph=None if graph is None else ArchitectureGraph.from_json(graph),
        )


def _layer(document: Any, tensors: Mapping[str, TensorForm]) -> LayerEntry:
    if not isinstance(document, list) or len(document) != 3:
        raise BadRequestError("structure: a layer is no list of name, shape and tensors")
    name, shape, names = document
    if not isinstance(name, str) or not isinstance(shape, list) or not isinstance(names, list):
        raise BadRequestError("structure: a layer's name, shape or tensors have the wrong type")
    unknown = [tensor for tensor in names if not isinstance(tensor, str) or tensor not in tensors]
    if unknown:
        raise BadRequestError(f"layer {name[:80]!r}: tensor {unknown[0]!r:.80} is not among the tensors")
    return LayerEntry(name, tuple(check_int(side, 0, 2**40, "layer.shape") for side in shape), tuple(names))
