"""Requests and descriptions: the JSON documents of the HTTP interface, parsed strictly.

``POST /v1/extract``   frozen forward of some samples, a stream of frames
``POST /v1/samples``   stored bytes of some samples (split 0), a stream of frames
``POST /v1/tensors``   weights of a pushed model by name, a stream of frames
``POST /v1/warm``   layers that will be asked for (:mod:`hapi.wire.warm_up`)
``GET  /v1/packs/ID``   bytes of stored tensors, by ranges of HTTP
``GET  /v1/datasets``, ``/v1/datasets/NAME``, ``/v1/models``, ``/v1/models/NAME``   descriptions

:mod:`hapi.wire.schemas` has their JSON Schemas.

A request names everything that it needs, so that any server can answer any request (HAPI, section 4.2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args

import numpy as np

from hapi.arrays import IntArray
from hapi.codecs.names import CODECS, NONE, Codec
from hapi.errors import BadRequestError, TooLargeError
from hapi.text import class_name
from hapi.wire.documents import check_int, parse_document, strict_fields
from hapi.wire.frames import MAX_ID
from hapi.wire.labels import LabelForm, LabelKind, check_label_kind
from hapi.wire.references import (
    DatasetReference,
    ModelReference,
    Precision,
    TransformSpec,
    check_digest,
    check_model,
)
from hapi.wire.sequences import MOST_GROUP, ChunkWindows, SequenceRange

EXTRACT_PATH = "/v1/extract"
SAMPLES_PATH = "/v1/samples"
TENSORS_PATH = "/v1/tensors"
DATASETS_PATH = "/v1/datasets"
CHANGED = "changed"
"""End of the path that asks how many of a dataset's foreign shards were written again since it was indexed."""
MODELS_PATH = "/v1/models"
PACKS_PATH = "/v1/packs"
STRUCTURES_PATH = "/v1/structures"
HEALTH_PATH = "/healthz"
READY_PATH = "/readyz"
METRICS_PATH = "/metrics"
STATUS_PATH = "/v1/status"
OPENAPI_PATH = "/v1/openapi.json"
VERSION_PATH = "/v1"
PAGE_PATH = "/"

MAX_REQUEST_BYTES = 1 << 20
"""Largest request body, in bytes."""
MAX_SAMPLES = 65536
"""Most samples of one request."""
MAX_SPLIT = 100_000
MAX_CLASSES, MAX_CLASS_NAME = 1 << 20, 4096
"""Most classes of a dataset, and characters of one's name."""
MAX_NAME = 512
"""Most characters of a layer's or a tensor's name."""
MAX_JOB = 64
"""Most characters of the id of a training run."""
DECIMAL_PATTERN = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
REQUEST_ID_HEADER = "X-Request-Id"
TRACE_HEADER = "traceparent"
"""Place of the request in the trace of its client (W3C Trace Context)."""
DEADLINE_HEADER = "X-Deadline-Seconds"
"""Header with the seconds after which a request is not wanted any more if it has not begun, from its arrival.
"""
MAX_DEADLINE = 86400.0
STALL_HEADER = "X-Hapi-Stalled"
"""Header with the share of its time, 0 to 1, in which the trainer waits for batches: servers scale by it."""
CODE_HEADER = "X-Hapi-Code"
"""Header of a stream's answer: the version of the code that computes it (:mod:`hapi.cache.code_version`)."""

PEER_HEADER = "X-Hapi-Peer"
"""Header of a server's request to another one for a pack: whoever gets it answers from its own memory or the store, and
asks no third."""

PRECISION, CODEC = "precision", "codec"
"""Names of optional fields, which a server from before them refuses as unknown."""
FEATURES, STORED, OFFSETS = "features", "stored", "offsets"
"""Names of the tensors in frames: [n, ...] features; uint8 bytes and their int64 [n+1] offsets. For labels see
:class:`hapi.wire.labels.LabelForm`.
"""


