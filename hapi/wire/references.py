"""How a request names things: data set, model, transform. Names under configured roots, never paths.

Every reference carries the version or digest that the client expects, so that any server can answer any
request, and one that holds something else says 409 instead of computing something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, get_args

from hapi.errors import BadRequestError

NAME_PATTERN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9_-])?")
"""Names of data sets and models: no slash, no leading dot, at most 128 characters."""

DIGEST_PATTERN = re.compile(r"[0-9a-f]{16,64}")

MAX_IMAGE_SIDE = 4096
"""Largest side, in pixels, that a transform may ask for (bounds memory before allocation)."""


def check_name(name: Any, what: str) -> str:
    """``name`` if it is a well-formed data set or model name, else :class:`BadRequestError`."""
    if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None or ".." in name:
        raise BadRequestError(
            f"{what}: {_short(name)} is not a name; use letters, digits, '.', '_' and '-', at most 128, without '/'"
        )
    return name


def check_digest(digest: Any, what: str) -> str:
    """``digest`` if it is 16 to 64 lower-case hex digits, else :class:`BadRequestError`."""
    if not isinstance(digest, str) or DIGEST_PATTERN.fullmatch(digest) is None:
        raise BadRequestError(f"{what}: {_short(digest)} is not a digest (16 to 64 hex digits)")
    return digest


def strict_fields(document: Any, allowed: Mapping[str, bool], what: str) -> dict[str, Any]:
    """``document`` as a dict with exactly the keys of ``allowed`` (name to "is required")."""
    if not isinstance(document, dict):
        raise BadRequestError(f"{what}: expected an object, got {type(document).__name__}")
    unknown = sorted(set(document) - set(allowed))
    if unknown:
        raise BadRequestError(
            f"{what}: unknown field {_short(unknown[0])}; known are {', '.join(sorted(allowed))}"
        )
    missing = sorted(name for name, required in allowed.items() if required and name not in document)
    if missing:
        raise BadRequestError(f"{what}: field {missing[0]!r} is missing")
    return document


def check_int(value: Any, low: int, high: int, what: str) -> int:
    """``value`` if it is an int (no bool) in low..high, else :class:`BadRequestError`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequestError(f"{what}: expected an integer from {low} to {high}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, kw_only=True)
class DatasetReference:
    """A data set of the server's store, at one version."""

    name: str
    version: str
    """Digest of the manifest's content (hex)."""

    @classmethod
    def from_json(cls, document: Any) -> Self:
        d = strict_fields(document, {"name": True, "version": True}, "dataset")
        return cls(
            name=check_name(d["name"], "dataset.name"), version=check_digest(d["version"], "dataset.version")
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


ModelSource = Literal["zoo", "store"]

ARCHITECTURE_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
WEIGHTS_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class ModelReference:
    """Which frozen layers to run.

    ``source`` ``"store"``: ``name`` is a model pushed into the store. ``source`` ``"zoo"``: the server
    builds ``name`` (a torchvision architecture, ``timm:NAME``, or a ``package.module:factory`` that its
    operator allowed) itself, with ``weights`` ``"random:SEED"`` or the name of a torchvision weights entry.
    """

    source: ModelSource
    name: str
    weights: str
    """For ``store`` always ``"pushed"``."""
    digest: str
    """Digest over the structure and tensor content of layers 1..s, see ``models.layers.front_digest``."""
    blocks: tuple[str, ...] = ()
    """Module paths run in sequence, for a model that cannot be traced; empty for the automatic list."""
    input_shape: tuple[int, ...] = (3, 224, 224)
    """Shape of one sample (C, H, W) at which the model was traced."""

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Checked strictly; :class:`BadRequestError` names the field."""
        known = {f.name: f.name not in ("blocks", "input_shape") for f in fields(cls)}
        d = strict_fields(document, known, "model")
        source = d["source"]
        if source not in get_args(ModelSource):
            raise BadRequestError(f"model.source: expected one of {', '.join(get_args(ModelSource))}")
        name, weights = d["name"], d["weights"]
        if source == "store":
            check_name(name, "model.name")
        elif not isinstance(name, str) or ARCHITECTURE_PATTERN.fullmatch(name) is None or ".." in name:
            raise BadRequestError(f"model.name: {_short(name)} is not an architecture's name")
        if not isinstance(weights, str) or WEIGHTS_PATTERN.fullmatch(weights) is None:
            raise BadRequestError(f"model.weights: {_short(weights)} is not a weights name")
        if (source == "store") != (weights == "pushed"):
            raise BadRequestError(
                "model.weights: 'pushed' goes with the source 'store', and nothing else does"
            )
        blocks = d.get("blocks", [])
        if (
            not isinstance(blocks, list)
            or len(blocks) > 1000
            or not all(isinstance(b, str) and ARCHITECTURE_PATTERN.fullmatch(b) for b in blocks)
        ):
            raise BadRequestError("model.blocks: expected a list of module paths")
        shape = d.get("input_shape", [3, 224, 224])
        if not isinstance(shape, list) or not 1 <= len(shape) <= 4:
            raise BadRequestError("model.input_shape: expected a list of 1 to 4 integers")
        sides = tuple(check_int(v, 1, MAX_IMAGE_SIDE, "model.input_shape") for v in shape)
        digest = check_digest(d["digest"], "model.digest")
        return cls(
            source=source, name=name, weights=weights, digest=digest, blocks=tuple(blocks), input_shape=sides
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "blocks": list(self.blocks), "input_shape": list(self.input_shape)}


@dataclass(frozen=True, kw_only=True)
class TransformSpec:
    """The deterministic way from stored bytes to the model's input; both tiers apply the same one.

    Decode, to RGB, resize the short side to ``resize`` (bilinear, antialiased), centre-crop to
    ``crop`` x ``crop``, scale to 0..1, subtract ``mean`` and divide by ``std`` per channel.
    The defaults are torchvision's for its ImageNet weights.
    """

    resize: int = 256
    crop: int = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Checked strictly; :class:`BadRequestError` names the field."""
        d = strict_fields(document, dict.fromkeys(("resize", "crop", "mean", "std"), True), "transform")
        crop = check_int(d["crop"], 1, MAX_IMAGE_SIDE, "transform.crop")
        resize = check_int(d["resize"], crop, MAX_IMAGE_SIDE, "transform.resize")
        return cls(
            resize=resize,
            crop=crop,
            mean=_three(d["mean"], -1e3, "transform.mean"),
            std=_three(d["std"], 1e-6, "transform.std"),
        )

    def to_json(self) -> dict[str, Any]:
        return {"resize": self.resize, "crop": self.crop, "mean": list(self.mean), "std": list(self.std)}

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of one transformed sample: (channels, height, width)."""
        return (3, self.crop, self.crop)

    @classmethod
    def for_image_size(cls, size: int) -> Self:
        """The usual evaluation transform for ``size`` x ``size`` inputs (short side resized to 8/7 of it)."""
        return cls(resize=max(size, round(size * 256 / 224)), crop=size)


def _three(value: Any, low: float, what: str) -> tuple[float, float, float]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise BadRequestError(f"{what}: expected three numbers")
    for v in value:
        if isinstance(v, bool) or not isinstance(v, int | float) or not low <= v <= 1e3:
            raise BadRequestError(f"{what}: expected numbers from {low:g} to 1000, got {_short(v)}")
    return (float(value[0]), float(value[1]), float(value[2]))
