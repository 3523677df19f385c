"""The manifest of one version of a pushed model: its build, its identity, and the location of each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from hapi.errors import BadRequestError, ConflictError, DataError
from hapi.models.graph.architecture import LayerIdentity
from hapi.models.zoo.build import ModelSpec
from hapi.repository.entries import TensorEntry, check_checksum
from hapi.repository.packs.place import PACK_PATTERN, pack_id, pack_key
from hapi.repository.structure import LayerEntry, ModelStructure
from hapi.repository.versions import compressed, decompressed, document_checksum, version_key
from hapi.wire.documents import check_int, parse_document, strict_fields
from hapi.wire.references import check_digest, check_model, check_name

FORMAT = 6
_FIELDS = (
    "format", "name", "version", "created", "parent", "structure", "architecture", "spec", "digest", "digests",
    "contents", "bytes", "classes", "default_freeze", "card", "packs", "tensors", "checksum",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelManifest:
    """Everything about one version of a pushed model but its weights."""

    name: str
    version: int
    """Number of the version, from 1; 0 before it is written."""
    created: str
    """UTC, ISO 8601."""
    parent: str | None
    """The pushed model that it was fine-tuned from, as NAME@VERSION; None if that is unknown."""
    structure: ModelStructure
    spec: ModelSpec | None
    """None for a model of tensors only, which nobody can build."""
    digests: tuple[str, ...]
    """Front digest per split, 0 to L."""
    contents: tuple[str, ...]
    """Identity of splits 0 to L, whatever the names in the model, with the tensors' content (DStore, Algorithm 1)."""
    classes: int | None
    """Outputs of the head; None when they cannot be told."""
    default_freeze: int | None
    card: Mapping[str, Any] | None = None
    """Facts of the model file that was pushed (:meth:`hapi.models.model_file.ModelCard.facts`); None for other
    pushes."""
    tensors: Mapping[str, TensorEntry]
    """Tensors by name, in layer order."""

    @property
    def digest(self) -> str:
        """Identity of the whole model: the digest of all layers."""
        return self.digests[-1]

    @property
    def reference(self) -> str:
        """Name with the version: NAME@VERSION."""
        return f"{self.name}@{self.version}"

    @property
    def key(self) -> str:
        """Key of the manifest."""
        return version_key(self.name, self.version)

    @property
    def layers(self) -> tuple[LayerEntry, ...]:
        """Its layers."""
        return self.structure.layers

    @property
    def identities(self) -> tuple[LayerIdentity, ...]:
        """Identity of splits 0 to L, by structure and by content."""
        return tuple(map(LayerIdentity, self.structure.identities, self.contents))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def packs(self) -> tuple[str, ...]:
        """Keys of the objects that hold its tensors."""
        return tuple(dict.fromkeys(entry.pack for entry in self.tensors.values()))

    def build_spec(self) -> ModelSpec:
        """Return the build that made the model.

        Raises:
            ConflictError: it is a model of tensors only.
        """
        if self.spec is None:
            raise ConflictError(
                f"model {self.name!r} was pushed as tensors without an architecture, so its layers cannot be built; "
                "push it with one: hapi push ARCHITECTURE STORE/NAME --weights FILE"
            )
        return self.spec

    def to_json(self) -> dict[str, Any]:
        """The document, without the structure; its ``checksum`` covers everything else in it."""
        packs = {key: place for place, key in enumerate(self.packs)}
        document: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "version": self.version,
            "created": self.created,
            "parent": self.parent,
            "structure": self.structure.digest,
            "architecture": None if self.spec is None else self.spec.architecture,
            "spec": None if self.spec is None else self.spec.to_json(),
            "digest": self.digest,
            "digests": list(self.digests),
            "contents": list(self.contents),
            "bytes": self.nbytes,
            "classes": self.classes,
            "default_freeze": self.default_freeze,
            "card": None if self.card is None else dict(self.card),
            "packs": [pack_id(key) for key in packs],
            "tensors": [[e.digest, e.checksum, packs[e.pack], e.start] for e in self.tensors.values()],
        }
        return {**document, "checksum": document_checksum(document)}

    def to_bytes(self) -> bytes:
        """Return the document as it is stored."""
        return compressed(self.to_json())

    def numbered(self, version: int) -> Self:
        """Return the manifest as that of this version."""
        return replace(self, version=version)

    @classmethod
    def from_bytes(cls, data: bytes, structure: ModelStructure, where: str) -> Self:
        """Parse and verify; :class:`DataError` naming ``where`` on anything unexpected."""
        try:
            return cls.from_json(parse_document(decompressed(data)), structure)
        except (BadRequestError, ValueError) as error:
            raise DataError(f"{where} is damaged or from another version of hapi: {error}") from error

    @classmethod
    def from_json(cls, document: Any, structure: ModelStructure, *, answer: bool = False) -> Self:
        """Parse and verify the document of a model of this structure; :class:`BadRequestError` on anything
        unexpected, but for unknown fields of an ``answer``.
        """
        d = strict_fields(document, dict.fromkeys(_FIELDS, True), "model", answer=answer)
        check_format(d)
        if document_checksum(document) != d["checksum"]:
            raise BadRequestError("its checksum does not fit its content")
        if d["structure"] != structure.digest:
            raise BadRequestError(f"it has structure {d['structure']!r:.40}, not {structure.digest}")
        layers = len(structure.layers)
        digests, contents, packs, tensors = (d[name] for name in ("digests", "contents", "packs", "tensors"))
        if not all(isinstance(value, list) for value in (digests, contents, packs, tensors)):
            raise BadRequestError("digests, contents, packs or tensors are no list")
        if len(digests) != layers + 1 or len(contents) != layers + 1:
            raise BadRequestError(f"{len(digests)} digests and {len(contents)} contents for {layers} layers")
        if len(tensors) != len(structure.forms):
            raise BadRequestError(f"{len(tensors)} tensors instead of {len(structure.forms)}")
        keys = [_pack_key(pack) for pack in packs]
        entries = [_entry(form, e, keys) for form, e in zip(structure.forms, tensors, strict=True)]
        freeze, classes, parent = d["default_freeze"], d["classes"], d["parent"]
        return cls(
            name=check_name(d["name"], "name"),
            version=check_int(d["version"], 1, 10**8, "version"),
            created=str(d["created"])[:40],
            parent=None if parent is None else check_model(parent, "parent"),
            structure=structure,
            spec=None if d["spec"] is None else ModelSpec.from_json(d["spec"], answer=answer),
            digests=tuple(check_digest(digest, "digests") for digest in digests),
            contents=tuple(check_digest(content, "contents") for content in contents),
            classes=None if classes is None else check_int(classes, 1, 2**31, "classes"),
            default_freeze=None if freeze is None else check_int(freeze, 0, layers, "default_freeze"),
            card=_card(d["card"]),
            tensors={entry.name: entry for entry in entries},
        )


