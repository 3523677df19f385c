"""The manifest: description of a dataset, and proof that it exists. Written last, switched at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, cast

from hapi.errors import BadRequestError, DataError, NotFoundError
from hapi.store.base import ObjectStore, check_prefix
from hapi.wire.documents import check_int, parse_document, strict_fields
from hapi.wire.labels import LabelForm, LabelKind, check_label_kind
from hapi.wire.references import TransformSpec, check_digest, check_name, check_shape

FORMAT = 3
"""Version of the layout in the store; any other is refused. 3: the shards' table lies in the index file (shards.py)
beside checksums of runs of samples (runs.py), and the shards may be foreign objects."""

REMEDY = "pack or index the dataset again with --replace"

Kind = Literal["encoded", "tensor"]
DTYPES = ("uint8", "float16", "float32", "float64")
"""Element types of stored tensors."""

MAX_SAMPLES = 1 << 40
_MAX_BYTES = 1 << 62
_MAX_INDEX_SIZE = 1 << 46
_MANIFEST_FIELDS = (
    "format", "name", "version", "pack", "count", "total_bytes", "classes", "kind", "sample_shape",
    "sample_dtype", "transform", "index_size", "index_xxh3", "shards", "in_place", "skipped", "source",
    "created",
)  # fmt: skip
_LABEL_KIND = "label_kind"
"""Field that single labels do not have."""


def dataset_prefix(name: str) -> str:
    """Return the key prefix of everything that belongs to dataset ``name``."""
    return f"datasets/{check_name(name, 'dataset')}"


def manifest_key(name: str) -> str:
    """Return the key of the manifest, which is written last."""
    return f"{dataset_prefix(name)}/manifest.json"


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """Form of a sample's bytes: an encoded image, or a tensor of one shape and element type."""

    kind: Kind
    sample_shape: tuple[int, ...] | None = None
    """(C, H, W) of a tensor; None for encoded images."""
    sample_dtype: str | None = None

    @classmethod
    def from_json(cls, document: Any, *, answer: bool = False) -> Self:
        """Parse strictly, but for unknown fields of an ``answer``; :class:`BadRequestError` on anything else."""
        known = dict.fromkeys(("kind", "sample_shape", "sample_dtype"), True)
        d = strict_fields(document, known, "layout", answer=answer)
        kind, shape, dtype = d["kind"], d["sample_shape"], d["sample_dtype"]
        if kind == "encoded":
            if shape is not None or dtype is not None:
                raise BadRequestError("layout: encoded samples have neither a shape nor an element type")
            return cls(kind="encoded")
        if kind != "tensor":
            raise BadRequestError("layout.kind: expected 'encoded' or 'tensor'")
        if dtype not in DTYPES:
            raise BadRequestError(f"layout.sample_dtype: expected one of {', '.join(DTYPES)}")
        sides = check_shape(shape, "layout.sample_shape")
        return cls(kind="tensor", sample_shape=sides, sample_dtype=dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON."""
        shape = None if self.sample_shape is None else list(self.sample_shape)
        return {"kind": self.kind, "sample_shape": shape, "sample_dtype": self.sample_dtype}


@dataclass(frozen=True, kw_only=True)
class InPlace:
    """Location of a dataset whose shards are foreign objects; Hapi never writes or removes them."""

    format: str
    """Name of the format, as in ``hapi index --format``."""
    folder: str
    """Prefix of the shards' keys; empty for the whole store."""

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse strictly; :class:`BadRequestError` on anything unexpected."""
        d = strict_fields(document, dict.fromkeys(("format", "folder"), True), "in_place")
        return cls(
            format=check_name(d["format"], "in_place.format"),
            folder=check_prefix(_text(d["folder"], "in_place.folder")),
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A dataset's description; see docs/architecture.md for the layout in the store."""

    name: str
    pack: str
    """Id of the packing or indexing: the folder of the index, and of the shards that were packed."""
    count: int
    classes: tuple[str, ...]
    """Names of the classes, or of the outputs of a regression."""
    layout: SampleLayout
    transform: TransformSpec | None
    index_size: int
    """Bytes of the index file."""
    index_xxh3: str
    shards: int
    """Number of shards; their table is in the index."""
    total_bytes: int
    """Bytes of all shards."""
    source: str
    created: str
    """Time of packing, ISO 8601 in UTC. No part of the version."""
    in_place: InPlace | None = None
    """None for shards that were packed."""
    skipped: int = 0
    """Bad samples that were left out because the user chose so. No part of the version."""
    label_kind: LabelKind = "single"

    @property
    def label_form(self) -> LabelForm:
        """Form of the labels."""
        return LabelForm(self.label_kind, len(self.classes))

    @property
    def version(self) -> str:
        """Digest over the content: the same samples packed again, anywhere, have the same version."""
        content = {
            "format": FORMAT,
            "count": self.count,
            "classes": list(self.classes),
            "layout": self.layout.to_json(),
            "transform": None if self.transform is None else self.transform.to_json(),
            "index": self.index_xxh3,
            "shards": [self.shards, self.total_bytes],
            **self._kind_field(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def index_key(self) -> str:
        """Key of the index."""
        return f"{dataset_prefix(self.name)}/{self.pack}/index.safetensors"

    @property
    def remedy(self) -> str:
        """Advice for a damaged dataset, for messages."""
        return f"{'pack the dataset' if self.in_place is None else 'index it'} again with --replace"

    def key_of(self, shard: str) -> str:
        """Return the key of the shard of this name."""
        if self.in_place is None:
            return f"{dataset_prefix(self.name)}/{self.pack}/{shard}"
        return f"{self.in_place.folder}/{shard}" if self.in_place.folder else shard

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON text."""
        return json.dumps(self.to_json(), indent=1).encode()

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's document."""
        return {
            "format": FORMAT,
            "name": self.name,
            "version": self.version,
            "pack": self.pack,
            "count": self.count,
            "total_bytes": self.total_bytes,
            "classes": list(self.classes),
            **self.layout.to_json(),
            "transform": None if self.transform is None else self.transform.to_json(),
            "index_size": self.index_size,
            "index_xxh3": self.index_xxh3,
            "shards": self.shards,
            "in_place": None if self.in_place is None else asdict(self.in_place),
            "skipped": self.skipped,
            "source": self.source,
            "created": self.created,
            **self._kind_field(),
        }

    def _kind_field(self) -> dict[str, str]:
        return {} if self.label_kind == "single" else {_LABEL_KIND: self.label_kind}

    @classmethod
    def from_bytes(cls, data: bytes, name: str, where: str) -> Self:
        """Parse the manifest of dataset ``name``; :class:`DataError` naming ``where`` when it is not sound."""
        try:
            document = parse_document(data)
        except ValueError as error:
            raise DataError(f"{where}: no JSON: {str(error)[:200]}; {REMEDY}") from error
        return cls.from_json(document, name, where)

    @classmethod
    def from_json(cls, document: Any, name: str, where: str) -> Self:
        """Parse the manifest of dataset ``name``; :class:`DataError` naming ``where`` when it is not sound."""
        _check_format(document, where)
        try:
            manifest = cls._from_json(document)
        except BadRequestError as error:
            raise DataError(f"{where}: {error}; {REMEDY}") from error
        if manifest.name != name or document["version"] != manifest.version:
            raise DataError(f"{where}: its content does not fit its name and version; {REMEDY}")
        return manifest

    @classmethod
    def _from_json(cls, document: Any) -> Self:
        if isinstance(document, dict):
            check_int(document.get("format"), FORMAT, FORMAT, "manifest.format")
        fields = {**dict.fromkeys(_MANIFEST_FIELDS, True), _LABEL_KIND: False}
        d = strict_fields(document, fields, "manifest")
        layout = SampleLayout.from_json({k: d[k] for k in ("kind", "sample_shape", "sample_dtype")})
        classes = check_classes(d["classes"])
        kind = check_label_kind(d.get(_LABEL_KIND, "single"), "manifest.label_kind")
        return cls(
            name=check_name(d["name"], "manifest.name"),
            pack=check_name(d["pack"], "manifest.pack"),
            count=check_int(d["count"], 1, MAX_SAMPLES, "manifest.count"),
            classes=classes,
            layout=layout,
            transform=None if d["transform"] is None else TransformSpec.from_json(d["transform"]),
            index_size=check_int(d["index_size"], 1, _MAX_INDEX_SIZE, "manifest.index_size"),
            index_xxh3=check_digest(d["index_xxh3"], "manifest.index_xxh3"),
            shards=check_int(d["shards"], 1, MAX_SAMPLES, "manifest.shards"),
            total_bytes=check_int(d["total_bytes"], 1, _MAX_BYTES, "manifest.total_bytes"),
            source=_text(d["source"], "manifest.source"),
            created=_text(d["created"], "manifest.created"),
            in_place=None if d["in_place"] is None else InPlace.from_json(d["in_place"]),
            skipped=check_int(d["skipped"], 0, MAX_SAMPLES, "manifest.skipped"),
            label_kind=LabelForm(kind, len(classes)).checked("manifest.classes").kind,
        )


def _check_format(document: Any, where: str) -> None:
    """DataError when the document has another version's format, before its fields are found to be strange."""
    found = document.get("format") if isinstance(document, dict) else None
    if isinstance(found, bool) or not isinstance(found, int) or found == FORMAT:
        return
    if found > FORMAT:
        raise DataError(f"{where}: format {found} is of a newer Hapi, this one reads {FORMAT}; update Hapi")
    raise DataError(
        f"{where}: format {found} is of an older Hapi, this one reads {FORMAT}; pack the dataset again"
    )


def check_classes(classes: Any) -> tuple[str, ...]:
    """Return ``classes`` as a tuple of distinct, non-empty names; raise :class:`BadRequestError` otherwise."""
    if not isinstance(classes, Sequence) or isinstance(classes, str) or not classes:
        raise BadRequestError("classes: expected a list of names")
    if any(not isinstance(c, str) or not c or len(c) > 1000 for c in classes):
        raise BadRequestError("classes: a name is empty, too long or no text")
    if len(set(classes)) != len(classes):
        raise BadRequestError("classes: a name is there twice")
    return tuple(cast(Sequence[str], classes))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRequestError(f"{what}: expected text")
    return value


def load_manifest(store: ObjectStore, name: str) -> Manifest:
    """The manifest of a dataset. :class:`NotFoundError` names what is there, :class:`DataError` damage."""
    key = manifest_key(name)
    try:
        data = store.get(key)
    except NotFoundError:
        store.ping()
        whole = f"there is no dataset {name!r} in {store.url}; {_existing_names(store, name)}"
        raise unknown_dataset(name, whole) from None
    return Manifest.from_bytes(data, name, f"{store.url}/{key}")


def unknown_dataset(name: str, whole: str | None = None) -> NotFoundError:
    """Return the error for a name that has no dataset; ``whole`` only to who may know the store."""
    outside = f"there is no dataset {name!r} here; GET /v1/datasets and 'hapi ls' tell what there is"
    return NotFoundError(whole or outside, outside=outside)


def _existing_names(store: ObjectStore, name: str) -> str:
    names = store.list_names("datasets")
    if name in names:
        return "it was not finished: run the same 'hapi pack' or 'hapi index' again to go on"
    existing = [n for n in names if store.exists(f"datasets/{n}/manifest.json")]
    return (
        f"there are {', '.join(existing[:20])}"
        if existing
        else "there are none; 'hapi pack' or 'hapi index' makes one"
    )
