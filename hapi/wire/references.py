"""References of a request to dataset, model and transform: names under configured roots, never paths.

Every reference carries the version or digest that the client expects, so that any server can answer any
request. A server that holds something else answers 409 instead of computing something else.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args

from hapi.errors import BadRequestError, UsageError
from hapi.wire.documents import check_int, check_number, shortened, strict_fields

NAME_PATTERN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9_-])?")
"""Names of datasets and models: no slash, no leading dot, at most 128 characters."""

MODEL_PATTERN = re.compile(rf"{NAME_PATTERN.pattern}(?:@{NAME_PATTERN.pattern})?")
"""References to pushed models: a name, or a name with a version, a tag or the digits of a digest."""

DIGEST_PATTERN = re.compile(r"[0-9a-f]{16,64}")

LEAST_DIGEST_DIGITS = 8
"""Digits of a digest that are enough to refer to a model by it."""

MAX_IMAGE_SIDE = 4096
"""Largest side, in pixels, that a transform may ask for (bounds memory before allocation)."""

MAX_SIDE, MAX_ELEMENTS = 1 << 24, 1 << 48
"""Largest side and most elements of a sample or a model's input, whatever they stand for."""

MAX_LEVEL, MIN_STD = 1e3, 1e-6
"""Bounds of a transform's mean and standard deviation: neither is above the first, no deviation below the second."""

MAX_SEED = (1 << 63) - 1
"""Largest seed and largest epoch of a random transform."""


def check_name(name: Any, what: str) -> str:
    """Return ``name`` if it is a well-formed dataset or model name; raise :class:`BadRequestError` otherwise."""
    if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None or ".." in name:
        raise BadRequestError(
            f"{what}: {shortened(name)} is not a name; use letters, digits, '.', '_' and '-', at most 128, without '/'"
        )
    return name


def given_name(name: str, what: str) -> str:
    """Return ``name``, which a person gave as ``what``, if it is well formed; raise :class:`UsageError`
    otherwise.
    """
    try:
        return check_name(name, what)
    except BadRequestError as error:
        raise UsageError(str(error)) from None


def check_shape(shape: Any, what: str) -> tuple[int, ...]:
    """Return ``shape``, of a sample or an input, if it has 1 to 4 sides; raise :class:`BadRequestError` otherwise."""
    if not isinstance(shape, list) or not 1 <= len(shape) <= 4:
        raise BadRequestError(f"{what}: expected a list of 1 to 4 integers")
    sides = tuple(check_int(side, 1, MAX_SIDE, what) for side in shape)
    if math.prod(sides) > MAX_ELEMENTS:
        raise BadRequestError(f"{what}: {shortened(shape)} has more than {MAX_ELEMENTS} elements")
    return sides


def check_model(reference: Any, what: str) -> str:
    """Return ``reference`` if it is a well-formed NAME or NAME@VERSION, NAME@TAG or NAME@DIGEST of a pushed model;
    raise :class:`BadRequestError` otherwise.
    """
    name, at, wanted = reference.partition("@") if isinstance(reference, str) else (reference, "", "")
    check_name(name, what)
    if at:
        check_name(wanted, f"{what}: version, tag or digest after the @")
    return f"{name}{at}{wanted}"


def given_model(reference: str, what: str) -> str:
    """Return ``reference``, which a person gave as ``what``, if :func:`check_model` accepts it; raise
    :class:`UsageError` otherwise.
    """
    try:
        return check_model(reference, what)
    except BadRequestError as error:
        raise UsageError(str(error)) from None


def check_tag(tag: Any, what: str) -> str:
    """Return ``tag`` if it is a name that is neither a number nor the digits of a digest; raise
    :class:`BadRequestError` otherwise.
    """
    check_name(tag, what)
    if tag.isdigit() or (len(tag) >= LEAST_DIGEST_DIGITS and not set(tag) - set("0123456789abcdef")):
        raise BadRequestError(f"{what}: {tag!r} reads as a version or a digest; use another name")
    return str(tag)


def check_digest(digest: Any, what: str) -> str:
    """Return ``digest`` if it is 16 to 64 lower-case hex digits; raise :class:`BadRequestError` otherwise."""
    if not isinstance(digest, str) or DIGEST_PATTERN.fullmatch(digest) is None:
        raise BadRequestError(f"{what}: {shortened(digest)} is not a digest (16 to 64 hex digits)")
    return digest