def parse_body(body: bytes) -> Any:
    """Parse the JSON document of a request body; :class:`BadRequestError` when it is none."""
    if len(body) > MAX_REQUEST_BYTES:
        raise TooLargeError(f"request body of {len(body)} bytes exceeds {MAX_REQUEST_BYTES}")
    try:
        return parse_document(body)
    except ValueError as error:
        raise BadRequestError(f"request body is not JSON: {error}") from None


def _ids(value: Any) -> IntArray:
    if not isinstance(value, list) or not value:
        raise BadRequestError("ids: expected a list of at least one sample id")
    if len(value) > MAX_SAMPLES:
        raise TooLargeError(
            f"ids: {len(value)} samples in one request, at most {MAX_SAMPLES}; send several requests"
        )
    if set(map(type, value)) != {int} or not 0 <= min(value) <= max(value) <= MAX_ID:
        raise BadRequestError("ids: expected non-negative integers")
    return np.array(value, dtype=np.int64)


def _windows(fields: Mapping[str, Any]) -> ChunkWindows | None:
    return ChunkWindows.from_json(fields["windows"]) if "windows" in fields else None


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtractRequest:
    """A request to run layers 1..split of ``model`` over ``ids`` of ``dataset`` and to stream the outputs
    back.
    """

    dataset: DatasetReference
    model: ModelReference
    split: int
    split_name: str
    """Name of layer ``split``: both tiers must mean the same cut, whatever their library versions."""
    ids: IntArray
    transform: TransformSpec | None
    time_layers: bool = False
    """Run layer by layer and report the seconds of each; for a profile, since it is slower."""
    job: str = ""
    """Any id of the training run, by which its reports tell its own work from that of others."""
    windows: ChunkWindows | None = None
    """Chunk windows that the ids come from; None for other orders."""
    precision: Precision = "fp32"
    """Type of every layer's result, features included."""
    codec: Codec = NONE
    """Encoding that the features may have on the wire; those that it does not shorten come raw."""

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse strictly; :class:`BadRequestError` names the field that is missing, unknown or wrong."""
        names = ("dataset", "model", "split", "split_name", "ids", "transform")
        optional = dict.fromkeys(("time_layers", "job", "windows", PRECISION, CODEC), False)
        d = strict_fields(document, {**dict.fromkeys(names, True), **optional}, "request")
        time_layers = d.get("time_layers", False)
        if not isinstance(time_layers, bool):
            raise BadRequestError("time_layers: expected true or false")
        codec = d.get(CODEC, NONE)
        if codec not in CODECS:
            raise BadRequestError(f"{CODEC}: expected one of {', '.join(CODECS)}")
        return cls(
            **prefix_fields(d),
            dataset=DatasetReference.from_json(d["dataset"]),
            ids=_ids(d["ids"]),
            transform=None
            if d["transform"] is None
            else TransformSpec.from_json(d["transform"], random=True),
            time_layers=time_layers,
            job=_job(d),
            windows=_windows(d),
            codec=codec,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the request's body without fields at their defaults."""
        return {
            **({} if self.precision == "fp32" else {PRECISION: self.precision}),
            **({} if self.codec == NONE else {CODEC: self.codec}),
            **({"time_layers": True} if self.time_layers else {}),
            **({"job": self.job} if self.job else {}),
            **({} if self.windows is None else {"windows": self.windows.to_json()}),
            "dataset": self.dataset.to_json(),
            "model": self.model.to_json(),
            "split": self.split,
            "split_name": self.split_name,
            "ids": self.ids.tolist(),
            "transform": None if self.transform is None else self.transform.to_json(),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplesRequest:
    """A request for the stored bytes of ``ids`` of ``dataset`` (split 0)."""

    dataset: DatasetReference
    ids: IntArray | SequenceRange
    """The samples: their ids, or a range of the dataset's sequence."""
    job: str = ""
    """Id of the training run, as in :class:`ExtractRequest`."""
    windows: ChunkWindows | None = None
    """Chunk windows, as in :class:`ExtractRequest`; a range implies them."""

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse strictly; :class:`BadRequestError` for anything else, also for both ids and a sequence."""
        by_range = isinstance(document, dict) and "sequence" in document
        names = dict.fromkeys(("sequence", "start", "stop") if by_range else ("ids",), True)
        optional = {"job": False} if by_range else {"job": False, "windows": False}
        d = strict_fields(document, {"dataset": True, **names, **optional}, "request")
        ids = SequenceRange.from_json(d, MAX_SAMPLES) if by_range else _ids(d["ids"])
        windows = ids.windows if isinstance(ids, SequenceRange) else _windows(d)
        return cls(dataset=DatasetReference.from_json(d["dataset"]), ids=ids, job=_job(d), windows=windows)

    def to_json(self) -> dict[str, Any]:
        """Return the request's body."""
        job = {"job": self.job} if self.job else {}
        ids, windows = self.ids, self.windows
        if isinstance(ids, SequenceRange):
            which = ids.to_json()
        else:
            which = {"ids": ids.tolist(), **({} if windows is None else {"windows": windows.to_json()})}
        return {**job, "dataset": self.dataset.to_json(), **which}


@dataclass(frozen=True, kw_only=True)
class TensorsRequest:
    """A request for tensors ``names`` of the pushed model ``name`` at ``digest``."""

    name: str
    digest: str
    names: tuple[str, ...]

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse strictly; :class:`BadRequestError` for anything else."""
        d = strict_fields(document, dict.fromkeys(("name", "digest", "names"), True), "request")
        names = d["names"]
        if not isinstance(names, list) or not 1 <= len(names) <= MAX_SAMPLES:
            raise BadRequestError(f"names: expected a list of 1 to {MAX_SAMPLES} tensor names")
        if not all(isinstance(n, str) and 0 < len(n) <= MAX_NAME for n in names) or len(set(names)) != len(
            names
        ):
            raise BadRequestError(f"names: expected different strings of 1 to {MAX_NAME} characters")
        return cls(
            name=check_model(d["name"], "name"),
            digest=check_digest(d["digest"], "digest"),
            names=tuple(names),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the request's body."""
        return {"name": self.name, "digest": self.digest, "names": list(self.names)}


def prefix_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that name layers 1..split; :class:`BadRequestError` for anything unexpected."""
    name, precision = document["split_name"], document.get(PRECISION, "fp32")
    if precision not in get_args(Precision):
        raise BadRequestError(f"{PRECISION}: expected one of {', '.join(get_args(Precision))}")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise BadRequestError(f"split_name: expected a string of 1 to {MAX_NAME} characters")
    return {
        "model": ModelReference.from_json(document["model"]),
        "split": check_int(document["split"], 1, MAX_SPLIT, "split"),
        "split_name": name,
        "precision": precision,
    }


def deadline_of(text: str | None) -> float | None:
    """Return the seconds of a :data:`DEADLINE_HEADER`, None without one; :class:`BadRequestError` for
    anything else.
    """
    if text is None:
        return None
    seconds = float(text) if DECIMAL_PATTERN.fullmatch(text) else 0.0
    if not 0 < seconds <= MAX_DEADLINE:
        raise BadRequestError(
            f"{DEADLINE_HEADER}: expected a decimal number of seconds above 0, at most {MAX_DEADLINE:.0f}"
        )
    return seconds


def stall_of(text: str | None) -> float | None:
    """Return the share in a :data:`STALL_HEADER`, None without one; :class:`BadRequestError` for anything else."""
    if text is None:
        return None
    share = float(text) if DECIMAL_PATTERN.fullmatch(text) else -1.0
    if not 0 <= share <= 1:
        raise BadRequestError(f"{STALL_HEADER}: expected a decimal number from 0 to 1")
    return share


def _job(document: dict[str, Any]) -> str:
    job = document.get("job", "")
    if not isinstance(job, str) or len(job) > MAX_JOB or not (job.isalnum() or not job) or not job.isascii():
        raise BadRequestError(f"job: expected at most {MAX_JOB} ASCII letters and digits")
    return job


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """Answer to ``GET /v1/datasets/NAME``: enough to plan and to receive, without any per-sample data."""

    reference: DatasetReference
    count: int
    classes: tuple[str, ...]
    total_bytes: int
    layout: dict[str, Any]
    """Form of a stored sample; parsed by :class:`hapi.data.manifest.SampleLayout`."""
    transform: TransformSpec | None
    """The dataset's own transform; a request may carry another."""
    group: int
    """Samples of a chunk that the server reads at once."""
    window: int
    """Chunks that it has room to keep open at a time."""
    prefers_chunks: bool = False
    """True when single samples come slowly from the server's store: the default order is then chunk windows.
    """
    label_kind: LabelKind = "single"
    """Kind of the labels; see :class:`hapi.wire.labels.LabelForm`."""
    label_counts: tuple[int, ...] = ()
    """Samples of each class; none for numbers as labels, and from a server that does not tell."""
    keeps_features: bool = False
    """True when the server keeps extracted features on its disk for later requests, of any job."""

    @property
    def label_form(self) -> LabelForm:
        """Form of the labels."""
        return LabelForm(self.label_kind, len(self.classes))

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse; fields of later versions are left out, anything else is a :class:`BadRequestError`."""
        sizes = ("count", "total_bytes", "group", "window")
        names = dict.fromkeys(("reference", "classes", "layout", "transform", *sizes), True)
        flags = ("prefers_chunks", "keeps_features")
        optional = dict.fromkeys((*flags, "label_kind", "label_counts"), False)
        d = strict_fields(document, {**names, **optional}, "dataset description", answer=True)
        for flag in flags:
            if not isinstance(d.get(flag, False), bool):
                raise BadRequestError(f"dataset description: {flag} is not true or false")
        classes, layout = d["classes"], d["layout"]
        if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
            raise BadRequestError("dataset description: classes is not a list of strings")
        if len(classes) > MAX_CLASSES or any(len(c) > MAX_CLASS_NAME for c in classes):
            raise BadRequestError(
                f"dataset description: more than {MAX_CLASSES} classes, or one's name of more than "
                f"{MAX_CLASS_NAME} characters"
            )
        if not isinstance(layout, dict):
            raise BadRequestError("dataset description: layout is not an object")
        counts = d.get("label_counts", [])
        if not isinstance(counts, list) or len(counts) not in (0, len(classes)):
            raise BadRequestError(
                "dataset description: label_counts is not a list of a number for each class"
            )
        kind = check_label_kind(d.get("label_kind", "single"), "dataset description: label_kind")
        return cls(
            reference=DatasetReference.from_json(d["reference"], answer=True),
            count=check_int(d["count"], 0, 1 << 48, "count"),
            classes=tuple(map(class_name, classes)),
            total_bytes=check_int(d["total_bytes"], 0, 1 << 62, "total_bytes"),
            layout=layout,
            transform=None
            if d["transform"] is None
            else TransformSpec.from_json(d["transform"], answer=True),
            group=check_int(d["group"], 1, MOST_GROUP, "group"),
            window=check_int(d["window"], 1, MOST_GROUP, "window"),
            prefers_chunks=d.get("prefers_chunks", False),
            label_kind=LabelForm(kind, len(classes)).checked("dataset description: classes").kind,
            label_counts=tuple(check_int(n, 0, 1 << 48, "label_counts") for n in counts),
            keeps_features=d.get("keeps_features", False),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the answer's body."""
        return {
            "reference": self.reference.to_json(),
            "count": self.count,
            "classes": list(self.classes),
            "total_bytes": self.total_bytes,
            "layout": self.layout,
            "transform": None if self.transform is None else self.transform.to_json(),
            "group": self.group,
            "window": self.window,
            **({"prefers_chunks": True} if self.prefers_chunks else {}),
            **({} if self.label_kind == "single" else {"label_kind": self.label_kind}),
            **({"label_counts": list(self.label_counts)} if self.label_counts else {}),
            **({"keeps_features": True} if self.keeps_features else {}),
        }