def structure_of_document(document: Any) -> str:
    """Return the digest of the structure that a manifest's document needs; :class:`BadRequestError` without one."""
    if not isinstance(document, dict):
        raise BadRequestError("it is no JSON object")
    check_format(document)
    return check_digest(document.get("structure"), "structure")


def check_format(document: Mapping[str, Any]) -> None:
    """Raise :class:`BadRequestError` unless the document is of this version."""
    found = document.get("format")
    if found != FORMAT:
        newer = isinstance(found, int) and found > FORMAT
        advice = "a newer hapi wrote it: update this one" if newer else "push it again"
        raise BadRequestError(
            f"format {found!r:.20} is not {FORMAT}, which this version of hapi reads; {advice}"
        )


def _card(document: Any) -> Mapping[str, Any] | None:
    if document is not None and not isinstance(document, dict):
        raise BadRequestError("card: expected the facts of a model file, or nothing")
    return document


def _pack_key(pack: Any) -> str:
    if not isinstance(pack, str) or PACK_PATTERN.fullmatch(pack) is None:
        raise BadRequestError(f"pack {pack!r:.60} is no id of a pack")
    return pack_key(pack)


def _entry(form: Any, document: Any, packs: Sequence[str]) -> TensorEntry:
    what = f"tensor {form.name[:80]!r}"
    if not isinstance(document, list) or len(document) != 4:
        raise BadRequestError(f"{what}: no list of digest, checksum, pack and start")
    digest, checksum, pack, start = document
    return TensorEntry(
        *(form.name, form.dtype, form.shape),
        check_digest(digest, what),
        check_checksum(checksum, what),
        packs[check_int(pack, 0, len(packs) - 1, what)],
        check_int(start, 8, 2**62, what),
    )