@dataclass(frozen=True, kw_only=True)
class DatasetReference:
    """A dataset of the server's store, at one version."""

    name: str
    version: str
    """Digest of the manifest's content (hex)."""

    @classmethod
    def from_json(cls, document: Any, *, answer: bool = False) -> Self:
        """Parse strictly, but for unknown fields of an ``answer``; :class:`BadRequestError` names the field."""
        d = strict_fields(document, {"name": True, "version": True}, "dataset", answer=answer)
        return cls(
            name=check_name(d["name"], "dataset.name"), version=check_digest(d["version"], "dataset.version")
        )

    def to_json(self) -> dict[str, Any]:
        """Return the reference as JSON."""
        return asdict(self)


ModelSource = Literal["zoo", "store"]

Precision = Literal["fp32", "bf16", "fp16"]
"""Type of frozen layers' results, and so of features on the wire."""

ARCHITECTURE_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
WEIGHTS_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,100}")


@dataclass(frozen=True, kw_only=True)
class ModelReference:
    """The frozen layers to run.

    ``source`` ``"store"``: ``name`` is a model pushed into the store. ``source`` ``"zoo"``: the server builds
    ``name`` itself (a torchvision architecture, ``timm:NAME``, or a ``package.module:factory`` that its
    operator allowed), with ``weights`` ``"random:SEED"`` or the name of a torchvision weights entry.
    """

    source: ModelSource
    name: str
    weights: str
    """Always ``"pushed"`` for a model from the store."""
    digest: str
    """Digest of the structure and tensor content of layers 1..s (:mod:`hapi.models.graph.digest`)."""
    blocks: tuple[str, ...] = ()
    """Module paths run in sequence, for a model that cannot be traced; empty for the automatic list."""
    input_shape: tuple[int, ...] = (3, 224, 224)
    """Shape of one sample (C, H, W) at which the model was traced."""

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse strictly; :class:`BadRequestError` names the field."""
        known = {f.name: f.name not in ("blocks", "input_shape") for f in fields(cls)}
        d = strict_fields(document, known, "model")
        source = d["source"]
        if source not in get_args(ModelSource):
            raise BadRequestError(f"model.source: expected one of {', '.join(get_args(ModelSource))}")
        name, weights = d["name"], d["weights"]
        if source == "store":
            check_model(name, "model.name")
        elif not isinstance(name, str) or ARCHITECTURE_PATTERN.fullmatch(name) is None or ".." in name:
            raise BadRequestError(f"model.name: {shortened(name)} is not an architecture's name")
        if not isinstance(weights, str) or WEIGHTS_PATTERN.fullmatch(weights) is None:
            raise BadRequestError(f"model.weights: {shortened(weights)} is not a weights name")
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
        sides = check_shape(d.get("input_shape", [3, 224, 224]), "model.input_shape")
        digest = check_digest(d["digest"], "model.digest")
        return cls(
            source=source, name=name, weights=weights, digest=digest, blocks=tuple(blocks), input_shape=sides
        )

    def to_json(self) -> dict[str, Any]:
        """Return the reference as JSON."""
        return {**asdict(self), "blocks": list(self.blocks), "input_shape": list(self.input_shape)}


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random parts of a training transform, with the meaning and order of torchvision's ``transforms.v2``.

    ``RandomResizedCrop(scale, ratio)`` of the decoded image, or ``RandomCrop(padding)`` of the resized one,
    or neither (the centre crop); then ``RandomHorizontalFlip(flip)``; then ``ColorJitter(brightness,
    contrast, saturation, hue)``.
    """

    scale: tuple[float, float] | None = None
    """Smallest and largest share of the image's area that is cut out; None: no resized crop."""
    ratio: tuple[float, float] | None = None
    """Smallest and largest width by height of the cut; goes with ``scale``."""
    padding: int | None = None
    """Black pixels around the resized image before a crop is cut out anywhere; not with ``scale``."""
    flip: float = 0.0
    """Probability of being mirrored."""
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    JITTER: ClassVar = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.5}
    """The colour fields, with the most that each may be."""

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Parse strictly; :class:`BadRequestError` names the field."""
        what = "transform.augment"
        d = strict_fields(document, dict.fromkeys((f.name for f in fields(cls)), False), what)
        if ("scale" in d) != ("ratio" in d):
            raise BadRequestError(f"{what}: scale and ratio go together")
        if "scale" in d and "padding" in d:
            raise BadRequestError(
                f"{what}: scale belongs to a resized crop, padding to a plain one; give one of them"
            )
        found: dict[str, Any] = {}
        for name, low, high in (("scale", 1e-6, 1.0), ("ratio", 0.1, 10.0)):
            if name in d:
                found[name] = _range_of(d[name], low, high, f"{what}.{name}")
        if "padding" in d:
            found["padding"] = check_int(d["padding"], 0, MAX_IMAGE_SIDE, f"{what}.padding")
        for name, maximum in {"flip": 1.0, **cls.JITTER}.items():
            found[name] = check_number(d.get(name, 0.0), 0.0, maximum, f"{what}.{name}")
        augment = cls(**found)
        if augment == cls():
            raise BadRequestError(f"{what}: nothing in it is random; leave it out")
        return augment

    def to_json(self) -> dict[str, Any]:
        """Return the parts that are on, as JSON."""
        on = {name: value for name, value in asdict(self).items() if value is not None and value != 0.0}
        if self.padding is not None:
            on["padding"] = self.padding
        return {name: list(value) if isinstance(value, tuple) else value for name, value in on.items()}

    @property
    def jitters(self) -> bool:
        """True when it changes colours."""
        return any(getattr(self, name) for name in self.JITTER)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One outcome among all random ones: with the sample's id it decides everything random in a transform."""

    seed: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class TransformSpec:
    """The way from stored bytes to the model's input; both tiers apply the same one.

    Decode, to RGB, resize the short side to ``resize`` (bilinear, antialiased), centre-crop to
    ``crop`` x ``crop``, scale to 0..1, subtract ``mean`` and divide by ``std`` per channel.
    The defaults are torchvision's for its ImageNet weights. ``augment`` makes it random, of output size ``crop`` too;
    what a sample then becomes depends on ``draw`` and its id.
    """

    resize: int = 256
    crop: int = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    augment: Augmentation | None = None
    draw: Draw | None = None
    """Outcome of a random transform, once it is known; it belongs to an epoch and not to the job."""

    @classmethod
    def from_json(cls, document: Any, *, random: bool = False, answer: bool = False) -> Self:
        """Parse strictly, but for unknown fields of an ``answer``; :class:`BadRequestError` names the field.

        ``random`` allows a random transform, which then carries its seed and epoch.
        """
        known = dict.fromkeys(("resize", "crop", "mean", "std"), True)
        if random and isinstance(document, dict) and {"augment", "seed", "epoch"} & set(document):
            known |= dict.fromkeys(("augment", "seed", "epoch"), True)
        d = strict_fields(document, known, "transform", answer=answer)
        crop = check_int(d["crop"], 1, MAX_IMAGE_SIDE, "transform.crop")
        resize = check_int(d["resize"], crop, MAX_IMAGE_SIDE, "transform.resize")
        augment, draw = None, None
        if "augment" in known:
            augment = Augmentation.from_json(d["augment"])
            seed, epoch = (check_int(d[n], 0, MAX_SEED, f"transform.{n}") for n in ("seed", "epoch"))
            draw = Draw(seed=seed, epoch=epoch)
        return cls(
            resize=resize,
            crop=crop,
            mean=_three(d["mean"], -MAX_LEVEL, "transform.mean"),
            std=_three(d["std"], MIN_STD, "transform.std"),
            augment=augment,
            draw=draw,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the transform as JSON; fields of random transforms are left out of others."""
        return {
            "resize": self.resize,
            "crop": self.crop,
            "mean": list(self.mean),
            "std": list(self.std),
            **({} if self.augment is None else {"augment": self.augment.to_json()}),
            **({} if self.draw is None else asdict(self.draw)),
        }

    @property
    def random(self) -> bool:
        """True when a sample looks different in each epoch, so that nothing made from it can be reused in
        another.
        """
        return self.augment is not None

    def at(self, seed: int, epoch: int) -> Self:
        """Return the transform of one epoch: itself, or one outcome of a random one."""
        return replace(self, draw=Draw(seed=seed, epoch=epoch)) if self.random else self

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of one transformed sample: (channels, height, width)."""
        return (3, self.crop, self.crop)

    @classmethod
    def for_image_size(cls, size: int) -> Self:
        """Return the usual evaluation transform for ``size`` x ``size`` inputs (short side resized to 8/7 of
        it).
        """
        return cls(resize=max(size, min(MAX_IMAGE_SIDE, round(size * 256 / 224))), crop=size)


def _three(value: Any, low: float, what: str) -> tuple[float, float, float]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise BadRequestError(f"{what}: expected three numbers")
    first, second, third = (check_number(v, low, MAX_LEVEL, what) for v in value)
    return (first, second, third)


def _range_of(value: Any, low: float, high: float, what: str) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise BadRequestError(f"{what}: expected two numbers")
    first, second = (check_number(v, low, high, what) for v in value)
    if first > second:
        raise BadRequestError(f"{what}: {first:g} to {second:g} is the wrong way round")
    return (first, second)
